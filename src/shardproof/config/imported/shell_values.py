"""What the words of a shell script mean: quotations, variables with their defaults, and arithmetic. Nothing is run."""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardproof.config.imported.shell_syntax import after_quotation, closing

UNKNOWN = "$(...)"  # in place of what a command would say
_NAME = re.compile(r"\w+|[@*#?$!-]")
_BRACED = re.compile(r"(#?)(\w+|[@*])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_OPERATOR = re.compile(r":[-=+?]|[-=+?]|##?|%%?|//?|\^\^?|,,?", re.DOTALL)
_SAYS_ONE_OF_TWO = re.compile(r"(.*)&&\s*echo\s+([\w./-]+)\s*\|\|\s*echo\s+([\w./-]+)\s*", re.DOTALL)
_PLAIN, _QUOTED = re.compile(r"""[^'"\\`$~]+"""), re.compile(r"""[^"\\`$]+""")
_MAX_LENGTH = 100_000  # of a word with its variables put in
_MAX_WORDS = 20_000
_MAX_READ = 20_000_000  # letters of all words, those of loops each time
_MAX_CHANGED = 2_000  # letters of a value of which a part is cut off or replaced
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def is_unknown(text: str) -> bool:
    """Whether a value holds what only a command would say."""
    return UNKNOWN in text


@dataclass
class Values:
    """The variables of a script, and of the environment that it is read in."""

    variables: dict[str, str | list[str]]
    arguments: list[str] = field(default_factory=list)
    choose: Callable[[str, Sequence[str]], int] = lambda what, ways: 0
    letters: int = 0  # read so far
    unset_is_empty: bool = False  # as in a condition; elsewhere what is not set stays what it is

    def get(self, name: str) -> str | list[str] | None:
        """What a name stands for; None if nobody has set it."""
        if name.isdigit():
            number = int(name)
            given = number <= len(self.arguments)
            return UNKNOWN if number == 0 else self.arguments[number - 1] if given else None
        own: dict[str, str | list[str]] = {
            "@": self.arguments, "*": self.arguments, "#": str(len(self.arguments)),
            "?": UNKNOWN, "$": UNKNOWN, "!": UNKNOWN, "-": "",
        }  # fmt: skip
        return own.get(name, self.variables.get(name, os.environ.get(name)))

    def set(self, name: str, value: str | list[str], *, adds: bool = False) -> None:
        """Set a variable, or add to it."""
        before = self.variables.get(name)
        if adds and isinstance(value, list):
            value = [*([before] if isinstance(before, str) else before or []), *value]
        elif adds:
            value = (before if isinstance(before, str) else os.environ.get(name, "")) + str(value)
        if len(value) > (_MAX_WORDS if isinstance(value, list) else _MAX_LENGTH):
            raise ValueError(f"{name} holds more than a script has")
        self.variables[name] = value

    def words(self, raw: str) -> list[str]:
        """The words that one word becomes: none, one, or all those of an array or of a variable that is a word."""
        held = self._held(raw)
        if held is not None:
            return held
        found = _Expansion(self)
        found.read(raw)
        return found.fields if found.is_word else []

    def text(self, raw: str) -> str:
        """A word as one text."""
        found = _Expansion(self)
        found.read(raw)
        return " ".join(found.fields)

    def array(self, items: Sequence[str]) -> list[str]:
        """The words of an array."""
        return [word for item in items for word in self.words(item)]

    def _held(self, raw: str) -> list[str] | None:
        """The words of a variable that is a word of its own and not in quotation marks, as $ARGUMENTS is."""
        name = re.fullmatch(r"\$\{?(\w+)\}?", raw)
        value = self.get(name[1]) if name else None
        if not isinstance(value, str):
            return None
        try:
            return shlex.split(value)
        except ValueError:
            return value.split()

    def computed(self, expression: str) -> int | None:
        """The value of an arithmetic expression; None where it has none that is known."""
        text = self.text(f'"{expression}"').strip()
        text = re.sub(r"\s+", " ", text).replace("&&", " and ").replace("||", " or ")
        try:
            return _value_of(ast.parse(text, mode="eval").body, self)
        except (ValueError, TypeError, SyntaxError, ZeroDivisionError, RecursionError):
            return None


class _Expansion:
    """One word as it is read."""

    def __init__(self, values: Values) -> None:
        self.values, self.fields, self.is_word = values, [""], False

    def add(self, text: str | list[str], *, is_word: bool = True) -> None:
        parts = [text] if isinstance(text, str) else text
        if not parts:
            return
        self.is_word = self.is_word or is_word or bool("".join(parts))
        self.fields[-1] += parts[0]
        self.fields += parts[1:]
        if len(self.fields[-1]) > _MAX_LENGTH:
            raise ValueError(f"a word of more than {_MAX_LENGTH} characters")
        if len(self.fields) > _MAX_WORDS:
            raise ValueError(f"more than {_MAX_WORDS} words")

    def read(self, raw: str, *, quoted: bool = False) -> None:
        self.values.letters += len(raw)
        if self.values.letters > _MAX_READ:
            raise ValueError("it says more than a script that starts a run")
        place = 0
        while place < len(raw):
            if (plain := (_QUOTED if quoted else _PLAIN).match(raw, place)) is not None:
                self.add(plain[0])
                place = plain.end()
                continue
            letter = raw[place]
            end = place + 1 if quoted and letter == "'" else after_quotation(raw, place)
            if letter == "'" and not quoted:
                self.add(raw[place + 1 : end - 1])
            elif letter == '"':
                self.read(raw[place + 1 : end - 1], quoted=True)
                self.is_word = self.is_word or end - place == 2
            elif letter == "\\":
                escaped = raw[place + 1 : place + 2]
                keeps = quoted and escaped not in '$"\\`\n'
                self.add(letter + escaped if keeps else "" if escaped == "\n" else escaped)
            elif letter == "`":
                self.add(UNKNOWN)
            elif letter == "$":
                end = self.variable(raw, place, quoted=quoted)
            elif letter == "~" and not quoted and place == 0 and raw[1:2] in ("", "/"):
                self.add(os.environ.get("HOME", "~"))
            else:
                end = place + 1
                self.add(letter)
            place = end

    def variable(self, raw: str, place: int, *, quoted: bool) -> int:
        """Add what a $ stands for; returns the place after it."""
        if raw.startswith("$((", place):
            end = closing(raw, place + 2, ")")
            expression = raw[place + 3 : end - 2]
            number = self.values.computed(expression)
            kept = "".join(self.values.text(f'"{expression}"').split())
            self.add(f"$(({kept}))" if number is None else str(number))
            return end
        if raw.startswith("$(", place):
            end = closing(raw, place + 2, ")")
            self.add(self.said(raw[place + 2 : end - 1]))
            return end
        if raw.startswith("${", place):
            end = closing(raw, place + 2, "}")
            value = self.braced(raw[place:end], quoted=quoted)
            if quoted and isinstance(value, list) and "*" in raw[place + 2 : end].partition(":")[0]:
                value = " ".join(value)
            self.add(value, is_word=quoted)
            return end
        name = _NAME.match(raw, place + 1)
        if name is None:
            self.add("$")
            return place + 1
        one = name[0][0] if name[0][0].isdigit() else name[0]
        self.add(self.plain(one, f"${one}"), is_word=quoted and one != "@")
        return place + 1 + len(one)

    def plain(self, name: str, raw: str) -> str | list[str]:
        value = self.values.get(name)
        if value is None:
            return "" if self.values.unset_is_empty else raw
        if isinstance(value, list) and name not in ("@", "*"):
            return value[0] if value else ""
        return value

    def said(self, command: str) -> str:
        """What a command says; where it says one of two words, by what it finds, that is chosen."""
        two = _SAYS_ONE_OF_TWO.fullmatch(command)
        if two is None:
            return UNKNOWN
        return two[2 if self.values.choose(" ".join(two[1].split()), ("no", "yes")) else 3]

    def braced(self, raw: str, *, quoted: bool) -> str | list[str]:
        """What ${...} stands for; what is not known stays what it is."""
        parts = _BRACED.fullmatch(raw[2:-1])
        if parts is None:
            return raw
        counts, name, index, rest = parts.groups()
        value = self.values.get(name)
        if index is not None:
            value = _element(value, index)
        if counts:
            return str(len(value or "")) if not rest else raw
        found = _OPERATOR.match(rest)
        if rest and found is None:
            return self._cut(value, rest, raw)
        if found is not None and found[0].lstrip(":") in ("-", "=", "+", "?"):
            return self._or_default(name, value, found[0], rest[found.end() :], raw, quoted=quoted)
        if value is None:
            return [] if index in ("@", "*") else "" if self.values.unset_is_empty else raw
        if isinstance(value, list):
            if name not in ("@", "*") and index is None:
                value = value[0] if value else ""
            return value if not rest else raw
        return value if found is None else _changed(value, found[0], self.values.text(rest[found.end() :]))

    def _cut(self, value: str | list[str] | None, rest: str, raw: str) -> str | list[str]:
        """${NAME:from:length}, of words as of letters."""
        numbers = re.fullmatch(r":\s*(\d+)(?::(\d+))?", rest)
        if value is None or numbers is None:
            return [] if isinstance(value, list) or raw[2] == "@" else raw
        start = max(0, int(numbers[1]) - isinstance(value, list))
        return value[start:] if numbers[2] is None else value[start : start + int(numbers[2])]

    def _or_default(
        self, name: str, value: str | list[str] | None, how: str, rest: str, raw: str, *, quoted: bool
    ) -> str | list[str]:
        is_set = bool(value) if how.startswith(":") else value is not None
        kind = how[-1]
        if kind == "?":
            return value if is_set and value is not None else raw
        if kind == "+" and not is_set:
            return [] if not quoted else ""
        if kind != "+" and is_set and value is not None:
            return value
        default = _Expansion(self.values)
        default.read(rest, quoted=quoted)
        if kind == "=":
            self.values.set(name, " ".join(default.fields))
        return default.fields


def _element(value: str | list[str] | None, index: str) -> str | list[str] | None:
    if index in ("@", "*"):
        return [value] if isinstance(value, str) else value
    words = [value] if isinstance(value, str) else value or []
    return words[int(index)] if index.isdigit() and int(index) < len(words) else None


def _changed(value: str, how: str, pattern: str) -> str:
    """A value without what a pattern matches at an end, with something replaced, or in other letters."""
    if is_unknown(value) or len(value) > _MAX_CHANGED:
        return value
    if how[0] in "^,":
        change = str.upper if how[0] == "^" else str.lower
        return change(value) if len(how) == 2 else change(value[:1]) + value[1:]
    if how[0] == "/":
        old, _, new = pattern.partition("/")
        return value.replace(old, new[:_MAX_CHANGED], -1 if len(how) == 2 else 1) if old else value
    cuts = range(len(value) + 1)
    begins = how[0] == "#"
    longest_first = reversed(cuts) if (len(how) == 2) == begins else cuts
    for cut in longest_first:
        if fnmatch.fnmatchcase(value[:cut] if begins else value[cut:], pattern):
            return value[cut:] if begins else value[:cut]
    return value


def _value_of(node: ast.expr, values: Values) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(str(values.get(node.id)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        inner = _value_of(node.operand, values)
        return -inner if isinstance(node.op, ast.USub) else int(not inner)
    if isinstance(node, ast.BoolOp):
        every = [bool(_value_of(each, values)) for each in node.values]
        return int(all(every) if isinstance(node.op, ast.And) else any(every))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        compare = _COMPARISONS[type(node.ops[0])]
        return int(compare(_value_of(node.left, values), _value_of(node.comparators[0], values)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value_of(node.left, values), _value_of(node.right, values))
    raise ValueError(f"{ast.unparse(node)} is not computed")
