"""Status on its way to the user: dated lines, a terminal's live lines, and what `--quiet` leaves."""

import contextlib
import logging
import os
import pty
import re
import sys
import threading

import pytest

from shardproof.terminal import Bar, attached

logger = logging.getLogger("shardproof.tests")


def bar(done, text="", ended=False):
    return {"bar": Bar("step", done, 10, text, ended)}


def report_a_run():
    logger.info("loading the policy ...")
    logger.info("120 prompts")
    logger.info("step 5/10", extra=bar(5, "reward 0.500"))
    logger.warning("reward failed: \x1b[2J")
    logging.getLogger("library.module").warning("look at this")
    logging.getLogger("library.module").info("nobody needs this")
    logger.info("trained 5 steps", extra=bar(5, ended=True))


@contextlib.contextmanager
def standard_error(monkeypatch):
    """A pty as the standard error of the block; what was written to it is in the list afterwards."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    parts, written = [], []

    def read():
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        yield written
    reader.join()
    os.close(ours)
    written.append(b"".join(parts).decode())


def plain(text):
    """What a terminal shows of a text, without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_without_a_terminal_each_message_is_a_line_with_the_time(capsys):
    with attached() as terminal:
        report_a_run()
        terminal.show("the end")
    lines = capsys.readouterr().err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines[:-1])
    assert [line[9:] for line in lines[:-1]] == [
        "loading the policy ...",
        "120 prompts",
        "step 5/10",
        "warning: reward failed: \\x1b[2J",
        "warning: library.module: look at this",
        "trained 5 steps",
    ]
    assert lines[-1] == "the end"


def test_quiet_leaves_warnings_and_what_is_shown_at_the_end(capsys):
    with attached(quiet=True) as terminal:
        report_a_run()
        terminal.show("the end")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "reward failed" in lines[0] and lines[-1] == "the end"


def test_ranks_above_0_show_warnings_alone_with_their_number(capsys):
    with attached(rank=3):
        report_a_run()
    lines = capsys.readouterr().err.splitlines()
    assert [line[9:] for line in lines] == [
        "rank 3: warning: reward failed: \\x1b[2J",
        "rank 3: warning: library.module: look at this",
    ]


def test_a_terminal_has_a_spinner_and_a_bar_and_warnings_above_them(monkeypatch):
    with standard_error(monkeypatch) as written, attached():
        report_a_run()
    text = plain(written[0])
    assert "⠋ loading the policy  0 s" in text
    lines = [line.split("\r")[-1].rstrip() for line in text.splitlines()]
    bars = [number for number, line in enumerate(lines) if line.startswith("step 5/10")]
    warning = next(number for number, line in enumerate(lines) if line.startswith("warning: reward failed"))
    assert "reward 0.500" in lines[bars[-1]]
    assert warning < bars[-1], "what is drawn live stays under what was said"
    assert lines[-1] == "trained 5 steps" and "\x1b[2J" not in written[0]
    assert written[0].count("\x1b[?25l") <= written[0].count("\x1b[?25h"), "the cursor is shown again"


def test_long_lines_reach_a_terminal_unbroken_so_that_commands_can_be_copied(monkeypatch):
    command = "shardproof train recipe.toml " + " ".join(f"section.key{number}=value" for number in range(9))
    with standard_error(monkeypatch) as written, attached() as terminal:
        terminal.show(f"Next:    {command}")
        logger.warning("later: %s", command)
    lines = plain(written[0]).splitlines()
    assert f"Next:    {command}" in lines and f"warning: later: {command}" in lines


def test_a_rank_that_does_not_own_the_live_line_clears_it_first(monkeypatch):
    with standard_error(monkeypatch) as written, attached(rank=1):
        logger.warning("late")
    assert written[0].startswith("\r\x1b[2Krank 1: warning: late")


def test_libraries_with_handlers_of_their_own_are_shown_alike_and_get_them_back(capsys):
    library, own = logging.getLogger("library"), logging.NullHandler()
    library.addHandler(own)
    library.propagate = False
    try:
        with attached() as terminal:
            terminal.adopt("library", "absent")
            logger.info("ours")
            library.warning("theirs")
        assert library.handlers == [own]
    finally:
        library.removeHandler(own)
        library.propagate = True
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["ours", "warning: library: theirs"]


def test_nothing_stays_attached():
    before = logging.getLogger().handlers[:], logging.getLogger("shardproof").level
    with pytest.raises(KeyError), attached():
        raise KeyError
    assert (logging.getLogger().handlers, logging.getLogger("shardproof").level) == before


def test_a_process_without_stderr_works(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with attached() as terminal:
        logging.getLogger("shardproof").warning("unseen")
        terminal.show("unseen")
    sys.stderr.close()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_that_is_gone_does_not_end_a_run(monkeypatch, is_terminal):
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails too
        monkeypatch.setattr(sys, "stderr", _Gone(full, is_terminal))
        try:
            with attached() as terminal:
                report_a_run()
                terminal.show("the end")
        except OSError as error:
            pytest.fail(f"the run would end with {error}")


class _Gone:
    """A stream that cannot be written."""

    def __init__(self, stream, is_terminal):
        self._stream, self.isatty = stream, lambda: is_terminal

    def __getattr__(self, name):
        return getattr(self._stream, name)
