"""The built-in reward `judge`: a language model behind an OpenAI-compatible server says how good a completion is."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import math
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

from shardproof.rl.rewards.answers import compiled_pattern
from shardproof.rl.rewards.calling import Measured
from shardproof.rl.rewards.judge_http import Answer, post
from shardproof.rl.rewards.judge_limits import Cache, Pace
from shardproof.rl.rewards.options import number, text
from shardproof.rl.rewards.specs import JUDGE_CACHE, Surroundings, unknown_reward

PROMPT = """Rate the answer to a question from 0 (wrong) to 10 (right and complete).

Question:
{prompt}

Reference answer:
{answer}

Answer to rate:
{completion}

Explain your rating in one or two sentences, then end with a line "Score: N"."""
# What stands in brackets is the scale: "Score (0-10): 7".
PATTERN = r"(?i)score(?:\s*\([^()\n]*\))?\W{1,5}?([-\u2212]?[0-9]*\.?[0-9]+)"
_FIELD = re.compile(r"\{(\{\w+\})\}|\{(\w+)\}")  # {{name}} stands for {name}
_GIVEN = ("prompt", "completion", "completion_ids", "turns")  # of a sample, and no columns of the data
_NOT_IN_BODY = {  # what the judge would no longer be asked, or not be understood with
    "model": "use the option model",
    "messages": "use the options prompt and system",
    "temperature": "use the option temperature",
    "max_tokens": "use the option max_tokens",
    "stream": "answers are read as a whole, so remove it",
}
_MOST_TOKENS = 10**7  # that one request can have taken
_LATER = {408, 409, 425, 429}  # and 500 and above
_LONGEST_WAIT_S = 120.0
_SHOWN = 200


class _Retry(Exception):
    """The request may work later."""

    def __init__(self, reason: str, after_s: float | None = None):
        super().__init__(reason)
        self.after_s = after_s


@dataclass
class Judge:
    """The judge's score, scaled so that `scale` becomes 0 to 1."""

    url: str = ""
    model: str = ""
    prompt: str = PROMPT
    system: str | None = None
    pattern: str = PATTERN
    json_key: str | None = None
    scale: Sequence[float] = (0, 10)
    api_key_env: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0
    retries: int = 5
    backoff_s: float = 1.0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    cache: bool | str = True
    concurrency: ClassVar[int] = 16
    longest_s: ClassVar[float] = math.inf  # each request has its own limit; to wait for its turn is no fault

    def __post_init__(self) -> None:
        for key in ("url", "model", "prompt", "pattern"):
            text(key, getattr(self, key))
        for key in ("system", "json_key", "api_key_env"):
            text(key, getattr(self, key), needed=False)
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(
                f"url={self.url!r} is not the address of a server, such as http://localhost:8000/v1"
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "url has a name or a password, which would be kept with the run: use api_key_env"
            )
        if not self.model:
            raise ValueError("model is missing: the name under which the server knows the judge")
        if "completion" not in self._names:
            raise ValueError("prompt has no {completion}")
        if compiled_pattern(self.pattern).groups < 1:
            raise ValueError("pattern has no group for the score")
        if self.json_key is not None and self.pattern != PATTERN:
            raise ValueError("json_key and pattern: give one of them, which finds the score")
        scale = list(self.scale) if isinstance(self.scale, list | tuple) else []
        are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in scale)
        if len(scale) != 2 or not are_numbers or not -math.inf < scale[0] < scale[1] < math.inf:
            raise ValueError(f"scale={self.scale!r} is not the lowest and the highest score")
        if self.prompt == PROMPT:
            ends = f"from {scale[0]:g} (wrong) to {scale[1]:g} (right"
            self.prompt = PROMPT.replace("from 0 (wrong) to 10 (right", ends)
        if not isinstance(self.body, Mapping):
            raise ValueError(f"body={self.body!r} is not a table")
        for key in self.body.keys() & _NOT_IN_BODY.keys():
            raise ValueError(f"body has {key!r}: {_NOT_IN_BODY[key]}")
        json.dumps(self.body)
        if not isinstance(self.cache, bool):
            text("cache", self.cache)
        number("temperature", self.temperature, 0, 10)
        number("max_tokens", self.max_tokens, 1, 2**20, whole=True)
        number("timeout_s", self.timeout_s, 0.01, 86400)
        number("retries", self.retries, 0, 100, whole=True)
        number("backoff_s", self.backoff_s, 0, 3600)
        for key in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, key) is not None:
                number(key, getattr(self, key), 1e-3, 1e12)
        self._key = ""
        self._cache, self._pace = Cache(None), Pace(None, None)
        self._asked: dict[str, asyncio.Future[tuple[float, dict[str, float]]]] = {}

    def prepare(self, around: Surroundings) -> None:
        """Read the key, find the cache, and take this rank's share of the limits. C001 if there is no key."""
        if self.api_key_env is not None:
            self._key = os.environ.get(self.api_key_env, "").strip()
            if not self._key.isascii() or not self._key.isprintable() or not self._key:
                raise unknown_reward(
                    f"reward 'judge': the environment variable {self.api_key_env!r} holds no key.",
                    f"export {self.api_key_env}, on every host",
                )
        folder = os.path.join(around.folder, JUDGE_CACHE) if around.folder else None
        if isinstance(self.cache, str):
            folder = os.path.abspath(os.path.expanduser(self.cache))
        self._cache = Cache(folder if self.cache else None)
        requests, tokens = self.requests_per_minute, self.tokens_per_minute
        self._pace = Pace(
            None if requests is None else requests / around.num_ranks,
            None if tokens is None else tokens / around.num_ranks,
        )

    def check_row(self, row: dict[str, Any]) -> None:
        """ValueError if the row has nothing in a column that the prompt names: the judge would read the name, or "None"."""
        missing = [name for name in self._names if row.get(name) is None and name not in _GIVEN]
        if missing:
            braces = f"{{{{{missing[0]}}}}}"
            raise ValueError(
                f"the row has no {missing[0]!r}, which the judge's prompt names (for a word in braces, write {braces})"
            )

    @property
    def _names(self) -> list[str]:
        """The columns that the prompt names."""
        return [found[2] for found in _FIELD.finditer(self.prompt) if found[2]]

    async def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> Measured:
        asked = self._request({**row, "prompt": prompt, "completion": completion})
        key = Cache.key({"url": self._endpoint, **asked})
        if (known := self._cache.get(key)) is not None:
            # Kept where another pattern or scale was used, it may have no score for this one.
            with contextlib.suppress(ValueError):
                return Measured(self._value(known["text"]), {"cached": 1.0})
        if (other := self._asked.get(key)) is not None:  # the same completion, which is being judged now
            value, _ = await asyncio.shield(other)
            return Measured(value, {"cached": 1.0})
        mine = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            found = await self._judged(asked, key)
        except BaseException as error:
            mine.set_exception(error if isinstance(error, Exception) else RuntimeError("given up"))
            mine.exception()  # nobody may be waiting for it
            raise
        else:
            mine.set_result(found)
        finally:
            del self._asked[key]
        return Measured(*found)

    @property
    def _endpoint(self) -> str:
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        return urlunsplit(parts._replace(path=path, fragment=""))

    def _request(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        # In one pass: what a completion holds in braces is not filled in.
        written = _FIELD.sub(lambda found: found[1] or str(fields.get(found[2], found[0])), self.prompt)
        messages = [{"role": "user", "content": written}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        sampling = {"temperature": self.temperature}
        if "max_completion_tokens" not in self.body:  # its name at some services, which refuse the other
            sampling["max_tokens"] = self.max_tokens
        return {"model": self.model, "messages": messages, **sampling, **self.body}

    async def _judged(self, asked: dict[str, Any], key: str) -> tuple[float, dict[str, float]]:
        estimate = len(json.dumps(asked["messages"])) // 3 + self.max_tokens
        began = time.monotonic()
        for tried in range(self.retries + 1):
            await self._pace.turn(estimate)
            began = time.monotonic()
            try:
                text, tokens = await self._answer(asked)
                break
            except _Retry as reason:
                if tried == self.retries:
                    raise RuntimeError(f"{reason}, in {tried + 1} attempts") from None
                wait_s = min(self.backoff_s * 2**tried, 60.0) * random.uniform(0.5, 1.0)
                if reason.after_s:  # to come back at once is no answer to how long
                    wait_s = min(reason.after_s, _LONGEST_WAIT_S)
                    self._pace.pause(wait_s)
            await asyncio.sleep(wait_s)
        seconds = time.monotonic() - began
        if tokens:
            self._pace.correct(estimate, tokens)
        value = self._value(text)
        self._cache.put(key, {"text": text, "tokens": tokens})
        facts = {"cached": 0.0, "seconds": seconds, "retries": float(tried), "tokens": float(tokens)}
        return value, facts

    async def _answer(self, asked: Mapping[str, Any]) -> tuple[str, int]:
        """(what the judge wrote, tokens that this took); _Retry if it may work later."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            answer = await asyncio.wait_for(post(self._endpoint, asked, headers), self.timeout_s)
        except asyncio.TimeoutError:  # noqa: UP041  # the same class from Python 3.11 on
            raise _Retry(f"the judge did not answer in {self.timeout_s:g} s") from None
        except (OSError, ValueError) as error:
            raise _Retry(self._safe(f"the judge cannot be reached: {error}")) from None
        said = self._safe(answer.body.decode("utf-8", "replace")).strip()[:_SHOWN]
        status = f"the judge answered with status {answer.status}{': ' * bool(said)}{said}"
        if 300 <= answer.status < 400 and (place := answer.headers.get("location")):
            status = f"the judge's server says that it is at {self._safe(place)[:_SHOWN]}: name it in url"
        if answer.status in _LATER or answer.status >= 500:
            raise _Retry(status, _retry_after(answer))
        if answer.status != 200:
            raise RuntimeError(status)
        try:
            found = json.loads(answer.body)
            choice = found["choices"][0]
            text, ended = _text_in(choice["message"].get("content")), choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise _Retry(f"the judge's answer is not that of a chat completion: {said}") from None
        if ended == "length":  # its last score may be one that it quotes or considers, or the 1 of a 10
            raise RuntimeError(
                "the judge's answer was cut off at its limit of tokens: raise max_tokens, or name in body where it stops"
            )
        if text is None:
            raise _Retry("the judge's answer has no text")
        return text, _tokens_in(found)

    def _value(self, text: str) -> float:
        low, high = self.scale
        score = _json_score(text, self.json_key) if self.json_key else self._matched(text)
        if score is None:
            raise ValueError(f"the judge's answer holds no score: {self._safe(text)[-_SHOWN:]!r}")
        if not low <= score <= high:
            raise ValueError(f"the judge's score {score:g} is not from {low:g} to {high:g}")
        return (score - low) / (high - low)

    def _matched(self, text: str) -> float | None:
        found = [match[1] for match in re.finditer(self.pattern, text)]
        return _number(found[-1]) if found else None

    def _safe(self, text: str) -> str:
        """Without the key, which servers repeat in errors. Before the text is cut: a part of a key is no match."""
        return text.replace(self._key, "***") if self._key else text


def _text_in(content: Any) -> str | None:
    """What a message says: text, or the texts among its parts."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text") or None
    return content if isinstance(content, str) else None


def _tokens_in(answer: Mapping[str, Any]) -> int:
    """What a request took; 0 if the server does not say, or says what cannot be."""
    usage = answer.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return tokens if isinstance(tokens, int) and 0 < tokens < _MOST_TOKENS else 0


def _retry_after(answer: Answer) -> float | None:
    """How many seconds the server asks to wait."""
    given = answer.headers.get("retry-after", "")
    try:
        return max(0.0, float(given))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _json_score(text: str, key: str) -> float | None:
    """The number under a key, in the last JSON object of the text that has it."""
    decoder, found, place = json.JSONDecoder(), None, text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            if isinstance(value, dict) and key in value:
                found = _number(value[key])
        place = text.find("{", end)
    return found


def _number(value: Any) -> float | None:
    try:
        value = value.replace("\u2212", "-") if isinstance(value, str) else value
        found = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found is not None and math.isfinite(found) else None
