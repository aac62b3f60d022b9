"""The version of the package, for files that name it."""

__version__ = "0.1.0"
