"""The version of the package, for files that name it, and those of the libraries that results depend on."""

import importlib.metadata
import platform
import sys

__version__ = "0.1.0"

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "peft", "numpy")


def library_versions() -> dict[str, str]:
    """The versions of Python and of the libraries, as they are imported here, or else as they are installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


def _version(name: str) -> str:
    found = getattr(sys.modules.get(name), "__version__", None)
    if found is not None:
        return str(found)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
