"""`shardproof report` and `shardproof watch`, as a user calls them."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from shardproof.cli import app
from tests.report.folders import add_events, make_facts, make_metrics, make_run, sync, write_lines


def call(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_one_run_is_written_into_its_folder(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    result = call("report", folder)
    assert result.exit_code == 0 and result.stdout.strip() == str(folder / "report.html")
    tab.open((folder / "report.html").as_uri())
    assert tab.text("h1") == "run"


def test_runs_are_compared_on_one_page(tab, tmp_path):
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second", scale=0.5, lr=2e-4)
    (second / "run.json").write_text(json.dumps(make_facts("stopped", packages={"torch": "2.11.0"})))
    add_events(second, sync(9, passed=False), {"step": 3, "kind": "reward", "text": "broken"})
    page = tmp_path / "both.html"
    result = call("report", first, second, first, "--output", page)
    assert result.exit_code == 0, result.output
    tab.open(page.as_uri())
    assert tab.text("h1") == "2 runs"
    order = tab.js("[...document.querySelectorAll('main section[id]')].map(node => node.id)")
    assert order == ["ledger", "numbers", "settings", "curves"]
    assert tab.texts("#proofs tbody tr td:nth-child(2)") == [
        "✓ 16 proofs, all passed",
        "✗ 1 of 17 proofs failed",
    ]
    assert "Reward errors: 1" in tab.texts("#proofs tbody tr td:last-child")[1]
    numbers = {row[0]: row[1:] for row in rows(tab, "#compared")}
    assert numbers["Reward"][0].startswith("0.35 → 0.7") and numbers["Reward"][1].startswith("0.175 → 0.35")
    assert [text.split()[0] for text in numbers["Status"]] == ["finished", "stopped"]
    assert rows(tab, "#differing") == [
        ["optimizer.lr", "0.0001", "0.0002"],
        ["packages.torch", "2.13.0", "2.11.0"],
    ]
    reward = "figure[data-chart='reward/mean']"
    assert tab.count(f"{reward} .curve") == 2
    assert tab.text(f"{reward} .keys") == "first 0.7second 0.35"
    assert tab.js("document.documentElement.scrollWidth") <= 1440
    tab.resize(390, 844)
    assert tab.js("document.documentElement.scrollWidth") <= 390


def rows(tab, table: str) -> list[list[str]]:
    found = tab.js(
        f"[...document.querySelectorAll('{table} tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return [[" ".join(cell.split()) for cell in row] for row in found]


def test_runs_of_one_name_are_told_apart(tab, tmp_path, monkeypatch):
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        make_run(tmp_path / parent / "run")
    monkeypatch.chdir(tmp_path)
    assert call("report", "a/run", "b/run").stdout.strip() == "comparison.html"
    tab.open((tmp_path / "comparison.html").as_uri())
    assert tab.text("header .words") == "a/run · b/run"


@pytest.mark.fault
@pytest.mark.parametrize("command", ["report", "watch"])
def test_what_is_no_run_folder_is_named_with_the_fix(tmp_path, command):
    make_run(tmp_path / "tiny")
    result = call(command, tmp_path)
    assert result.exit_code == 2 and "is not a run folder" in result.stderr
    assert f"Fix: pass {tmp_path / 'tiny'}" in result.stderr
    result = call(command, tmp_path / "tinny")
    assert result.exit_code == 2 and "does not exist. Did you mean 'tiny'?" in result.stderr
    result = call(command, tmp_path / "tiny" / "metrics.jsonl")
    assert result.exit_code == 2 and f"Fix: pass its folder, {tmp_path / 'tiny'}" in result.stderr


@pytest.mark.fault
def test_an_output_that_cannot_be_written(tmp_path):
    result = call("report", make_run(tmp_path / "run"), "--output", tmp_path / "missing" / "page.html")
    assert (
        result.exit_code == 2
        and "cannot be written" in result.stderr
        and "Fix: pass --output" in result.stderr
    )


@contextmanager
def watching(folder):
    """A `shardproof watch` in a process of its own: (the process, its address)."""
    command = [sys.executable, "-c", "from shardproof.cli import app; app()", "watch", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        match = re.match(r"Open (http://127\.0\.0\.1:\d+/)", line)
        assert match is not None, line + process.stderr.read()
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()


def test_the_live_page_follows_the_run(tab, tmp_path):
    folder = make_run(tmp_path / "run", num_steps=20)
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(metrics[:10]))
    (folder / "run.json").write_text(json.dumps(make_facts("running")))
    with watching(folder) as (process, address):
        tab.open(address)
        assert tab.text("header .status") == "running" and tab.text("header .state").startswith(
            "runningstep 10 of 8"
        )
        tab.js("window.stays = document.querySelector(\"figure[data-chart='kl/mean']\")")
        tab.set("#smooth", "0.5")
        tab.set("#search", "kl/")
        tab.click("[data-group='Load · policy'] > summary")
        tab.click("#config > summary")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("".join(metrics[10:]))
        (folder / "run.json").write_text(json.dumps(make_facts("failed")))
        add_events(folder, sync(21, passed=False))
        tab.wait("document.querySelector('header .status').textContent === 'failed'")
        assert "step 20" in tab.text("figure[data-chart='kl/mean'] .at")
        assert tab.text("#ledger h2").endswith("1 of 29 proofs failed")
        # What the reader did is as it was, and the chart is the same element: nothing flickers.
        assert tab.js("window.stays === document.querySelector(\"figure[data-chart='kl/mean']\")")
        assert tab.count("figure[data-chart='kl/mean'] .smooth") == 1
        assert tab.count("figure:not([hidden])") == 2
        assert tab.count("[data-group='Load · policy'][open]") == 1 and tab.count("#config[open]") == 1
        assert tab.messages() == []
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and "Stopped watching." in output and errors == ""
        tab.wait("!document.getElementById('lost').hidden")


def ask(address: str, path: str, host: str | None = None, method: str = "GET"):
    connection = http.client.HTTPConnection(address.split("/")[2], timeout=30)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


@pytest.mark.fault
def test_the_server_answers_this_machine_only(tmp_path):
    folder = make_run(tmp_path / "run")
    with watching(folder) as (_, address):
        status, body, headers = ask(address, "/data.json")
        version = json.loads(body)["version"]
        assert status == 200 and "Access-Control-Allow-Origin" not in headers
        assert "connect-src 'self'" in headers["Content-Security-Policy"]
        assert ask(address, f"/data.json?version={version}")[:2] == (304, b"")
        # A name that leads to 127.0.0.1 and is not its own: a page of another site.
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example:80", ""):
            status, body, _ = ask(address, "/data.json", host=host or "[::]:1")
            assert status == 403 and b"metric" not in body
        assert ask(address, "/", host="localhost:9999")[0] == 200, "a forwarded port may have another number"
        for host in ("localhost", "127.0.0.1", "LocalHost:80"):
            assert ask(address, "/", host=host)[0] == 200, "port 80 is left out, and case does not count"
        for path in ("/../config.json", "/config.json", "/%2e%2e/run.json", "//etc/passwd"):
            assert ask(address, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(address, "/", method=method)[0] == 405
        # Bound to loopback: the machine's other addresses have nothing on this port.
        port = int(address.rsplit(":", 1)[1].strip("/"))
        with socket.socket() as other:
            other.bind(("127.0.0.2", port))
        # Files of the run change, and so does the version.
        write_lines(folder / "metrics.jsonl", make_metrics(9))
        assert json.loads(ask(address, "/data.json")[1])["version"] != version


@pytest.mark.fault
def test_a_port_in_use_is_one_message(tmp_path):
    folder = make_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = call("watch", folder, "--port", port)
    assert result.exit_code == 2
    assert f"--port={port}: this port is in use." in result.stderr and "leave --port out" in result.stderr


@pytest.mark.fault
def test_a_run_that_is_removed_stays_on_the_live_page(tab, tmp_path):
    folder = make_run(tmp_path / "run")
    with watching(folder) as (_, address):
        tab.open(address)
        before = tab.text("#ledger h2")
        folder.rename(tmp_path / "moved")
        tab.wait("document.querySelector('#notes').textContent.includes('was moved or removed')")
        assert tab.text("#ledger h2") == before
        (tmp_path / "moved").rename(folder)
        tab.wait("document.querySelector('#notes').textContent === ''")
