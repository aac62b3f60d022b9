"""An engine host in a network namespace of its own: a receiver of weights and a stand-in for vLLM that reads them.

Run as a program, it is what runs on such a host. It obeys lines on its input and answers each with a line of JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from typing import Any

from shardproof.digest import digest
from shardproof.export.address import SharedAddress, read_shared
from shardproof.export.channel import read_secret
from shardproof.export.receiver import Receiver
from tests.rollout.fake_vllm import FakeVllm

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


class EngineHost:
    """A host that is reached over a link of its own, which can be cut and mended. Needs root."""

    def __init__(self, secret: str):
        number = next(_numbers)
        self.name = f"sp{os.getpid()}x{number}"
        net = f"10.{200 + number % 50}.{os.getpid() % 250}"
        self.address = f"{net}.2"
        self._ip("netns", "add", self.name)
        self._ip("link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        self._ip("addr", "add", f"{net}.1/30", "dev", self.name)
        self._ip("link", "set", self.name, "up")
        self._ip("-n", self.name, "addr", "add", f"{self.address}/30", "dev", "eth0")
        self._ip("-n", self.name, "link", "set", "lo", "up")
        self.mend()
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "tests.rollout.engine_host"]
        self._process = subprocess.Popen(
            [*command, self.address, secret], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = self.receiver = ""

    def wait_up(self) -> None:
        """Wait until it can be asked."""
        found = self._read()
        self.url, self.receiver = found["url"], found["receiver"]

    def cut(self) -> None:
        """Pull the cable: packets are lost, and nobody is told."""
        self._ip("-n", self.name, "link", "set", "eth0", "down")

    def mend(self) -> None:
        self._ip("-n", self.name, "link", "set", "eth0", "up")

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
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=20)
        self._ip("netns", "del", self.name)

    @staticmethod
    def _ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        assert done.returncode == 0, (
            f"ip {' '.join(words)}: {done.stderr} (this test needs root and iproute2)"
        )


def main() -> None:
    """Serve until the input ends."""
    address, secret = sys.argv[1:]
    receiver = Receiver(address, 0, read_secret(secret, "test"))
    thread = threading.Thread(target=receiver.serve)
    thread.start()
    with ReadingVllm(facts=FACTS, host=address) as fake:
        print(json.dumps({"url": fake.url, "receiver": f"{address}:{receiver.address[1]}"}), flush=True)
        for line in sys.stdin:
            match line.strip():
                case "hold":
                    fake.hold_back()
                case "go":
                    fake.go_on()
            state = {"label": fake.label, "weights": fake.weights, "running": len(fake.running)}
            print(json.dumps(state), flush=True)
    receiver.close()
    thread.join()


if __name__ == "__main__":
    main()
