"""The words of a shell script, with its variables, their defaults and its arithmetic put in. Nothing is run."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, MutableMapping

_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))+)\)\)")
_COMMAND = re.compile(r"\$\((?!\()[^()]*\)")
_OUTPUT, _MARK = "$(...)", "\x01"  # in place of what a command would say
# ${NAME}, ${NAME:-default} and its relatives, $NAME; a default may hold others, which are put in first.
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=])((?:[^${}]|\$\(\.{3}\))*))?\}|\$(\w+)")
_MAX_ROUNDS = 10  # of defaults in defaults
_MAX_LENGTH = 100_000  # of a word with its variables put in
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_ALL_OF_IT = re.compile(r"\$(\w+)|\$\{(\w+)(?:\[[@*]\])?\}")  # a word that is a variable and nothing else
# After these a command begins, before which variables are set.
_OPENINGS = (
    "&&",
    "||",
    "|",
    "&",
    "then",
    "do",
    "else",
    "!",
    "if",
    "elif",
    "while",
    "export",
    "local",
    "declare",
    "readonly",
)
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def script_words(text: str, variables: MutableMapping[str, str]) -> Iterator[tuple[str, bool]]:
    """The words in their order, each with whether it sets a variable; `variables` are those known so far, to which the
    caller adds what a word defines."""
    open_text = ""
    for line in text.replace("\\\n", " ").splitlines():
        open_text += line
        try:
            words = shlex.split(_without_commands(_computed(open_text, variables)), comments=True)
        except ValueError:
            open_text += "\n"  # a quotation goes on in the next line
            continue
        open_text = ""
        begins = True
        for word in words:
            sets = begins and _ASSIGNMENT.match(word) is not None
            begins = sets or word in _OPENINGS or word.endswith((";", "(", ")", "{"))
            for part in _split(word, variables):
                yield _expanded(_computed(part, variables), variables), sets
    if open_text:
        raise ValueError(f"a quotation is not closed: {open_text.splitlines()[0].strip()[:60]!r}")


def _without_commands(text: str) -> str:
    """The text with each $(command), and those inside of it, as one word that stands for what nobody ran."""
    for _ in range(_MAX_ROUNDS):
        before, text = text, _COMMAND.sub(_MARK, text)
        if text == before:
            break
    return text.replace(_MARK, _OUTPUT)


def _split(word: str, variables: Mapping[str, str]) -> list[str]:
    """The words that a variable holds which is a word of its own, as $ARGUMENTS is; other words are one."""
    found = _ALL_OF_IT.fullmatch(word)
    held = variables.get(found[1] or found[2]) if found else None
    try:
        return [word] if held is None else shlex.split(held)
    except ValueError:
        return [word]


def _expanded(word: str, variables: MutableMapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[4], found[3]
        known = variables.get(name, os.environ.get(name))
        if not known and found[2] == "=":
            variables[name] = default
        if known or default is None:
            return found[0] if known is None else known
        return str(default)

    for _ in range(_MAX_ROUNDS):
        before, word = word, _VARIABLE.sub(value, word)
        if len(word) > _MAX_LENGTH:
            raise ValueError(f"a word of more than {_MAX_LENGTH} characters")
        if word == before:
            break
    return word


def _computed(text: str, variables: MutableMapping[str, str]) -> str:
    """The text with `$((...))` replaced by its value; what cannot be computed stays, as one word."""

    def value(found: re.Match[str]) -> str:
        term = _expanded(found[1], variables).strip()
        try:
            return str(_value_of(ast.parse(term, mode="eval").body, variables))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
            return "".join(found[0].split())

    return _ARITHMETIC.sub(value, text)


def _value_of(node: ast.expr, variables: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(variables.get(node.id, os.environ.get(node.id, "")))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value_of(node.left, variables), _value_of(node.right, variables))
    raise ValueError(f"{ast.unparse(node)} is not computed")
