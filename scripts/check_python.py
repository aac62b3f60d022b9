"""End with a clear message where Python is too old for this project. Runs on any Python 3, before anything is installed."""

import os
import re
import sys


def oldest_version():
    """The version that pyproject.toml asks for, as a pair of numbers."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(os.path.join(folder, "pyproject.toml")) as file:
        major, minor = re.search(r'^requires-python *= *">=(\d+)\.(\d+)', file.read(), re.MULTILINE).groups()
    return int(major), int(minor)


def main(version=sys.version_info):
    """Exit code 1 and a message if `version` is older than what is asked for, else nothing."""
    oldest = oldest_version()
    if tuple(version[:2]) < oldest:
        needed, found = (".".join(map(str, pair)) for pair in (oldest, version[:2]))
        message = f"shardproof needs Python {needed} or newer; {sys.executable} is {found}."
        sys.exit(f"{message}\nFix: make setup PYTHON=python{needed}")


if __name__ == "__main__":
    main()
