"""The facts of `shardproof data` on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardproof.text import printable

_WHITE = {" ": "·", "\n": "↵", "\t": "→", "\r": "←"}
_PLAIN_WHITE = {" ": "_", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_BAR, _PLAIN_BAR = "█", "#"
_MARK, _PLAIN_MARK = "▔", "^"
_FIRST, _LAST = 96, 48  # tokens of a long sequence that are shown
_MAX_CELL = 24  # characters of a token
_BAR_WIDTH = 36
_MARGIN = 2


class View:
    """Prints facts for people; on a terminal without Unicode in letters that it has."""

    def __init__(self, console: Console):
        self.console = console
        if isinstance(console.file, io.TextIOWrapper):
            console.file.reconfigure(errors="backslashreplace")
        rich = (console.encoding or "").lower().startswith("utf")
        self._white = _WHITE if rich else _PLAIN_WHITE
        self._bar, self._mark = (_BAR, _MARK) if rich else (_PLAIN_BAR, _PLAIN_MARK)
        self._dots = "…" if rich else "..."

    def show(self, facts: Mapping[str, Any], label: str) -> None:
        """All facts, then the rows."""
        self._print(
            Text.assemble(
                (printable(label), "bold"), f": {facts['algorithm']} on {printable(facts['model'])}"
            )
        )
        self.console.print(self._sets(facts))
        self._print("min to max: tokens of prompts; longest: with what may follow them", "dim")
        if facts.get("begins"):
            self._print("The environment begins conversations itself: these are the rows' own prompts", "dim")
        self._lengths(facts)
        if len(facts["sources"]) > 1:
            self._print("")
            self.console.print(self._sources(facts["sources"]))
        for line in _notes(facts):
            self._print(line)
        for number, row in enumerate(facts["shown"], 1):
            self._row(row, number, facts)

    def _print(self, text: Text | str, style: str = "") -> None:
        self.console.print(Text(text, style) if isinstance(text, str) else text, soft_wrap=False)

    def _sets(self, facts: Mapping[str, Any]) -> Table:
        table = _table("set", "rows", "left out", "duplicates", "min", "median", "p95", "max", "longest")
        for name, each in facts["sets"].items():
            lengths = each["prompt_tokens"]
            shown = [f"{lengths[key]:g}" for key in ("min", "median", "p95", "max")]
            out = sum(each["dropped"].values())
            table.add_row(
                printable(name, 20), f"{each['rows']:,}", f"{out:,}" if out else "-",
                f"{each['duplicates']:,}" if each["duplicates"] else "-", *shown, f"{each['longest']:,}",
            )  # fmt: skip
        return table

    def _lengths(self, facts: Mapping[str, Any]) -> None:
        each = facts["sets"][facts["split"]]
        most = max(part["rows"] for part in each["histogram"])
        self._print(f"\nPrompt lengths of {facts['split']}, in tokens", "bold")
        for part in each["histogram"]:
            low, high = part["from"], part["to"]
            span = f"{low}" if low == high else f"{low}-{high}"
            length = -(-part["rows"] * _BAR_WIDTH // most)
            self._print(f"  {span:>11}  {self._bar * length} {part['rows']:,}")

    def _sources(self, sources: Sequence[Mapping[str, Any]]) -> Table:
        table = _table("source", "rows", "weight", "share", "from", left=("from",))
        for each in sources:
            weight = "-" if each["weight"] is None else f"{each['weight']:g}"
            cells = (printable(each["name"], 24), f"{each['rows']:,}", weight, f"{each['share']:.1%}")
            table.add_row(*cells, Text(printable(each["source"]), overflow="ellipsis", no_wrap=True))
        return table

    def _row(self, row: Mapping[str, Any], number: int, facts: Mapping[str, Any]) -> None:
        about = [f"row {row['row'] + 1}"]
        about += [f"{name} {row[name]}" for name in ("source", "sampling", "template") if name in row]
        if "judged" in row:
            about.append(row["judged"])
        if "answer" in row:
            about.append(f"answer {row['answer']!r}")
        self._print("")
        title = f"{number}. {facts['split']}, {', '.join(printable(each, 120) for each in about)}"
        self._print(title, "bold")
        for sequence in row["sequences"]:
            tokens = sequence["tokens"]
            num = sum(token["trained"] for token in tokens)
            name = f"{sequence['name']}: " if sequence["name"] else ""
            trained = f", {num} trained on" if num else ""
            self._print(f"  {name}{len(tokens)} tokens{trained}", "dim")
            for line in self._tokens(tokens):
                self.console.print(line, soft_wrap=True)
        if "error" in row:
            self._print(f"  no conversation begins: {printable(row['error'], 300)}", "yellow")
        elif facts["samples"] and not any(t["trained"] for s in row["sequences"] for t in s["tokens"]):
            most = row.get("sampling", {}).get("max_new_tokens", facts["max_new_tokens"])
            use = "trained on" if facts["split"] == "train" else "scored"
            self._print(f"  then up to {most} tokens are sampled, and {use}", "dim")

    def _tokens(self, tokens: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
        """Lines of tokens over lines of their ids, with a mark under those that are trained on."""
        if len(tokens) > _FIRST + _LAST + 8:
            yield from self._block(tokens[:_FIRST])
            yield Text(f"    {self._dots} {len(tokens) - _FIRST - _LAST} tokens {self._dots}", "dim")
            tokens = tokens[-_LAST:]
        yield from self._block(tokens)

    def _block(self, tokens: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
        width, used = self.console.width - 2 * _MARGIN, 0
        line: list[tuple[Mapping[str, Any], str, int]] = []
        for token in tokens:
            text = self._visible(token["text"])
            size = max(len(text), len(str(token["id"])), Text(text).cell_len)
            if line and used + size + 1 > width:
                yield from self._lines(line)
                line, used = [], 0
            line.append((token, text, size))
            used += size + 1
        if line:
            yield from self._lines(line)

    def _lines(self, line: Sequence[tuple[Mapping[str, Any], str, int]]) -> Iterator[Text]:
        texts, ids, marks = (Text(" " * _MARGIN) for _ in range(3))
        for token, text, size in line:
            style = "bold green" if token["trained"] else "cyan" if token["special"] else ""
            texts.append(text, style)
            texts.append(" " * (size - Text(text).cell_len + 1))
            ids.append(f"{token['id']:<{size}} ", "dim")
            marks.append((self._mark if token["trained"] else " ") * size, "green")
            marks.append(self._mark if token["trained"] else " ", "green")
        for each in (texts, ids):
            each.rstrip()
            yield each
        if any(token["trained"] for token, _, _ in line):
            marks.rstrip()
            yield marks

    def _visible(self, text: str) -> str:
        shown = "".join(self._white.get(character, character) for character in text)
        encoding = self.console.encoding
        shown = printable(shown).encode(encoding, "backslashreplace").decode(encoding)
        return shown if len(shown) <= _MAX_CELL else shown[: _MAX_CELL - 1] + self._dots[0]


def _notes(facts: Mapping[str, Any]) -> Iterator[Text]:
    """Lines about the end of completions, the context, what is left out, and what stands in two sets."""
    ends = ", ".join(f"{printable(each['text'])!r} ({each['id']})" for each in facts["stop_tokens"]) or "none"
    yield Text(f"\nStop tokens: {ends}")
    longest, context = max(each["longest"] for each in facts["sets"].values()), facts["context"]
    room = "has no limit" if context is None else f"has {context:,} positions"
    yield Text(f"Context: the model {room}; the longest sequence may need {longest:,}")
    for name, each in facts["sets"].items():
        for why, num in each["dropped"].items():
            yield Text(f"Left out of {name}: {num:,} row{'s' * (num != 1)} {why}", "yellow")
    for each in facts["shared"]:
        examples = ", ".join(repr(printable(text)) for text in each["examples"])
        message = f"In both train and {each['set']}: {each['rows']:,} prompts, such as {examples}"
        yield Text(printable(message, 300), "bold yellow")


def _table(*heads: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold", show_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number == 0 or head in left else "right", no_wrap=True)
    return table
