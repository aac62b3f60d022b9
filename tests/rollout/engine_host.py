"""An engine host in a network namespace of its own: a receiver of weights, and vLLM or a stand-in that reads them.

Run as a program, it is what runs on such a host. It obeys lines on its input and answers each with a line of JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.digest import digest
from shardproof.export.address import SharedAddress, read_shared
from shardproof.export.channel import read_secret
from shardproof.export.receiver import Receiver
from tests.rollout.fake_vllm import FakeVllm

ROOT = Path(__file__).parents[2]
FACTS = {"dtype": "float32", "backend": "shardproof", "logprobs_mode": "processed_logprobs"}
_numbers = itertools.count()


class ReadingVllm(FakeVllm):
    """Reads a payload from shared memory and compares it with the manifest, as our side in vLLM's workers does."""

    problems: tuple[tuple[str | None, str], ...] = ()

    def _control(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/update_weights":
            info = body["update_info"]
            address = SharedAddress.from_json(info["address"])
            found = {name: digest(tensor.contiguous()) for name, tensor in read_shared(address)}
            wanted = {row[0]: row[3] for row in info["manifest"]}
            self.problems = () if found == wanted else ((None, "differs from what was sent"),)
            body = {"update_info": {"version": address.version}}
        return super()._control(path, body)

    def _rpc(self, method: str, *args: str) -> Any:
        said = super()._rpc(method, *args)
        return {**said, "problems": self.problems} if method == "shardproof_report" else said


@dataclass(frozen=True)
class Link:
    """The way to a host, which any process of root's can cut and mend."""

    name: str  # of the host's namespace

    def cut(self) -> None:
        """Pull the cable: packets are lost, and nobody is told."""
        run_ip("-n", self.name, "link", "set", "eth0", "down")

    def mend(self) -> None:
        run_ip("-n", self.name, "link", "set", "eth0", "up")


def run_ip(*words: str) -> str:
    """What `ip` answers."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr} (this test needs root and iproute2)"
    return done.stdout


class EngineHost:
    """A host that is reached over a link of its own, which can be cut and mended. Needs root."""

    def __init__(self, secret: str, model: str = ""):
        """With a model's folder a real server serves it; else a stand-in."""
        number = next(_numbers)
        name = f"sp{os.getpid()}x{number}"
        self.link = Link(name)
        net = f"10.{200 + number % 50}.{os.getpid() % 250}"
        self.address = f"{net}.2"
        run_ip("netns", "add", name)
        run_ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        run_ip("addr", "add", f"{net}.1/30", "dev", name)
        run_ip("link", "set", name, "up")
        run_ip("-n", name, "addr", "add", f"{self.address}/30", "dev", "eth0")
        run_ip("-n", name, "link", "set", "lo", "up")
        self.link.mend()
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.rollout.engine_host"]
        self._process = subprocess.Popen(
            [*command, self.address, secret, model],
            cwd=ROOT,  # an earlier test may have left this process elsewhere
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self.receiver = ""

    def wait_up(self) -> None:
        """Wait until it can be asked."""
        found = self._read()
        self.url, self.receiver = found["url"], found["receiver"]

    def tell(self, command: str) -> dict[str, Any]:
        """Have it do something; returns how it is then."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End all that runs there, and the host."""
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            for pid in run_ip("netns", "pids", self.link.name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            self._process.communicate()
        run_ip("netns", "del", self.link.name)


def main() -> None:
    """Serve until the input ends."""
    address, secret, model = sys.argv[1:]
    receiver = Receiver(address, 0, read_secret(secret, "test"))
    thread = threading.Thread(target=receiver.serve)
    thread.start()
    with real_server(address, model) if model else ReadingVllm(facts=FACTS, host=address) as server:
        url = server if isinstance(server, str) else server.url
        print(json.dumps({"url": url, "receiver": f"{address}:{receiver.address[1]}"}), flush=True)
        for line in sys.stdin:
            print(json.dumps(obey(server, line.strip()) if model == "" else {}), flush=True)
    receiver.close()
    thread.join()


def obey(fake: FakeVllm, command: str) -> dict[str, Any]:
    """Do what a line says; returns how the stand-in is then."""
    match command:
        case "hold":
            fake.hold_back()
        case "go":
            fake.go_on()
    return {"label": fake.label, "weights": fake.weights, "running": len(fake.running)}


@contextlib.contextmanager
def real_server(address: str, model: str) -> Iterator[str]:
    """The url of a vLLM server on this address."""
    from shardproof.rollout.vllm_server import Served, VllmServer, VllmSettings

    settings = VllmSettings(mode="server", host=address, allow_remote=True, max_model_len=128)
    server = VllmServer(settings, Served(Path(model), "float32", "cpu"))
    try:
        server.ensure_up()
        yield server.client.url
    finally:
        server.stop()


if __name__ == "__main__":
    main()
