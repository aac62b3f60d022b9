"""Signals inside the loop: noted once, heeded at the end of the step; a second Ctrl-C does not wait for it."""

import os
import signal
import threading

import pytest

from shardproof.rl.stopping import STOP_SIGNALS, StopFlag, request_stop


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """The handlers of a shell's foreground process, whatever this one was started with."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    defaults = {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, defaults.get(number, signal.SIG_DFL)) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_nothing_is_interrupted(number):
    before = signal.getsignal(number)
    with StopFlag() as stop:
        assert stop.number == 0
        send(number)
        assert stop.number == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), StopFlag():
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_an_agent_hands_on_what_the_terminal_sent_too(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    with pytest.raises(KeyboardInterrupt), StopFlag() as stop:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert stop.number == signal.SIGINT
        send(signal.SIGINT)


def test_schedulers_may_repeat_themselves():
    with StopFlag() as stop:
        for _ in range(3):
            send(signal.SIGTERM)
        assert stop.number == signal.SIGTERM


def test_nohup_keeps_its_meaning():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopFlag() as stop:
        send(signal.SIGHUP)
        assert stop.number == 0


def test_a_thread_gets_no_signals_and_needs_no_handlers():
    found = []

    def enter():
        with StopFlag() as stop:
            found.append(stop.number)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [0]


def test_a_thread_is_stopped_by_request_and_the_next_run_is_not():
    found, entered, asked = [], threading.Event(), threading.Event()

    def run():
        with StopFlag() as stop:
            entered.set()
            asked.wait()
            found.append(stop.number)
        with StopFlag() as stop:
            found.append(stop.number)

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    request_stop(signal.SIGTERM)
    asked.set()
    thread.join()
    assert found == [signal.SIGTERM, 0]
