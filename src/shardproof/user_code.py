"""Objects that users name as `module:name`: rewards, algorithms, engines, optimizers, environments."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from functools import reduce
from pathlib import Path
from typing import Any

from shardproof.errors import did_you_mean, fail

_PACKAGE = str(Path(__file__).parent) + os.sep
_FOLDER = "SHARDPROOF_RECIPE_FOLDER"  # in the environment, so that processes started later know it too


def is_user_name(name: str) -> bool:
    """Whether `name` has the form `module:name`."""
    module, colon, path = name.partition(":")
    return bool(colon and module and path)


def find_modules_in(folder: str | os.PathLike[str]) -> None:
    """Let users' modules be found in this folder too, after all others, here and in processes that are started later."""
    # Not by PYTHONPATH, whose folders come first: a file named like a module of the standard library would hide it.
    os.environ[_FOLDER] = os.path.abspath(folder)


def import_named(kind: str, name: str) -> Any:
    """The object that `module:name` stands for; `kind` says in errors what it should be ("reward", "algorithm")."""
    module_name, _, path = name.partition(":")
    module = _import(kind, name, module_name)
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError as error:
        hint = did_you_mean(path, [key for key in vars(module) if not key.startswith("_")])
        message = f"{kind} {name!r}: {module_name!r} has no {path!r}.{hint}"
        raise fail(
            "C001", kind, message, fix=f"name a built-in {kind}, or your own as module:name"
        ) from error


def look_for_users_code() -> None:
    """Let modules be found where users keep them: in the folder where they start the run, and by the recipe."""
    # An installed command's path begins at its own folder.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    beside = os.environ.get(_FOLDER)
    if beside and beside not in sys.path:
        sys.path.append(beside)


def _import(kind: str, name: str, module_name: str) -> Any:
    look_for_users_code()
    process = os.getpid()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        message = f"{kind} {name!r} cannot be imported: {describe_error(error)}"
        fix = "repair that module, or put it beside the recipe or on PYTHONPATH"
        if module_name.endswith(".py") or "/" in module_name:
            wanted = f"{Path(module_name).stem}:{name.partition(':')[2]}"
            fix = f"name the module, not its file: {wanted}, with the file beside the recipe or its folder on PYTHONPATH"
        raise fail("C001", kind, message, fix=fix) from error
    finally:
        end_fork_of(process)


def end_fork_of(process: int) -> None:
    """End the process that calls this if it is not `process`: a user's code forked, and its child came back as well."""
    if os.getpid() != process:
        os._exit(0)


def describe_error(error: BaseException) -> str:
    """The error in one line, with the user's line that it came from."""
    ours = (_PACKAGE, importlib.__file__, "<frozen importlib")
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(ours)]
    where = f" ({os.path.basename(lines[-1].filename)}:{lines[-1].lineno})" if lines else ""
    try:
        text = str(error)[:300]
    except KeyboardInterrupt:
        raise
    except BaseException as another:
        text = f"its message cannot be read ({type(another).__name__})"
    return f"{type(error).__name__}: {text}{where}"
