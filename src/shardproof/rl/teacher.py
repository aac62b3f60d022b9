"""The teacher of a distillation: what it says about the student's own tokens, from a model beside it or from a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardproof.config.roles import Teacher as Settings
from shardproof.config.schema import Recipe, Role
from shardproof.dist.collectives import exchange_among, together
from shardproof.dist.deadline import Deadline, await_all
from shardproof.errors import fail
from shardproof.rl.checks import load_tokenizer, model_folder
from shardproof.rollout.vllm_client import Refused, Unreachable, VllmClient
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.score import logprobs

Rows = list[torch.Tensor]

_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)  # answers after which a request is repeated
_LEAST, _MOST = (
    -1e4,
    1e-3,
)  # a log-prob's bounds, with room for rounding; a server can be set to return logits
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_ADDED_PER_TEXT = 256  # tokens that were added to a tokenizer; some have thousands
# What two tokenizers split differently, if they split anything differently.
_PROBES = (
    "The quick brown fox doesn't jump over 1234567890 lazy dogs.",
    "  two spaces,\ttabs\tand\n\nlines; symbols: {}[]<>|&^%$#@!~`",
    "def add(a: int, b: int) -> int:\n    return a + b  # \u00fcber na\u00efve d\u00e9j\u00e0 vu",
    "\u65e5\u672c\u8a9e \u4e2d\u6587 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \U0001f600",
)


class Teacher(Protocol):
    """What knows the log-probs that the student's tokens should have."""

    def logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float, micro_batch_tokens: int
    ) -> Rows:
        """Of each token after the first, given those before it, on the host. Collective: every rank."""
        ...


@dataclass(frozen=True)
class LocalTeacher:
    """A teacher that is sharded over the ranks, like a reference."""

    model: ShardedModel

    def logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float, micro_batch_tokens: int
    ) -> Rows:
        found = logprobs(self.model, sequences, temperature, micro_batch_tokens=micro_batch_tokens)
        return [row.cpu() for row in found]


@dataclass
class _Pace:
    """Lets requests begin at most so often."""

    seconds: float  # between two of them
    _next: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> None:
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + self.seconds
        if begin > now:
            time.sleep(begin - now)


