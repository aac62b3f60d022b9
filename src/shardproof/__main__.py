"""`python -m shardproof`, and `torchrun -m shardproof`."""

from shardproof.cli import app

if __name__ == "__main__":
    app()
