"""The buffer in a checkpoint: its rounds in the state, and each rank's trajectories in a file of their own.

Any number of ranks reads what any other wrote: a trajectory is known by the step that it was drawn for, its group and its
place in the group. What was not complete begins again, with the same prompt and seed. What reward functions failed at,
or what others have scored, is scored again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardproof.errors import fail
from shardproof.rl.buffer import Buffer
from shardproof.rl.data import Prompt, rows_digest
from shardproof.rl.known import Known
from shardproof.rl.rounds import Drawn, Round

FILE_PREFIX = "trajectories-"
_DIGEST_CHARACTERS = 16

_Key = tuple[int, int, int]  # of a trajectory: the step that it was drawn for, group and sample


def describe_buffer(buffer: Buffer) -> dict[str, Any]:
    """What a checkpoint's state says of the buffer: the same on every rank, and JSON-able."""
    return {
        "order": buffer.order,
        "versions": buffer.versions.to_json(),
        "num_drawn": sorted(buffer.num_drawn.items()),
        "rewards": _digest_of_rewards(buffer),
        "rounds": [_describe(each) for each in buffer.rounds],
    }


def buffer_files(buffer: Buffer) -> dict[str, bytes]:
    """The file with this rank's trajectories, a line each; none if there is nothing to keep.

    Waits for the rewards of what is drawn. Of ranks that share sequences, the first one writes.
    """
    share = buffer.means.share
    lines = [
        json.dumps({"step": each.step, "group": group, "sample": sample, **known.to_json()})
        for each in buffer.rounds
        for (group, sample), known in (each.saved().items() if buffer.means.leads else ())
    ]
    return (
        {f"{FILE_PREFIX}{share.rank}.jsonl": "".join(f"{line}\n" for line in lines).encode()} if lines else {}
    )


def restore_buffer(buffer: Buffer, described: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Put the rounds of a checkpoint into the buffer, in which they are begun as soon as they may be.

    If the data are others than those that were drawn from, which the user has allowed then, nothing is kept, and drawing
    goes on where the rounds of the buffer began. Raises E407, with the file's name, for what no run wrote.
    """
    try:
        rounds = [(int(each["step"]), [_drawn(row) for row in each["drawn"]]) for each in described["rounds"]]
        digests = [row[3] for each in described["rounds"] for row in each["drawn"]]
        versions = [int(version) for version in described["versions"]]
        num_drawn = {int(step): int(num) for step, num in described["num_drawn"]}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _damaged("state.json", error) from error
    buffer.versions.restore(versions)
    drawn = [each for _, prompts in rounds for each in prompts]
    if not _are_same(buffer.means.prompts, drawn, digests):
        buffer.stream.position = min(each.position for each in drawn)
        return
    if rounds and buffer.order == "drawn" and described.get("order") == "finished":
        message = (
            f"the checkpoint has prompts that were begun with rollout.order='finished' ({len(drawn)}); in the order in "
            "which they were drawn, some of them would be lost."
        )
        raise fail("C006", "resume", message, fix="resume with rollout.order='finished'")
    mine = _digest_of_rewards(buffer)
    known = _to_go_on_with(_read(files), described.get("rewards", mine) == mine)
    buffer.num_drawn = num_drawn
    buffer.rounds = [
        buffer.make_round(
            step, prompts, {(key[1], key[2]): each for key, each in known.items() if key[0] == step}
        )
        for step, prompts in rounds
    ]


def _to_go_on_with(known: Mapping[_Key, Known], are_same: bool) -> dict[_Key, Known]:
    """What a run goes on with; `are_same`: its reward functions are those that scored what is known.

    What failed may have ended the run, and would end it again whatever was repaired: rewards that failed are asked for
    again, and a round of which every conversation's environment failed begins again.
    """
    complete = {key: each.trajectory for key, each in known.items() if each.trajectory is not None}
    alive = {step for (step, *_), made in complete.items() if made.ended != "failed"}
    kept = {key: each for key, each in known.items() if key not in complete or key[0] in alive}
    asks = {
        key
        for key, made in complete.items()
        if made.ended != "failed" and made.reward is not None and (made.reward.failures or not are_same)
    }
    return {key: each.unscored() if key in asks else each for key, each in kept.items()}


def _digest_of_rewards(buffer: Buffer) -> str:
    """What stands for the reward functions, with all that changes what they say or what it counts."""
    rewards = buffer.means.sampler.rewards
    specs = [asdict(spec) for spec in rewards.specs] if rewards is not None else []
    for spec in specs:
        del spec["batch_size"], spec["concurrency"]
    text = json.dumps(specs, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


def _describe(each: Round) -> dict[str, Any]:
    prompts = each.means.prompts
    rows = [[one.group, one.row, one.position, _digest(prompts[one.row])] for one in each.drawn]
    return {"step": each.step, "drawn": rows}


def _digest(prompt: Prompt) -> str:
    return rows_digest([prompt])[:_DIGEST_CHARACTERS]


def _drawn(row: Sequence[Any]) -> Drawn:
    return Drawn(int(row[0]), int(row[1]), int(row[2]))


def _are_same(prompts: Sequence[Prompt], drawn: Sequence[Drawn], digests: Sequence[str]) -> bool:
    return all(
        0 <= each.row < len(prompts) and _digest(prompts[each.row]) == digest
        for each, digest in zip(drawn, digests, strict=True)
    )


def _read(files: Mapping[str, bytes]) -> dict[_Key, Known]:
    """{(step, group, sample): trajectory} of all ranks' files."""
    known: dict[_Key, Known] = {}
    for name, content in sorted(files.items()):
        for number, line in enumerate(content.splitlines(), 1):
            try:
                row = json.loads(line)
                known[int(row["step"]), int(row["group"]), int(row["sample"])] = Known.from_json(row)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise _damaged(f"{name}, line {number},", error) from error
    return known


def _damaged(name: str, error: Exception) -> Exception:
    message = f"{name} does not hold what a run keeps there: {type(error).__name__}: {error}."
    return fail("E407", "resume", message, tensor=name.split(",")[0])
