"""The settings that a shell script starts a run with: its branches are followed, and nothing is run."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from shardproof.config.imported.shell_conditions import condition
from shardproof.config.imported.shell_syntax import (
    Branches,
    Commands,
    Function,
    Loop,
    Part,
    Simple,
    Token,
    parse,
)
from shardproof.config.imported.shell_values import UNKNOWN, Values, is_unknown

# Keys of sections, and those of no section or of a group of configs, which are as other words are: model_engine=megatron.
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_]\w*\.[\w.-]*=(?!=)", re.DOTALL)
_OF_NO_SECTION = re.compile(r"[+~]{0,2}[a-z_]\w*(?:/\w+)*(?:@[\w.]+)?=(?!=)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARING = ("export", "local", "declare", "readonly", "typeset")
_SAYING = ("echo", "printf", "cat", "tee", "log", "read", "die", "usage")  # whose words are no settings
_SHELLS = ("bash", "sh", "zsh", "source", ".")
_CONFIG_OPTIONS = {"--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path"}
_CONFIG_OPTIONS |= {"--config-dir": "path", "-cd": "path"}
_SUCCEEDS = ("true", ":", "echo", "printf", "set", "shopt", "trap", "unset", "shift", *_DECLARING)
_MAX_COMMANDS, _MAX_NESTED = 20_000, 12
_MAX_CHOICES = 24


@dataclass(frozen=True)
class Choice:
    """A way that only running the script would tell: what decides, the way that was taken, and the others."""

    what: str
    taken: str
    others: tuple[str, ...]


@dataclass
class Started:
    """What a script starts: the settings of each command in their order, what was chosen, and what was not read."""

    commands: list[list[str]] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    configs: list[tuple[str, str]] = field(default_factory=list)  # folder and name of each --config-name
    has_options: bool = False  # as TRL's command line has them: --learning_rate 1e-6
    missing: list[str] = field(default_factory=list)  # other scripts that were not found


class _End(Exception):
    """The script ends here."""


class _Return(_End):
    """A function, or a script that another one runs, ends here."""


def read_shell(
    text: str, ways: Mapping[str, int] | None = None, find: Callable[[str], str | None] = lambda name: None
) -> Started:
    """The settings of a script; `ways` are the choices that are taken otherwise, `find` has the text of other scripts."""
    run = _Run(dict(ways or {}), find)
    with contextlib.suppress(_End):
        run.commands(parse(text))
    return run.started


def other_ways(started: Started) -> list[dict[str, int]]:
    """Each choice taken otherwise, one at a time."""
    found = [
        {key: way} for key, choice in started.choices.items() for way in range(1, len(choice.others) + 1)
    ]
    return found[:_MAX_CHOICES]


class _Run:
    def __init__(self, ways: dict[str, int], find: Callable[[str], str | None]) -> None:
        self.ways, self.find, self.started = ways, find, Started()
        self.values = Values({}, choose=self.choose)
        self.functions: dict[str, Commands] = {}
        self.count, self.nested = 0, 0

    def choose(self, what: str, ways: Sequence[str]) -> int:
        """The way that is taken where only running the script would tell: the first, unless another is asked for."""
        way = min(self.ways.get(what, 0), len(ways) - 1)
        if what not in self.started.choices:
            others = tuple(each for place, each in enumerate(ways) if place != way)
            self.started.choices[what] = Choice(what, ways[way], others)
        return way

    def commands(self, every: Commands) -> bool | None:
        """Follow commands one after the other; returns whether the last one succeeds, None if nobody knows."""
        before = dict(self.values.variables) if every.is_own_shell else None
        succeeds: bool | None = True
        for part in every.parts:
            is_left_out = succeeds is False if part.joined == "&&" else succeeds is not False
            if part.joined in ("&&", "||") and is_left_out:
                continue
            succeeds = self.part(part)
        if before is not None:
            self.values.variables = before
        return succeeds

    def part(self, part: Part) -> bool | None:
        self.count += 1
        if self.count > _MAX_COMMANDS:
            raise ValueError(f"it has more than {_MAX_COMMANDS} commands")
        command = part.command
        succeeds: bool | None = True
        if isinstance(command, Simple):
            succeeds = self.simple(command)
        elif isinstance(command, Branches):
            succeeds = self.branches(command)
        elif isinstance(command, Loop):
            self.loop(command)
        elif isinstance(command, Function):
            self.functions[command.name] = command.body
        else:
            succeeds = self.inside(partial(self.commands, command))
        return succeeds if not part.negated or succeeds is None else not succeeds

    def inside(self, follow: Callable[[], bool | None]) -> bool | None:
        """Follow what is nested, unless that has no end."""
        self.nested += 1
        if self.nested > _MAX_NESTED * 4:
            raise ValueError("it calls itself")
        try:
            return follow()
        finally:
            self.nested -= 1

    def branches(self, found: Branches) -> bool | None:
        if found.subject is not None:
            return self.inside(lambda: self.case(found))
        for tested, body in found.parts:
            succeeds: bool | None = True
            if isinstance(tested, Commands):
                self.values.unset_is_empty = True
                succeeds = self.commands(tested)
                self.values.unset_is_empty = False
            if succeeds is None and isinstance(tested, Commands):
                what = f"line {found.line}: if {_said(tested)}"
                succeeds = bool(self.choose(what, ("no", "yes")))
            if succeeds:
                return self.inside(partial(self.commands, body))
        return True

    def case(self, found: Branches) -> bool | None:
        self.values.unset_is_empty = True
        subject = self.values.text(found.subject or "")
        self.values.unset_is_empty = False
        bodies = {
            " | ".join(map(str, patterns)): body
            for patterns, body in found.parts
            if isinstance(patterns, tuple)
        }
        if is_unknown(subject):
            names = list(bodies)
            if names:
                chosen = self.choose(f"line {found.line}: case {found.subject}", names)
                return self.commands(bodies[names[chosen]])
            return True
        for patterns, body in found.parts:
            if isinstance(patterns, tuple) and any(
                fnmatch.fnmatchcase(subject, self.values.text(each)) for each in patterns
            ):
                return self.commands(body)
        return True

    def loop(self, found: Loop) -> None:
        if not found.name.isidentifier():
            return  # of a while, whose end only running it would tell
        for word in self.values.array(found.words):
            self.values.set(found.name, word)
            self.inside(partial(self.commands, found.body))

    def simple(self, found: Simple) -> bool | None:
        words = list(found.words)
        while words and (words[0].items is not None or _ASSIGNMENT.fullmatch(words[0].text)):
            self.assign(words.pop(0))
        documents = [each.document for each in words if each.document is not None]
        words = [each for each in words if each.document is None]
        if not words:
            return True
        first = words[0].text
        if first in ("[", "[[", "test") or first.startswith("(("):
            return condition([each.text for each in words], self.values)
        if first in _DECLARING:
            for each in words[1:]:
                if each.items is not None or _ASSIGNMENT.fullmatch(each.text):
                    self.assign(each)
            return True
        return self.command([word for each in words for word in self.words_of(each)], documents)

    def words_of(self, token: Token) -> list[str]:
        if token.items is not None:
            return self.values.array(token.items)
        return self.values.words(token.text)

    def assign(self, token: Token) -> None:
        if token.items is not None:
            name, adds = token.text.rstrip("+="), "+=" in token.text
            self.values.set(name, self.values.array(token.items), adds=adds)
        elif (found := _ASSIGNMENT.fullmatch(token.text)) is not None:
            self.values.set(found[1], self.values.text(found[3]), adds=bool(found[2]))

    def command(self, words: list[str], documents: Sequence[str | None]) -> bool | None:
        if not words:
            return True
        first, rest = words[0], words[1:]
        if first in self.functions:
            return self.inside(lambda: self.call(self.functions[first], rest))
        if first == "return" or (first == "exit" and self.started.commands):
            raise _Return if first == "return" else _End
        if first == "shift":
            del self.values.arguments[: int(rest[0]) if rest and rest[0].isdigit() else 1]
        if first == "set" and "--" in rest:
            self.values.arguments = rest[rest.index("--") + 1 :]
        if first == "unset":
            for name in rest:
                self.values.variables.pop(name, None)
        if first in _SAYING:
            return True
        for document in documents:
            if document is not None and "python" not in first:
                self.script(document, rest)
        if not self.starts_script(words):
            settings = _settings(words)
            if settings:
                self.started.commands.append(settings)
                self.name_config(words)
            elif any(re.match(r"--[a-z]+_[a-z_]+", word) for word in words):
                self.started.has_options = True
        return True if first in _SUCCEEDS else False if first == "false" else None

    def name_config(self, words: Sequence[str]) -> None:
        """Note the config that a command starts from."""
        found = {}
        for place, word in enumerate(words):
            option, _, value = word.partition("=")
            if option in _CONFIG_OPTIONS:
                found[_CONFIG_OPTIONS[option]] = value or "".join(words[place + 1 : place + 2])
        if found.get("name"):
            self.started.configs.append((found.get("path", ""), found["name"]))

    def call(self, body: Commands, arguments: list[str]) -> bool | None:
        before, self.values.arguments = self.values.arguments, arguments
        try:
            return self.commands(body)
        except _Return:
            return None
        finally:
            self.values.arguments = before

    def starts_script(self, words: list[str]) -> bool:
        """Follow what a shell is given to run: words after -c, or another script with its arguments."""
        if words[0] == "eval":
            self.script(" ".join(words[1:]), [])
            return True
        names = [word.rpartition("/")[2] for word in words]
        shell = next((place for place, name in enumerate(names) if name in _SHELLS), None)
        if shell is None and not words[0].endswith(".sh"):
            return False
        rest = words[(0 if shell is None else shell + 1) :]
        for place, word in enumerate(rest):
            if re.fullmatch(r"-[a-z]*c", word) and place + 1 < len(rest):
                self.script(rest[place + 1], rest[place + 3 :])
                return True
            name = word.removeprefix(f"{UNKNOWN}/")  # of the script's own folder, as a command says it
            if name.endswith(".sh") and not is_unknown(name):
                self.other_script(name, rest[place + 1 :])
                return True
        return False

    def other_script(self, name: str, arguments: list[str]) -> None:
        text = self.find(name)
        if text is not None:
            self.script(text, arguments)
            return
        self.started.missing.append(name)
        settings = _settings(arguments)
        if settings:
            self.started.commands.append(settings)
            self.started.notes.append(
                f"{name} gets settings, and was not found: what it sets itself is missing"
            )

    def script(self, text: str, arguments: list[str]) -> None:
        """Follow a script in the script; what cannot be read is none."""
        try:
            found = parse(text)
        except ValueError:
            return
        try:
            self.inside(lambda: self.call(found, arguments))
        except _End:
            return


def _settings(words: Sequence[str]) -> list[str]:
    """The settings among a command's words; those of no section stand beside others, unlike variables before a command."""
    first = next((place for place, word in enumerate(words) if _SETTING.match(word)), None)
    if first is None:
        return []
    while first and _OF_NO_SECTION.match(words[first - 1]):
        first -= 1
    return [word for word in words[first:] if _SETTING.match(word) or _OF_NO_SECTION.match(word)]


def _said(tested: Commands) -> str:
    """A condition as a line of text."""
    words = []
    for part in tested.parts:
        if isinstance(part.command, Simple):
            joined = f"{part.joined} " if part.joined in ("&&", "||", "|") else ""
            words.append(f"{joined}{'! ' * part.negated}{' '.join(each.text for each in part.command.words)}")
    return " ".join(" ".join(words).split())[:100]
