"""Ranks agree on what they run before anything starts: versions, code, recipe, data and rewards.

Nothing later would notice: a rank with another learning rate, other data or other code takes part in every collective,
and the run ends as if nothing were wrong.
"""

from __future__ import annotations

import array
import hashlib
import importlib.metadata
import itertools
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

import torch.distributed as dist

from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.errors import error_for
from shardproof.findings import Finding
from shardproof.rl.checks import Inputs
from shardproof.rl.data import Prompt, rows_digest
from shardproof.rl.same_run import leaves
from shardproof.user_code import is_user_name

PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "tokenizers", "peft", "numpy")
# Paths are each node's own. What lies there is compared: rows here, checkpoints when they are loaded (L111).
_PATHS = {"model.path", "reference.path", "critic.path", "data.train", "data.evaluation", "output.folder"}
_PATHS |= {"environment.python", "rollout.vllm.secret_file"}
# How a node starts its ranks, and where rank 0 finds or keeps its servers.
_LOCAL = {
    "train.ranks",
    *(f"rollout.vllm.{key}" for key in ("url", "devices", "host", "port", "allow_remote", "log")),
}
# In this order: another version of a library explains differences that follow.
_FIXES = {
    "versions": "install the same versions on every node",
    "code": "install the same shardproof on every node",
    "recipe": "start every rank with the same recipe and overrides",
    "data": "give every node the same data and tokenizer",
    "rewards": "give every node the same reward modules",
    "extensions": "give every node the same modules",
}
_MAX_KEYS, _MAX_CHARACTERS, _MAX_RANKS = 8, 80, 8


def agree_on(recipe: Recipe, inputs: Inputs | None = None, options: object = None) -> None:
    """Raise C003 on every rank unless all of them run the same. Collective: every rank."""
    if dist.get_world_size() == 1:
        return
    with together("settings"):
        mine = identity(recipe, inputs, options)
    require_agreement(mine)


def identity(recipe: Recipe, inputs: Inputs | None = None, options: object = None) -> dict[str, str]:
    """What must be the same on every rank, as {"class/name": value or digest}.

    Data, rewards and users' own modules are part of it once `inputs` are read. `options` are those of the command.
    """
    found = {"versions/python": platform.python_version()}
    found |= {f"versions/{name}": _version(name) for name in LIBRARIES}
    found["code/shardproof"] = _sources_digest(PACKAGE)
    found |= {f"recipe/{key}": value for key, value in _settings(recipe)}
    if options is not None:
        found["recipe/options"] = repr(options)
    if inputs is not None:
        for name, prompts in (("train", inputs.prompts), ("evaluation", inputs.held_out)):
            found[f"data/data.{name}"] = f"{len(prompts)} rows, sha256 {rows_digest(prompts)[:12]}"
            found[f"data/tokens of data.{name}"] = _tokens_digest(prompts)
        for spec in recipe.reward.functions if recipe.reward is not None else []:
            found[f"rewards/source of {spec.name}"] = _module_digest(spec.name)
        for kind, name in recipe.user_code:
            found[f"extensions/source of the {kind} {name}"] = _module_digest(name)
        for name in _environment_code(recipe):
            found[f"extensions/source of the environment {name}"] = _source_digest(name)
    return found


def _environment_code(recipe: Recipe) -> list[str]:
    """Each module:name that the environment's workers import."""
    if recipe.environment is None:
        return []
    return [n for n in (recipe.environment.name, *recipe.environment.tools.functions) if is_user_name(n)]


def require_agreement(mine: Mapping[str, str]) -> None:
    """Raise C003 on every rank, with what differs and on which rank, unless all ranks have the same identity.

    Collective: every rank.
    """
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len(set(exchange(digest))) == 1:
        return
    rows = exchange(dict(mine))
    findings = []
    for kind, fix in _FIXES.items():
        keys = dict.fromkeys(key for row in rows for key in row if key.startswith(f"{kind}/"))
        odd = [key for key in keys if len({row.get(key) for row in rows}) > 1]
        if odd:
            said = [_describe(key.partition("/")[2], [row.get(key) for row in rows]) for key in odd]
            more = f" and {len(said) - _MAX_KEYS} more" if len(said) > _MAX_KEYS else ""
            message = f"ranks do not have the same {kind}: {'; '.join(said[:_MAX_KEYS])}{more}."
            findings.append(Finding("C003", "settings", message, fix=fix))
    raise error_for(findings)


def _describe(name: str, values: list[str | None]) -> str:
    """`optimizer.lr is 0.01 on rank 1, 1e-06 on ranks 0, 2, 3`; what fewer ranks have is said first."""
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    # A tie is decided against the later ranks: rank 0 is the one whose output the user sees.
    groups = sorted(ranks.items(), key=lambda item: (len(item[1]), -item[1][0]))
    return f"{name} is {', '.join(f'{_short(value)} on {_listed(where)}' for value, where in groups)}"


def _short(value: str | None) -> str:
    text = "missing" if value is None else value
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MAX_RANKS]))}{more}"


def _version(name: str) -> str:
    """Of the library as it is imported, or else as it is installed."""
    module = sys.modules.get(name)
    found = getattr(module, "__version__", None)
    if found is not None:
        return str(found)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _settings(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """The recipe's values that must agree, by dotted key; of a path whether it is given."""
    for key, value in leaves(recipe.model_dump(mode="json")).items():
        if key in _PATHS:
            yield key, "none" if value is None else "a path"
        elif key not in _LOCAL:
            yield key, json.dumps(value)


def _sources_digest(folder: Path) -> str:
    """A sha256 over names and content of a package's modules. Not kept: files may change below a long-lived process."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*.py") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _module_digest(name: str) -> str:
    """A sha256 of the file that a user's module:name comes from; what is built in is part of the code."""
    module_name, colon, _ = name.partition(":")
    module = sys.modules.get(module_name)
    path, loader = getattr(module, "__file__", None), getattr(module, "__loader__", None)
    if not colon or path is None or not path.endswith(".py") or not hasattr(loader, "get_data"):
        return "no source file"
    # The module's own loader also reads what lies in an archive.
    return hashlib.sha256(loader.get_data(path)).hexdigest()[:12]


def _source_digest(name: str) -> str:
    """A sha256 of the file in which module:name would be found, without importing it: only workers do that."""
    path, spec = None, None
    for part in itertools.accumulate(name.partition(":")[0].split("."), "{}.{}".format):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return "no source file"
        path = spec.submodule_search_locations
    origin = spec.origin if spec is not None else None
    if origin is None or not origin.endswith(".py"):
        return "no source file"
    try:
        return hashlib.sha256(Path(origin).read_bytes()).hexdigest()[:12]
    except OSError:  # in an archive
        return "no source file"


def _tokens_digest(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        for tokens in (prompt.tokens, prompt.completion):
            digest.update(array.array("q", [len(tokens), *tokens]).tobytes())
    return digest.hexdigest()[:12]
