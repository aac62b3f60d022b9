"""Ranks agree on what they run before anything starts: versions, code, recipe, tokenizer, data and rewards.

Nothing later would notice: a rank with another learning rate, other data or other code takes part in every collective,
and the run ends as if nothing were wrong. One exchange carries a digest of each rank's settings, and from one rank of
each host what its files hold and what the host has: devices, memory, disk. Only where something may differ do ranks
send more, to say what it is.
"""

from __future__ import annotations

import array
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardproof.config.schema import Recipe
from shardproof.dist.collectives import exchange, together
from shardproof.dist.hosts import Hosts, describe_difference, hosts
from shardproof.dist.launch import default_device
from shardproof.errors import error_for
from shardproof.findings import Finding
from shardproof.rl.compared_files import Compared, compared_files, digests_of
from shardproof.rl.data import Prompt, rows_digest
from shardproof.rl.host_facts import compare_clocks, host_table, host_warnings, take_host_facts
from shardproof.rl.same_run import leaves
from shardproof.version import library_versions

logger = logging.getLogger(__name__)

# Paths are each host's own. What lies there is compared: files here, checkpoints when they are loaded (L111).
_PATHS = {
    "model.path",
    "reference.path",
    "critic.path",
    "teacher.path",
    "data.train",
    "data.evaluation",
    "output.folder",
}
_PATHS |= {"environment.python", "data.pass_rates", "rollout.vllm.secret_file"}
# How a host starts its ranks, and where rank 0 finds or keeps its servers.
_LOCAL = {
    "train.ranks",
    *(f"rollout.vllm.{key}" for key in ("url", "devices", "host", "port", "allow_remote", "log")),
}
# In this order: another version of a library explains differences that follow.
_FIXES = {
    "versions": "install the same versions on every host",
    "code": "install the same shardproof on every host",
    "devices": "use hosts whose devices compute in the same dtypes, or hide the GPUs with CUDA_VISIBLE_DEVICES=",
    "recipe": "start every rank with the same recipe and overrides",
    "tokenizer": "give every host the same tokenizer files",
    "data": "give every host the same data and tokenizer",
    "rewards": "give every host the same reward modules",
    "extensions": "give every host the same modules",
}
_MAX_KEYS = 8


def agree_on(recipe: Recipe, options: object = None) -> list[dict[str, Any]]:
    """What each host has, where there are several; raises C003 on every rank unless all of them run the same.

    `options` are those of the command. Hosts are listed in the log, with warnings about clocks, memory and disks.
    Collective: every rank. One exchange, and on several hosts a second one of 8 bytes per rank.
    """
    if dist.get_world_size() == 1:
        return []
    where = hosts()
    with together("settings") as told:
        settings, files = settings_of(recipe, options), compared_files(recipe)
        told.mine = [_digest(settings), _digest({key: each.place() for key, each in files.items()})]
        if where.num > 1 and where.is_leader:
            told.mine += [digests_of(files.items()), take_host_facts(recipe.output.folder)]
    if _may_differ(told.rows, where):
        require_agreement(settings | _digests_together(files))
    if where.num == 1:
        return []
    facts = [told.rows[where.leader_of(host)][3] for host in range(where.num)]
    clocks = compare_clocks(where)
    found = [
        {"name": where.names[host], "ranks": list(where.ranks_of(host)), **has, "clock_s": clock}
        for host, (has, clock) in enumerate(zip(facts, clocks, strict=True))
    ]
    logger.info("%s", host_table(found))
    for warning in host_warnings(found):
        logger.warning("%s", warning)
    return found


def settings_of(recipe: Recipe, options: object = None) -> dict[str, str]:
    """What must be the same on every rank and lies in no file, as {"class/name": value}."""
    found = {f"versions/{name}": version for name, version in library_versions().items()}
    device = default_device()
    found["devices/device"] = device.type
    if device.type == "cuda":
        found["versions/cuda"] = str(torch.version.cuda)
        found["versions/nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["devices/dtypes"] = _dtypes(*torch.cuda.get_device_capability(device))
    found |= {f"recipe/{key}": value for key, value in _settings(recipe)}
    if options is not None:
        found["recipe/options"] = repr(options)
    return found


def content_of(prompts: Iterable[Prompt]) -> dict[str, str]:
    """What some prompts hold: rows and tokens, which may differ where the files of data and tokenizer do not."""
    every = list(prompts)
    return {
        "": f"{len(every)} rows, sha256 {rows_digest(every)[:12]}",
        "tokens of ": _tokens_digest(every),
    }


def require_agreement(mine: Mapping[str, str]) -> None:
    """Raise C003 on every rank, with what differs and on which host and rank, unless all ranks have the same.

    Keys are "class/name". Collective: every rank.
    """
    require_same(exchange(dict(mine)), hosts())


def require_same(rows: Sequence[Mapping[str, str]], where: Hosts) -> None:
    """Raise C003 with what differs between every rank's row, and where."""
    findings = []
    for kind, fix in _FIXES.items():
        keys = dict.fromkeys(key for row in rows for key in row if key.startswith(f"{kind}/"))
        ranks = list(range(len(rows)))
        if kind == "tokenizer":  # a host that has none is sent one
            ranks = [rank for rank in ranks if any(key in rows[rank] for key in keys)]
        odd = [key for key in keys if len({rows[rank].get(key) for rank in ranks}) > 1]
        if odd:
            said = [
                describe_difference(key.partition("/")[2], [row.get(key) for row in rows], where, ranks)
                for key in odd
            ]
            more = f" and {len(said) - _MAX_KEYS} more" if len(said) > _MAX_KEYS else ""
            message = f"ranks do not have the same {kind}: {'; '.join(said[:_MAX_KEYS])}{more}."
            findings.append(Finding("C003", "settings", message, fix=fix))
    if findings:
        raise error_for(findings)


def _may_differ(rows: Sequence[Sequence[Any]], where: Hosts) -> bool:
    """Whether ranks have other settings, ranks of one host other files, or files of hosts another content."""
    if len({row[0] for row in rows}) > 1:
        return True
    if any(rows[rank][1] != rows[where.leader_of(host)][1] for rank, host in enumerate(where.of_rank)):
        return True
    leaders = [rows[where.leader_of(host)] for host in range(where.num)]
    return where.num > 1 and any(row[2] != leaders[0][2] for row in leaders)


def _digests_together(files: Mapping[str, Compared]) -> dict[str, str]:
    """Collective: every rank."""
    found: dict[str, str] = {}
    with together("settings"):
        found = digests_of(files.items())
    return found


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _dtypes(major: int, minor: int) -> str:
    """The dtypes in which a GPU of a compute capability multiplies matrices."""
    known = {"float32": (0, 0), "float16": (5, 3), "bfloat16": (8, 0), "float8": (8, 9), "float4": (10, 0)}
    return ", ".join(name for name, since in known.items() if (major, minor) >= since)


def _settings(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """The recipe's values that must agree, by dotted key; of a path whether it is given."""
    for key, value in leaves(recipe.model_dump(mode="json")).items():
        if key == "data.train" and isinstance(value, list):
            yield key, json.dumps([{k: v for k, v in each.items() if k != "source"} for each in value])
        elif key in _PATHS:
            yield key, "none" if value is None else "a path"
        elif key not in _LOCAL:
            yield key, json.dumps(value)


def _tokens_digest(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        for tokens in (prompt.tokens, prompt.completion, prompt.rejected, prompt.trained):
            digest.update(array.array("q", [len(tokens), *tokens]).tobytes())
    return digest.hexdigest()[:12]
