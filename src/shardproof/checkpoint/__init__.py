"""Checkpoint files: where they are, what is in them, which bytes a parameter needs."""
