"""The parts of a shell script: words as they are written, and the commands, branches and loops that they make up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

_OPERATORS = re.compile(r";;&?|;&|&&|\|\||\|&|<<-|<<<|<<|>>|&>>|&>|<&|>&|>\||[;&|()<>\n]")
_PLAIN = re.compile(r"""[^ \t\n;&|()<>'"\\`$]+""")
_INSIDE = re.compile(r"""[^'"\\`$(){}]+""")
_REDIRECTIONS = frozenset(("<", ">", ">>", "<&", ">&", "&>", "&>>", ">|", "<<<"))
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_FUNCTION = re.compile(r"[A-Za-z_][\w-]*")
_MAX_DEPTH = 60


@dataclass(frozen=True)
class Token:
    """A word as it is written, an operator, or an array with its words."""

    text: str
    line: int
    is_operator: bool = False
    items: tuple[str, ...] | None = None  # of an array; `text` is then its name with = or +=
    document: str | None = None  # that follows <<, for a word that ends it


@dataclass(frozen=True)
class Simple:
    """A command with its words."""

    words: tuple[Token, ...]


@dataclass(frozen=True)
class Branches:
    """An if with its conditions, or a case with its subject and patterns."""

    line: int
    subject: str | None  # of a case
    parts: tuple[tuple[object, Commands], ...]  # conditions, or patterns; of an else: None


@dataclass(frozen=True)
class Loop:
    """A for over words; `name` is empty for a while, whose body is never run."""

    name: str
    words: tuple[str, ...]
    body: Commands


@dataclass(frozen=True)
class Function:
    """What a name stands for."""

    name: str
    body: Commands


@dataclass(frozen=True)
class Part:
    """A command with what joins it to the one before, and whether its success is turned around."""

    joined: str
    negated: bool
    command: Simple | Branches | Loop | Function | Commands


@dataclass
class Commands:
    """Commands one after the other."""

    parts: list[Part] = field(default_factory=list)
    is_own_shell: bool = False


@lru_cache(maxsize=8)  # a script is followed once for each way that it may take
def parse(text: str) -> Commands:
    """The commands of a script; raises a ValueError where it cannot be read."""
    return _Parser(_tokens(text.replace("\r\n", "\n"))).script()


def closing(text: str, start: int, end: str) -> int:
    """The place after the `end` that closes what begins before `start`, past quotations and what is nested."""
    place = start
    while place < len(text):
        if (plain := _INSIDE.match(text, place)) is not None:
            place = plain.end()
            continue
        letter = text[place]
        if letter == end:
            return place + 1
        place = (
            after_quotation(text, place)
            if letter in "'\"\\`$" and not (end == '"' and letter == "'")
            else closing(text, place + 1, ")")
            if letter == "(" and end == ")"
            else place + 1
        )
    raise ValueError(f"a quotation is not closed: {text[max(0, start - 1) :].splitlines()[0].strip()[:60]!r}")


def after_quotation(text: str, place: int) -> int:
    """The place after what begins here: a quotation, an escaped letter, a substitution; else after the letter."""
    letter = text[place]
    if letter == "\\":
        return place + 2
    if letter == "'":
        end = text.find("'", place + 1)
        if end < 0:
            message = text[place:].splitlines()[0].strip()[:60]
            raise ValueError(f"a quotation is not closed: {message!r}")
        return end + 1
    if letter in '"`':
        return closing(text, place + 1, letter)
    if letter == "$" and text[place + 1 : place + 2] in ("(", "{"):
        return closing(text, place + 2, ")" if text[place + 1] == "(" else "}")
    return place + 1


def _line_end(text: str, place: int) -> int:
    found = text.find("\n", place)
    return len(text) if found < 0 else found


def _word_end(text: str, place: int) -> int:
    while place < len(text) and text[place] not in " \t\n;&|()<>":
        plain = _PLAIN.match(text, place)
        place = after_quotation(text, place) if plain is None else plain.end()
    return min(place, len(text))


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    waiting: list[tuple[int, str, bool]] = []  # documents whose lines follow
    place, line = 0, 1
    while place < len(text):
        letter = text[place]
        if text.startswith("\\\n", place) or letter in " \t":
            line += letter == "\\"
            place += 2 if letter == "\\" else 1
        elif letter == "#":
            place = _line_end(text, place)
        elif text.startswith("((", place) and (
            not found or found[-1].is_operator or found[-1].text in _OPENING
        ):
            end = closing(text, place + 1, ")")
            found.append(Token(text[place:end], line))
            line, place = line + text.count("\n", place, end), end
        elif (operator := _OPERATORS.match(text, place)) is not None:
            place = operator.end()
            if operator[0] == "\n":
                found.append(Token("\n", line, is_operator=True))
                line += 1
                if waiting:
                    place, line = _read_documents(text, place, line, waiting, found)
            else:
                found.append(Token(operator[0], line, is_operator=True))
        else:
            end = _word_end(text, place)
            word = text[place:end]
            if _ARRAY.match(word) and text[end : end + 1] == "(":
                begin, end = end + 1, _array_end(text, end + 1)
                items = tuple(each.text for each in _tokens(text[begin : end - 1]) if not each.is_operator)
                found.append(Token(word, line, items=items))
            else:
                if found and found[-1].is_operator and found[-1].text in ("<<", "<<-"):
                    waiting.append((len(found), word.strip("'\"\\"), found[-1].text == "<<-"))
                found.append(Token(word, line))
            line, place = line + text.count("\n", place, end), end
    return found


def _array_end(text: str, place: int) -> int:
    """The place after the ) of an array, whose words may be followed by comments."""
    while place < len(text):
        if text[place] == ")":
            return place + 1
        if text[place] == "#" and text[place - 1] in " \t\n(":
            place = _line_end(text, place)
        elif text[place] in " \t\n;&|(<>":
            place += 1
        else:
            place = _word_end(text, place)
    raise ValueError("an array is not closed")


def _read_documents(
    text: str, place: int, line: int, waiting: list[tuple[int, str, bool]], found: list[Token]
) -> tuple[int, int]:
    """Take the lines up to the word that ends each document."""
    for number, end, strips in waiting:
        lines: list[str] = []
        while place < len(text):
            until = _line_end(text, place)
            one = text[place:until]
            place, line = until + 1, line + 1
            if (one.lstrip("\t") if strips else one) == end:
                break
            lines.append(one)
        found[number] = Token(end, found[number].line, document="\n".join(lines))
    waiting.clear()
    return min(place, len(text)), line


_OPENING = ("if", "elif", "while", "until", "for", "then", "do", "else", "!", "{")
_CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0

    def script(self) -> Commands:
        found = self.commands(lambda: False)
        while self.place < len(self.tokens):  # an end without a beginning, as of what is not understood
            self.place += 1
            found.parts += self.commands(lambda: False).parts
        return found

    @property
    def now(self) -> Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def at(self, *texts: str) -> bool:
        return self.now is not None and self.now.text in texts and self.now.items is None

    def skip(self, *texts: str) -> None:
        while self.at(*texts):
            self.place += 1

    def commands(self, ends: Callable[[], bool]) -> Commands:
        """Commands up to a word that ends them."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
        found, joined = Commands(), ""
        while self.now is not None and not ends() and not self.at(*_CLOSING, ")", ";;", ";&", ";;&"):
            if self.at(";", "&", "\n", "&&", "||", "|", "|&"):
                kept = joined if self.at("\n") and joined in ("&&", "||", "|", "|&") else self.now.text
                joined = "" if kept in (";", "&", "\n") else kept
                self.place += 1
                continue
            negated = self.at("!")
            self.skip("!")
            found.parts.append(Part(joined, negated, self.command()))
            joined = ""
        self.depth -= 1
        return found

    def command(self) -> Simple | Branches | Loop | Function | Commands:
        ways: dict[str, Callable[[], Branches | Loop | Function | Commands]] = {
            "if": self.if_, "case": self.case, "for": self.for_, "while": self.while_, "until": self.while_,
            "(": self.group, "{": self.group, "function": self.function,
        }  # fmt: skip
        now = self.now
        if now is not None and now.items is None and now.text in ways:
            return ways[now.text]()
        following = [each.text for each in self.tokens[self.place + 1 : self.place + 3]]
        if now is not None and following == ["(", ")"] and _FUNCTION.fullmatch(now.text):
            return self.function()
        return self.simple()

    def simple(self) -> Simple:
        words: list[Token] = []
        begin = self.place
        brackets = 0  # [[ ]], between which operators are words
        while (now := self.now) is not None:
            if now.is_operator and not brackets:
                if now.text not in _REDIRECTIONS and now.text not in ("<<", "<<-"):
                    break
                if words and words[-1].text.isdigit():
                    words.pop()  # the number of what is redirected
                self.place += 1
                if self.now is not None and not self.now.is_operator:
                    if self.now.document is not None:
                        words.append(self.now)
                    self.place += 1
                continue
            brackets += (now.text == "[[") - (now.text == "]]")
            words.append(now)
            self.place += 1
        if self.place == begin:
            self.place += 1  # what cannot begin a command
        return Simple(tuple(words))

    def if_(self) -> Branches:
        line, parts = self.tokens[self.place].line, []
        while self.at("if", "elif", "else"):
            is_else = self.at("else")
            self.place += 1
            condition = None if is_else else self.commands(lambda: self.at("then"))
            self.skip("then")
            parts.append((condition, self.commands(lambda: False)))
        self.skip("fi")
        return Branches(line, None, tuple(parts))

    def case(self) -> Branches:
        line = self.tokens[self.place].line
        self.place += 1
        subject = self.now.text if self.now is not None else ""
        self.place += 1
        self.skip("\n", "in")
        parts: list[tuple[object, Commands]] = []
        while self.now is not None and not self.at("esac"):
            patterns: list[str] = []
            while self.now is not None and not self.at(")", "esac"):
                if not self.now.is_operator:
                    patterns.append(self.now.text)
                self.place += 1
            self.skip(")")
            parts.append((tuple(patterns), self.commands(lambda: self.at(";;"))))
            self.skip(";;", ";&", ";;&", "\n", ";")
        self.skip("esac")
        return Branches(line, subject, tuple(parts))

    def for_(self) -> Loop:
        self.place += 1
        name = self.now.text if self.now is not None else ""
        self.place += 1
        words: list[str] = []
        while self.now is not None and not self.at(";", "\n", "do"):
            words.append(self.now.text)
            self.place += 1
        return Loop(name, tuple(words[1:]), self.body())

    def while_(self) -> Loop:
        self.place += 1
        self.commands(lambda: self.at("do"))
        return Loop("", (), self.body())

    def body(self) -> Commands:
        self.skip(";", "\n")
        self.skip("do")
        found = self.commands(lambda: self.at("done"))
        self.skip("done")
        return found

    def group(self) -> Commands:
        end = ")" if self.at("(") else "}"
        self.place += 1
        found = self.commands(lambda: self.at(end))
        if self.at(end):
            self.place += 1
        found.is_own_shell = end == ")"
        return found

    def function(self) -> Function:
        self.skip("function")
        name = self.now.text if self.now is not None else ""
        self.place += 1
        while self.at("(", ")", "\n"):
            self.place += 1
        return Function(name, self.group() if self.at("{") else Commands())
