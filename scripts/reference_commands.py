"""docs/command-line.md: every command, argument and option, from the command line itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.main import get_command

from shardproof.cli import app

INTRO = """\
# Command line

<!-- python scripts/reference.py --write makes this page from the commands in src/shardproof/. -->

`shardproof COMMAND --help` prints the same for one command. Without the command on your path, use
`python -m shardproof COMMAND`.
"""
_RUN = [
    ("0", "the run is complete"),
    (
        "2",
        "the recipe, the data, the run folder or the machine cannot be used; the message names what to change",
    ),
    ("3", "a finding stopped the run; [faults](faults.md) explains its code"),
    ("129, 130, 143", "stopped by SIGHUP, Ctrl-C or SIGTERM, and saved; rerun the same command to resume"),
    ("138", "stopped by SIGUSR1, a scheduler's warning before the time limit, and saved; the same"),
    ("other", "a rank died; rerun the same command to resume from the last checkpoint"),
]
_COUNT = [
    ("0", "no findings"),
    ("1 to 100", "the number of findings, at most 100"),
    ("120", "invalid options or an unsupported layout"),
]
_PLAIN = [("0", "done"), ("2", "invalid options or paths; the message names what to change")]
_PLACEHOLDERS: dict[Any, str] = {int: "N", float: "NUMBER", Path: "PATH"}
# By command: examples, and exit codes with their meaning.
EXAMPLES = {
    "train": """\
shardproof train recipes/gsm8k_grpo.toml --dry-run
shardproof train recipes/gsm8k_grpo.toml train.steps=200 output.folder=runs/mine
shardproof train recipes/gsm8k_grpo.toml output.folder=runs/mine --from 100 --allow optimizer.lr""",
    "doctor": """\
shardproof doctor Qwen/Qwen3-0.6B --ranks 2
shardproof doctor Qwen/Qwen3-0.6B --strategy fsdp1 --sequence-parallel 2 --html doctor.html""",
    "estimate": "shardproof estimate Qwen/Qwen3-0.6B --ranks 8",
    "rendezvous": "shardproof rendezvous --rdzv-endpoint login:29500",
    "demo": "shardproof demo",
    "recipes": "shardproof recipes my-recipes",
    "report": """\
shardproof report runs/mine
shardproof report runs/a runs/b --output comparison.html""",
    "watch": "shardproof watch runs/mine",
    "verify": "shardproof verify runs/mine/model",
    "explain": "shardproof explain S207",
    "push": "shardproof push runs/mine --repo my-name/my-model",
}
_VERIFY = [
    ("0", "every tensor is unchanged since it was saved"),
    _PLAIN[1],
    ("3", "a tensor differs; each is named"),
]
EXIT_CODES = {
    "train": _RUN,
    "demo": _RUN,
    "doctor": _COUNT,
    "estimate": [_COUNT[0], _COUNT[2]],
    "verify": _VERIFY,
}


def page() -> str:
    """The text of docs/command-line.md."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    return (
        "\n\n".join([INTRO.strip(), _shared(), *(_command(name, each) for name, each in commands.items())])
        + "\n"
    )


def _shared() -> str:
    """The options that come before a command."""
    return "## Options before the command\n\n" + _options(get_command(app))


def _command(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join(["shardproof", name, *(_usage(each) for each in arguments), "[OPTIONS]"])
    parts = [f"## shardproof {name}", _text(command.help), f"```text\n{usage}\n```"]
    if name in EXAMPLES:
        parts.append(f"```bash\n{EXAMPLES[name]}\n```")
    if arguments:
        rows = [f"| `{_label(each)}` | {_text(each.help)} |" for each in arguments]
        parts.append("\n".join(["| argument | meaning |", "| --- | --- |", *rows]))
    if any(_is_option(each) for each in command.params):
        parts.append(_options(command))
    codes = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.get(name, _PLAIN)]
    parts.append("\n".join(["| exit code | meaning |", "| --- | --- |", *codes]))
    return "\n\n".join(parts)


def _options(command: Any) -> str:
    options = [each for each in command.params if _is_option(each)]
    rows = [f"| {_names(each)} | {_default(each)} | {_meaning(each)} |" for each in options]
    return "\n".join(["| option | default | meaning |", "| --- | --- | --- |", *rows])


def _is_option(param: Any) -> bool:
    return param.param_type_name == "option" and param.name != "help"


def _usage(argument: Any) -> str:
    label = _label(argument)
    return label if argument.required else f"[{label}]"


def _label(argument: Any) -> str:
    label = argument.name.upper()
    return f"{label}..." if argument.nargs == -1 else label


def _names(option: Any) -> str:
    kind = option.type_descriptor.annotation
    value = "" if option.is_flag else f" {option.metavar or _PLACEHOLDERS.get(kind, 'TEXT')}"
    return ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))


def _default(option: Any) -> str:
    default = option.default
    if option.is_flag and option.secondary_opts:
        return f"`{(option.opts if default else option.secondary_opts)[0]}`"
    is_empty = default is None or default is False or default == "" or callable(default)
    return "" if is_empty else f"`{default}`"


def _meaning(option: Any) -> str:
    text = _text(option.help)
    if option.multiple and "repeat" not in text:
        text += "; can be repeated"
    return f"{text}; environment variable `{option.envvar}`" if option.envvar else text


def _text(text: str | None) -> str:
    """Help on one line, fit for a table's cell."""
    return " ".join((text or "").split()).replace("|", r"\|")
