"""Strings that end an answer, found in its tokens while they are drawn: across tokens, and within characters of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\ufffd"  # what is decoded where a character is not complete
_BYTES = 4  # of a character at most, and so tokens of it
_KEPT = 1024  # lists of strings, of which rows have their own
_MORE = 8  # tokens before those that can hold a stop string: a tokenizer may begin a text differently


class StopStrings:
    """Strings, and the tokenizer that reads them. An answer ends with the first token whose text completes one of them.

    The text is that of the answer alone, special tokens included.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any):
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.strings), default=0)
        self._can_complete: dict[int, bool] = {}  # by token
        self._others: dict[
            tuple[str, ...], StopStrings
        ] = {}  # that were asked for, with what they know of tokens

    def __bool__(self) -> bool:
        return bool(self.strings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StopStrings) and self.strings == other.strings

    def __hash__(self) -> int:
        return hash(self.strings)

    def __repr__(self) -> str:
        return f"StopStrings({self.strings!r})"

    def of(self, strings: Sequence[str]) -> StopStrings:
        """Other strings, read by the same tokenizer."""
        key = tuple(strings)
        if key == self.strings:
            return self
        found = self._others.get(key)
        if found is None:
            if len(self._others) >= _KEPT:
                self._others = {}  # not item by item: other threads may look, too
            found = self._others[key] = StopStrings(strings, self._tokenizer)
        return found

    def completed(self, tokens: Sequence[int], num: int) -> str:
        """The string that the last of the first `num` tokens completes, the one that begins first; "" if there is none."""
        if not self._may_complete(tokens[num - 1]):
            return ""
        start, text = self._end_of(tokens, num)
        if not any(string in text for string in self.strings):
            return ""
        # What ended before this token does not count: an answer may have to be longer.
        before = self._complete_text(tokens[start : num - 1])
        found = [(_place(text, before, string), string) for string in self.strings]
        places = [(at, string) for at, string in found if at >= 0]
        return min(places, key=lambda place: (place[0], -len(place[1])))[1] if places else ""

    def _may_complete(self, token: int) -> bool:
        """Whether a token's text begins with the end of a string, or holds one, behind other text or not. Few do."""
        found = self._can_complete.get(token)
        if found is None:
            alone, twice = self._decode([token]), self._decode([token, token])
            found = _UNKNOWN in twice or not twice.startswith(alone)
            found = found or any(_completes(text, self.strings) for text in (alone, twice[len(alone) :]))
            self._can_complete[token] = found
        return found

    def _end_of(self, tokens: Sequence[int], num: int) -> tuple[int, str]:
        """(a token, the text from it to the end of the first `num`), long enough for any of the strings."""
        start, text = num, ""
        while start > 0 and len(text) < self._longest + _MORE:
            start = max(0, start - _BYTES * self._longest - _MORE)
            text = self._decode(tokens[start:num])
        # It may begin within a character. Some tokenizers then read none of the bytes that follow each other.
        for first in range(start - 1, max(start - _BYTES, -1), -1):
            if not text.startswith(_UNKNOWN):
                break
            start, text = first, self._decode(tokens[first:num])
        return start, text

    def _complete_text(self, tokens: Sequence[int]) -> str:
        """The text up to the last character that is complete, which a part of the next one may make unreadable."""
        found = text = self._decode(tokens)
        for num in range(len(tokens) - 1, max(len(tokens) - _BYTES, -1), -1):
            if not text.endswith(_UNKNOWN):
                break
            text = self._decode(tokens[:num])
            found = max(found.rstrip(_UNKNOWN), text.rstrip(_UNKNOWN), key=len)
        return found

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _completes(text: str, strings: Sequence[str]) -> bool:
    """Whether some string ends within a text that follows other text."""
    begins = [text[:num] for num in range(1, len(text) + 1)]
    return any(string in text or string.endswith(tuple(begins)) for string in strings)


def without_stop(tokens: Sequence[int], string: str, tokenizer: Any) -> str:
    """The text of an answer, without special tokens, up to the stop string that its last token completed."""

    def read(num: int, plain: bool = True) -> str:
        return str(tokenizer.decode(tokens[:num], skip_special_tokens=plain))

    num, text = len(tokens), read(len(tokens))
    at = _place(text, read(num - 1), string)
    if at >= 0:
        return text[:at]
    # Special tokens are part of the string, and not of the text.
    whole = read(num, plain=False)
    at = _place(whole, read(num - 1, plain=False), string)
    if at < 0:
        return text
    while not (whole.startswith(begin := read(num, plain=False)) and len(begin) <= at):
        num -= 1
    return read(num) + whole[len(begin) : at]


def _place(text: str, before: str, string: str) -> int:
    """Where a string begins that ends behind the text before; -1 if it is not there."""
    return text.find(string, max(len(before.rstrip(_UNKNOWN)) - len(string) + 1, 0))
