"""reasoning-gym's tasks as an environment: questions that it makes, and answers that it scores."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardproof.environments.adapting import EVALUATION_SEED, require_split, wrong_options
from shardproof.environments.protocol import Environment, Message, Reply, Schema, Turn
from shardproof.errors import did_you_mean

_wrong = functools.partial(wrong_options, "reasoning_gym")
_CANDIDATES = (
    4  # questions looked at for each of the evaluation split: those of the training split do not count
)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SOLVED = 1.0 - 1e-9


class ReasoningGym(Environment):
    """One question of reasoning-gym. The reward is the score that its task gives to the last answer.

    `task` names one task, or `tasks` several, each a name or a table with `name`, `weight` and `config`. `config` holds
    the task's own settings. `size` and `evaluation_size` are the number of rows of the two splits. The answer is what
    the model wrote between the last `<answer>` and `</answer>`, or without them the whole turn; `answer = "tag"` accepts
    only the first, `answer = "text"` only the second. `system_prompt` is one of reasoning-gym's, by name, or your own
    text. With `attempts` above 1 the model is told when its answer is wrong, and may try again.
    """

    tools: Sequence[Schema] = ()

    def __init__(
        self,
        task: str | None = None,
        tasks: Sequence[str | Mapping[str, Any]] | None = None,
        config: Mapping[str, Any] | None = None,
        size: int = 1000,
        evaluation_size: int = 200,
        seed: int = 0,
        answer: str = "either",
        system_prompt: str | None = None,
        attempts: int = 1,
        retry: str = "That is not correct. Try again.",
    ):
        if answer not in ("either", "tag", "text"):
            raise _wrong(
                f"answer={answer!r} is not one of either, tag, text.{did_you_mean(answer, ('either', 'tag', 'text'))}"
            )
        for name, count in (("size", size), ("evaluation_size", evaluation_size), ("attempts", attempts)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise _wrong(f"{name}={count!r} is not a number above 0.")
        if not isinstance(seed, int) or not 0 <= seed < EVALUATION_SEED:
            raise _wrong(f"seed={seed!r} is not a number from 0 to {EVALUATION_SEED - 1}.")
        self._tasks = _tasks(task, tasks, config)
        self._sizes = {"train": size, "evaluation": evaluation_size * _CANDIDATES}
        # Question i of a task with seed s is that of its seed s + i: nearby seeds share questions.
        self._seeds = {"train": seed, "evaluation": seed + EVALUATION_SEED}
        self._answer, self._attempts, self._retry = answer, attempts, retry
        self._system = _system_prompt(system_prompt)
        self._data("train")  # so that a wrong name or setting is found before the first step
        self._entry: dict[str, Any] = {}
        self._scoring: Any = None

    @classmethod
    def rows(cls, split: str, **options: Any) -> list[dict[str, Any]]:
        """The questions of a split. Those of "evaluation" are all different, and none is in "train"."""
        require_split("reasoning_gym", split)
        made = cls(**options)
        if split == "train":
            return [made._row(split, index, entry) for index, entry in made._entries("train")]
        wanted = made._sizes["evaluation"] // _CANDIDATES
        seen = {entry["question"] for _, entry in made._entries("train")}
        rows: list[dict[str, Any]] = []
        for index, entry in made._entries("evaluation"):
            if entry["question"] not in seen and len(rows) < wanted:
                seen.add(entry["question"])
                rows.append(made._row(split, index, entry))
        if len(rows) < wanted:
            message = f"only {len(rows)} questions for evaluation are not in the training split; {wanted} are wanted."
            fix = f"set options.evaluation_size={len(rows)}" if rows else "set options.size to less"
            raise _wrong(message, fix=f"{fix}, or let the task's config give more questions")
        return rows

    def start(self, row: dict[str, Any], seed: int) -> None:
        """Find the row's question again. The conversation begins with the row's prompt."""
        try:
            split, index, entry = row["split"], row["index"], row["entry"]
        except KeyError as error:
            message = f'the row has no {error}; take the rows with data.train="environment:train"'
            raise ValueError(message) from error
        self._scoring = self._data(split)
        # Rows are JSON, in which a few tasks cannot score: tuples are lists there. Another few make a question only once.
        again = self._scoring[index]
        self._entry = again if again["question"] == entry["question"] else entry

    def step(self, turn: Turn) -> Reply:
        """The score of the answer in this turn, or another attempt."""
        try:
            score = float(self._scoring.score_answer(self._read(turn.content), self._entry))
        except Exception:  # of an answer that the task did not think of
            score = 0.0
        solved = score >= _SOLVED
        if not solved and turn.finished and not turn.last and turn.number < self._attempts:
            return Reply(messages=[{"role": "user", "content": self._retry}])
        facts = {"solved": float(solved)}
        if len(self._tasks) > 1:
            facts[f"solved/{_task_of(self._entry)}"] = float(solved)
        return Reply(reward=score, done=True, facts=facts)

    def _read(self, text: str) -> str | None:
        tagged = _TAGGED.findall(text) if self._answer != "text" else []
        if tagged:
            return tagged[-1].strip()
        return None if self._answer == "tag" else text.strip()

    def _row(self, split: str, index: int, entry: dict[str, Any]) -> dict[str, Any]:
        prompt: str | list[Message] = entry["question"]
        if self._system is not None:
            prompt = [{"role": "system", "content": self._system}, {"role": "user", "content": prompt}]
        place = {"split": split, "index": index, "task": _task_of(entry) or self._tasks[0]["name"]}
        return {"prompt": prompt, "answer": entry["answer"], **place, "entry": json.loads(json.dumps(entry))}

    def _entries(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        data = self._data(split)
        return ((index, data[index]) for index in range(self._sizes[split]))

    def _data(self, split: str) -> Any:
        return _dataset(json.dumps(self._tasks, sort_keys=True), self._sizes[split], self._seeds[split])


def _tasks(
    task: str | None, tasks: Sequence[str | Mapping[str, Any]] | None, config: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """What to ask for of each task: its name, weight and config."""
    if (task is None) == (not tasks):
        raise _wrong("name one task as options.task, or several as options.tasks.")
    if task is not None:
        return [{"name": task, "weight": 1.0, "config": dict(config or {})}]
    if config:
        raise _wrong("config is for one task; with several give each its own: {name=..., config={...}}.")
    named = [{"name": each} if isinstance(each, str) else dict(each) for each in tasks or ()]
    for each in named:
        if unknown := set(each) - {"name", "weight", "config"}:
            raise _wrong(f"tasks: {sorted(unknown)[0]!r} is not one of name, weight, config.")
        if "name" not in each:
            raise _wrong(f"tasks: {each} has no name.")
    return [{"weight": 1.0, "config": {}, **each} for each in named]


@functools.lru_cache(maxsize=8)
def _dataset(tasks: str, size: int, seed: int) -> Any:
    """reasoning-gym's data set. Kept, because some read word lists, and each conversation has an object of its own."""
    gym = _gym()
    wanted = json.loads(tasks)
    for each in wanted:
        if each["name"] not in gym.factory.DATASETS:
            near = did_you_mean(each["name"], gym.factory.DATASETS)
            raise _wrong(
                f"{each['name']!r} is not one of reasoning-gym's {len(gym.factory.DATASETS)} tasks.{near}"
            )
    names = ", ".join(each["name"] for each in wanted)
    try:
        if len(wanted) == 1:
            return gym.create_dataset(
                wanted[0]["name"], **{**wanted[0]["config"], "size": size, "seed": seed}
            )
        specs = [gym.composite.DatasetSpec(**each) for each in wanted]
        return gym.create_dataset("composite", size=size, seed=seed, datasets=specs)
    except Exception as error:  # its settings are checked by assertions and by types
        raise _wrong(f"{names} cannot be made: {error}.", fix="correct options.config") from error


def _gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        fix = "pip install 'shardproof[reasoning-gym]'"
        raise _wrong(f"the package reasoning-gym cannot be imported: {error}.", fix=fix) from error
    return reasoning_gym


def _system_prompt(text: str | None) -> str | None:
    if text is None:
        return None
    _gym()
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return SYSTEM_PROMPTS.get(text, text)


def _task_of(entry: Mapping[str, Any]) -> str:
    return str(entry.get("metadata", {}).get("source_dataset", ""))
