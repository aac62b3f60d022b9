"""The files that ranks must have alike: the package, users' modules, the tokenizer, and the data.

Ranks of one host almost always open the very same files, which a look at their inodes tells. Only where that does not
settle it is anything read: by one rank of each host, or by all if ranks of a host have files of their own.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from shardproof.config.evaluation_sets import named_sources
from shardproof.config.schema import Recipe
from shardproof.errors import ShardproofError
from shardproof.rl.sources.readers import files_of
from shardproof.user_code import is_user_name, look_for_users_code

PACKAGE = Path(__file__).parents[1]
_TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
)
_ELSEWHERE = ("hf:", "environment:")  # what begins the name of data that is compared once it is read
_NO_FILE = "no source file"


@dataclass(frozen=True)
class Compared:
    """Something that lies in files, and must be the same on every rank."""

    paths: tuple[Path, ...]
    module: ModuleSpec | None = None  # of a user's code, which may lie in an archive

    def place(self) -> list[object]:
        """What two ranks of one host have in common if they open the same files."""
        return [_status(path) for path in self.paths]

    def digest(self) -> str | None:
        """A sha256 of the content; None if a file is missing or cannot be read."""
        if self.module is not None or not self.paths:
            return _spec_digest(self.module)
        digests = [_file_digest(path) for path in self.paths]
        return None if None in digests else ", ".join(map(str, digests))


class Package(Compared):
    """The folder of a package: what is compared are its modules."""

    def place(self) -> list[object]:
        # Who sees the same folder sees the same files in it.
        return [os.path.realpath(self.paths[0]), *super().place()[:1]]

    def digest(self) -> str:
        return sources_digest(self.paths[0])


def compared_files(recipe: Recipe) -> dict[str, Compared]:
    """What is compared, as {"class/name": files}. A tokenizer that this host does not have is left out."""
    found: dict[str, Compared] = {"code/shardproof": Package((PACKAGE,))}
    for name in _rewards(recipe):
        found[f"rewards/source of {name}"] = module_file(name)
    for kind, name in [*recipe.user_code, *(("environment", name) for name in _environment_code(recipe))]:
        found[f"extensions/source of the {kind} {name}"] = module_file(name)
    folder = Path(os.path.expanduser(recipe.model.path))
    for path in _tokenizer_files(folder):
        found[f"tokenizer/{path.relative_to(folder).as_posix()}"] = Compared((path,))
    for key, source in named_sources(recipe).items():
        if not source.startswith(_ELSEWHERE):
            found[f"data/{key}"] = Compared(tuple(_files(source)))
    return found


def _files(source: str) -> list[Path]:
    """The files of a source; the source itself if it names none, which reading it says in words."""
    try:
        return files_of(source)
    except ShardproofError:
        return [Path(source)]


def _rewards(recipe: Recipe) -> list[str]:
    functions = recipe.reward.functions if recipe.reward is not None else []
    return [spec.name for spec in functions if is_user_name(spec.name)]


def _environment_code(recipe: Recipe) -> list[str]:
    """Each module:name that the environment's workers import."""
    if recipe.environment is None:
        return []
    return [n for n in (recipe.environment.name, *recipe.environment.tools.functions) if is_user_name(n)]


def _tokenizer_files(folder: Path) -> Iterator[Path]:
    for pattern in _TOKENIZER_FILES if os.path.isdir(folder) else ():
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())


def module_file(name: str) -> Compared:
    """The file that a user's module:name comes from."""
    spec = find_module(name)
    path = spec.origin if spec is not None else None
    return Compared(() if path is None else (Path(path),), spec)


def find_module(name: str) -> ModuleSpec | None:
    """Where the module of module:name would be found, without importing it: only workers do that to some."""
    look_for_users_code()
    path, spec = None, None
    for part in itertools.accumulate(name.partition(":")[0].split("."), "{}.{}".format):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _spec_digest(spec: ModuleSpec | None) -> str:
    if (
        spec is None
        or spec.origin is None
        or not spec.origin.endswith(".py")
        or not hasattr(spec.loader, "get_data")
    ):
        return _NO_FILE
    try:
        # The loader also reads what lies in an archive.
        return hashlib.sha256(spec.loader.get_data(spec.origin)).hexdigest()[:12]
    except OSError:
        return _NO_FILE


def sources_digest(folder: Path) -> str:
    """A sha256 over names and content of a package's modules. Not kept: files may change below a long-lived process."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*.py") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _file_digest(path: Path) -> str | None:
    if not os.path.isfile(path):  # a pipe would never end
        return None
    try:
        with path.open("rb") as file:
            return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError:
        return None


def _status(path: Path) -> object:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # what can be no path, and what lies in an archive
        return str(path)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def digests_of(files: Iterable[tuple[str, Compared]]) -> dict[str, str]:
    """What the files hold, by name; what is missing is left out."""
    return {key: digest for key, each in files if (digest := each.digest()) is not None}