class ServedTeacher:
    """A teacher in a vLLM server: it returns the log-probs of a prompt's tokens. Every rank asks for its own sequences."""

    def __init__(self, settings: Settings, share: int = 1, pause: Callable[[float], None] = time.sleep):
        assert settings.url is not None, "this teacher has a server"
        self.settings, self._share, self._pause = settings, share, pause
        self._client = VllmClient(settings.url.rstrip("/"), settings.key_variable)
        self._pace = _Pace(1.0 / settings.requests_per_s if settings.requests_per_s else 0.0)
        self.name = ""

    def check(self, tokenizer: Any, longest: int | None = None) -> None:
        """Raise unless the server has the teacher, splits text as the policy's tokenizer does, and has room for sequences.

        `longest` is the most tokens of a sequence; None: any number.
        """
        listed = self._ask(partial(self._client.get, "/v1/models"))
        found = listed.get("data") if isinstance(listed, dict) else None
        models = found if isinstance(found, list) else []
        names = [str(each["id"]) for each in models if isinstance(each, dict) and "id" in each]
        self.name = self.settings.served_name or (names[0] if names else "")
        if self.name not in names:
            message = f"{self.settings.url} has no model {self.name!r}; it has {', '.join(names) or 'none'}."
            raise fail("R514", "teacher", message, fix="set teacher.served_name to one of these")
        for text in (*_PROBES, *_added_tokens(tokenizer)):
            body = {"model": self.name, "prompt": text, "add_special_tokens": False}
            answer = self._ask(partial(self._client.post, "/tokenize", body))
            told = answer if isinstance(answer, dict) else {}
            theirs, room = told.get("tokens"), told.get("max_model_len")
            ours = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            if theirs != ours:
                message = f"{self.settings.url} splits {text[:40]!r} into the tokens {str(theirs)[:80]}, the policy's tokenizer into {str(ours)[:80]}."
                raise fail("R513", "teacher", message)
            # A prompt leaves room for a token: a server has to sample one.
            if longest is not None and isinstance(room, int) and longest >= room:
                message = f"a sequence may have {longest} tokens; {self.settings.url} takes up to {room - 1} in a prompt."
                fix = "start the server with a larger --max-model-len, or lower rollout.max_new_tokens"
                raise fail("R514", "teacher", message, fix=fix)

    def logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float, micro_batch_tokens: int
    ) -> Rows:
        if temperature != 1.0:
            message = f"a server scores prompts at temperature 1, not at {temperature}."
            raise fail("C001", "teacher", message, fix="set rollout.temperature = 1.0, or teacher.path")
        # A server's batches round differently: ranks that share sequences must have the same numbers.
        mine = list(sequences) if dist.get_rank() % self._share == 0 else []
        with ThreadPoolExecutor(self.settings.max_in_flight, "teacher") as pool:
            asked = [pool.submit(self.of_tokens, list(tokens)) for tokens in mine]
            try:
                await_all(lambda seconds: not wait(asked, seconds).not_done)
                with together("score"):
                    found = [future.result() for future in asked]
            except BaseException:
                for future in asked:
                    future.cancel()
                raise
        (rows, *_) = exchange_among(found, self._share)
        return [torch.tensor(row, dtype=torch.float32) for row in rows]

    def of_tokens(self, tokens: list[int]) -> list[float]:
        """The log-probs of all tokens but the first."""
        body = {
            "model": self.name,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "add_special_tokens": False,
        }
        answer = self._ask(partial(self._client.post, "/v1/completions", body))
        try:
            given = answer["choices"][0]["prompt_logprobs"]
            row = [
                float(each[str(token)]["logprob"]) for each, token in zip(given[1:], tokens[1:], strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            message = f"{self.settings.url} did not return the log-probs of {len(tokens)} prompt tokens ({type(error).__name__}: {str(error)[:80]})."
            raise fail(
                "R514", "teacher", message, fix="use a vLLM server without speculative decoding"
            ) from error
        wrong = [value for value in row if not _LEAST < value <= _MOST]
        if wrong:
            message = f"{self.settings.url} returned the log-prob {wrong[0]}; it must be a number from {_LEAST:g} to 0."
            raise fail("R514", "teacher", message, fix="start the server without --logprobs-mode")
        return row

    def _ask(self, call: Callable[[Deadline], Any]) -> Any:
        """The answer to a request, which is repeated while the server is busy or gone."""
        settings, problem = self.settings, ""
        for attempt in range(settings.retries + 1):
            self._pace.wait()
            try:
                return call(Deadline(settings.timeout_s))
            except Unreachable as error:
                problem = str(error)
            except Refused as error:
                problem = f"{settings.url} answered {error.status}: {error}"
                if error.status not in _BUSY:
                    break
            if attempt < settings.retries:
                self._pause(min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S))
        raise fail("R514", "teacher", f"{problem} (after {attempt + 1} attempts).")


def _added_tokens(tokenizer: Any) -> list[str]:
    """Texts with the tokens that were added to the tokenizer, such as those around thoughts: other versions lack some.

    Special tokens are left out: a server may read them in a text as plain text.
    """
    found = sorted(getattr(tokenizer, "added_tokens_decoder", {}).items())
    added = [token.content for _, token in found if not token.special]
    return ["".join(added[at : at + _ADDED_PER_TEXT]) for at in range(0, len(added), _ADDED_PER_TEXT)]


def load_teacher(
    recipe: Recipe,
    load: Callable[..., ShardedModel],
    tokenizer: Any,
    share: int,
    longest: Callable[[], int | None],
) -> Teacher | None:
    """The recipe's teacher, whose vocabulary is the policy's; None if there is none.

    `load` is `rl.models.load_role` of the run, `share` the number of ranks that hold each sequence, `longest` finds
    the most tokens of one, for which a server must have room. Collective: every rank.
    """
    settings = recipe.teacher
    if settings is None:
        return None
    if settings.url is not None:
        served = ServedTeacher(settings, share)
        with together("score"):
            served.check(tokenizer, longest())
        return served
    assert settings.path is not None, "a teacher has a path or a url"
    with together("score"):
        theirs = load_tokenizer(model_folder(settings.path), settings.trust_remote_code)
        require_same_vocabulary(tokenizer, theirs, settings.path)
    section = Role(path=settings.path, strategy=settings.strategy, cpu_offload=settings.cpu_offload)
    return LocalTeacher(load(section, "teacher", trust_remote_code=settings.trust_remote_code))


def require_same_vocabulary(ours: Any, theirs: Any, path: str) -> None:
    """Raise unless two tokenizers give every token the same number, and split text alike."""
    mine, other = ours.get_vocab(), theirs.get_vocab()
    different = sorted(token for token in {*mine, *other} if mine.get(token) != other.get(token))
    if different:
        token = different[0]
        message = f"{len(different)} tokens have other numbers in the tokenizer of {path!r}: {token[:40]!r} is {mine.get(token, 'not there')} for the policy and {other.get(token, 'not there')} for the teacher."
        raise fail("R513", "teacher", message)
    for text in _PROBES:
        pair = [list(each(text, add_special_tokens=False)["input_ids"]) for each in (ours, theirs)]
        if pair[0] != pair[1]:
            message = f"the tokenizer of {path!r} splits {text[:40]!r} into {str(pair[1])[:80]}, the policy's into {str(pair[0])[:80]}."
            raise fail("R513", "teacher", message)
