"""Tools of real MCP servers, on stdin and stdout and on HTTP: calls, results, and servers that fail or die."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.environments.tools import Tools

SCRIPT = Path(__file__).with_name("mcp_server.py")
PATIENT = {"tool_timeout_s": 120.0}


def command(*arguments: str) -> str:
    return shlex.join([sys.executable, str(SCRIPT), *arguments])


def take(environment: Tools, name: str, **arguments: Any) -> sp.Reply:
    environment.timeout_s = 600.0
    return asyncio.run(environment.step(sp.Turn("", calls=(sp.ToolCall(name, arguments),))))


def said(environment: Tools, name: str, **arguments: Any) -> str:
    return take(environment, name, **arguments).messages[0]["content"]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start_http(port: int) -> subprocess.Popen[bytes]:
    """A server on HTTP, once it answers."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "shop", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process
        except OSError:
            assert process.poll() is None
            time.sleep(0.05)


@pytest.fixture(scope="module")
def stdio() -> str:
    return command("shop")


@pytest.fixture
def shop(stdio) -> Tools:
    return Tools(mcp=[stdio], **PATIENT)


@pytest.fixture(scope="module")
def http() -> Iterator[tuple[str, int]]:
    port = free_port()
    process = start_http(port)
    yield f"http://127.0.0.1:{port}/mcp", port
    process.kill()
    process.wait()


def test_a_server_describes_and_answers(shop):
    schema = shop.tools[0]["function"]
    assert schema["name"] == "add" and schema["description"] == "Add two numbers."
    assert schema["parameters"]["required"] == ["x"]
    assert said(shop, "add", x=3) == "4"
    assert said(shop, "add", x="3").startswith("Error: x must be of type integer")
    assert said(shop, "draw") == "a dot:\n[not shown: image of type image/png]"
    text = said(shop, "flood", size=1_000_000)
    assert len(text) < 10_100 and "characters left out" in text
    refused = take(shop, "refuse", why="no")
    assert refused.messages[0]["content"].startswith("Error: ") and refused.facts["tool_errors"] == 1


def test_conversations_of_a_worker_share_a_server(stdio, shop):
    other = Tools(mcp=[stdio], **PATIENT)
    first, second = said(shop, "next_number"), said(other, "next_number")
    assert int(second.split()[1]) == int(first.split()[1]) + 1

    async def together() -> list[sp.Reply]:
        turns = [sp.Turn("", calls=(sp.ToolCall("add", {"x": i}),)) for i in range(100)]
        return await asyncio.gather(*map(shop.step, turns))

    assert [each.messages[0]["content"] for each in asyncio.run(together())] == [
        str(i + 1) for i in range(100)
    ]


@pytest.mark.fault
def test_a_server_that_dies_is_started_again(shop):
    died = take(shop, "die")
    assert (
        died.messages[0]["content"] == "Error: the tool's server is gone" and died.facts["tool_errors"] == 1
    )
    assert not died.done
    assert said(shop, "next_number") == "shop 1"  # of a new process
    assert said(shop, "next_number") == "shop 2"


@pytest.mark.fault
def test_a_server_that_no_longer_answers_is_started_again(stdio, shop):
    assert said(shop, "next_number").startswith("shop ")
    hurried = Tools(mcp=[stdio], tool_timeout_s=0.3)
    for _ in range(3):
        assert said(hurried, "hang") == "Error: no answer in 0.3 s."
    assert said(shop, "next_number") == "shop 1"


@pytest.mark.fault
def test_a_server_that_cannot_be_started_again_is_answered_for(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.write_text("yes")
    shop = Tools(mcp=[command("shop", "-", str(allowed))], **PATIENT)
    assert said(shop, "add", x=1) == "2"
    allowed.write_text("no")
    assert said(shop, "die").startswith("Error: ")
    for _ in range(3):
        reply = take(shop, "add", x=1)
        assert reply.messages[0]["content"] == "Error: the tool's server is gone"
        assert reply.facts["tool_errors"] == 1 and not reply.done
    allowed.write_text("yes")
    until = time.monotonic() + 120
    while said(shop, "add", x=1) != "2":
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_server_on_http_answers(http):
    shop = Tools(mcp=[http[0]], **PATIENT)
    assert said(shop, "add", x=3, y=4) == "7" and said(shop, "draw").startswith("a dot")


@pytest.mark.fault
def test_a_server_on_http_may_go_and_come_back():
    port = free_port()
    process = start_http(port)
    shop = Tools(mcp=[f"http://127.0.0.1:{port}/mcp"], **PATIENT)
    assert said(shop, "next_number") == "shop 1"
    process.kill()
    process.wait()
    assert said(shop, "next_number") == "Error: the tool's server is gone"
    process = start_http(port)
    try:
        until = time.monotonic() + 120
        while (text := said(shop, "next_number")) != "shop 1":
            assert text == "Error: the tool's server is gone" and time.monotonic() < until
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()


def add(x: float) -> float:
    """Add one.

    Args:
        x: to this
    """
    return x + 1


def test_names_that_clash_begin_with_the_servers(stdio, http):
    names = [each["function"]["name"] for each in Tools(functions=[add], mcp=[stdio]).tools]
    assert names[:3] == ["add", "shop_add", "next_number"]
    two = Tools(mcp=[stdio, http[0]], **PATIENT)
    names = [each["function"]["name"] for each in two.tools]
    assert len(names) == len(set(names)) and {"shop1_add", "shop2_add"} <= set(names)
    assert said(two, "shop1_add", x=1) == said(two, "shop2_add", x=1) == "2"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("no-such-program --flag", "there is no program 'no-such-program'"),
        (
            shlex.join([sys.executable, "-c", "import sys; sys.exit('this is no server')"]),
            "this is no server",
        ),
        ("http://127.0.0.1:9/mcp", "127.0.0.1:9"),
        ("'unbalanced", "No closing quotation"),
        ("", "there is no program ''"),
    ],
)
def test_servers_that_cannot_be_used_are_refused_at_the_start(given, why):
    with pytest.raises(sp.ConfigError, match=r"C001.*environment\.tools\.mcp") as caught:
        Tools(mcp=[given])
    assert why in str(caught.value) and "streamable HTTP" in caught.value.findings[0].fix


@pytest.mark.fault
def test_the_missing_package_is_named():
    code = (
        "import sys; sys.modules['mcp'] = None\nfrom shardproof.environments.tools import Tools\n"
        "from shardproof.errors import ConfigError\n"
        "try: Tools(mcp=['x'])\nexcept ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "environment.tools.mcp needs the package mcp" in done.stdout and "pip install" in done.stdout


@pytest.mark.fault
@pytest.mark.parametrize("end", ["kill", "leave"])
def test_servers_end_with_their_worker(end):
    code = (
        "import os, sys\nfrom shardproof.environments.tools import Tools\n"
        f"tools = Tools(mcp=[{command('shop')!r}])\n"
        "children = []\n"
        "for task in os.listdir('/proc/self/task'):\n"
        "    children += open(f'/proc/self/task/{task}/children').read().split()\n"
        "print(*children, flush=True)\nsys.stdin.read()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None and worker.stdout is not None
    (server,) = worker.stdout.readline().split()
    if end == "kill":
        worker.kill()
    worker.stdin.close()
    worker.stdout.close()
    worker.wait(60)
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{server}"):
        if "State:\tZ" in Path(f"/proc/{server}/status").read_text():
            break
        assert time.monotonic() < until
        time.sleep(0.05)
