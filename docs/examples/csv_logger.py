"""A logger: one CSV file per metric. Start it with `python csv_logger.py recipe.toml folder`."""

import sys
from pathlib import Path

from shardproof.config.load import load_recipe
from shardproof.rl.loop import train


class CsvLogger:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def log(self, step, metrics):
        for name, value in metrics.items():
            with (self.folder / f"{name.replace('/', '_')}.csv").open("a") as file:
                file.write(f"{step},{value}\n")

    def close(self):
        pass


if __name__ == "__main__":
    train(load_recipe(sys.argv[1]), loggers=[CsvLogger(sys.argv[2])])
