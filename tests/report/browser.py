"""A real Chromium, driven over the DevTools protocol through a pipe: nothing but the standard library is needed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",  # root, as in most containers, cannot have one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]
TIMEOUT_S = 60.0
# The browser reads from descriptor 3 and writes to 4.
_BECOME = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One Chromium process. Messages are JSON objects that end with a zero byte."""

    def __init__(self, profile: Path):
        binary = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
        if binary is None:
            pytest.fail("Chromium is not installed. Fix: make browser")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = [sys.executable, "-c", _BECOME, str(theirs_in), str(theirs_out), binary, *FLAGS]
        command += [f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], TIMEOUT_S)
            read = os.read(self._from, 1 << 20) if ready else b""
            assert read, f"Chromium said nothing for {TIMEOUT_S:.0f} s, or ended"
            self._buffer += read
        raw, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(raw)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    @contextmanager
    def tab(self, width: int = 1440, height: int = 900, dark: bool = False) -> Iterator[Tab]:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        tab.call("Emulation.setEmulatedMedia", features=scheme)
        yield tab
        self.call("Target.closeTarget", targetId=target)


class Tab:
    """One page of the browser."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, address: str, quiet: bool = True) -> Tab:
        """Load a page and let its script run. A message in the console is a failure, unless it is wanted."""
        self._browser.events.clear()
        # A different fragment of the same file would not load it again.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")
        if quiet:
            assert self.messages() == []
        return self

    def messages(self) -> list[str]:
        """What the page has written to the console, errors of the browser about it included."""
        self.js("0")  # what was said before is here once this is answered
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event["params"]
            if event["method"] == "Log.entryAdded":
                found.append(params["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(json.dumps(params["args"]))
        return found

    def requests(self) -> list[str]:
        """Every address that the page has asked for, of other schemes than data."""
        sent = (event for event in self._browser.events if event.get("method") == "Network.requestWillBeSent")
        mine = (event for event in sent if event.get("sessionId") == self._session)
        addresses = [event["params"]["request"]["url"] for event in mine]
        return [address for address in addresses if not address.startswith(("data:", "about:"))]

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Return once an expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.js(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The text of the first element that a selector names, as it is shown."""
        found = self.js(f"document.querySelector({json.dumps(selector)})?.textContent")
        assert found is not None, f"there is no {selector}"
        return " ".join(found.split())

    def texts(self, selector: str) -> list[str]:
        found = self.js(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)"
        )
        return [" ".join(text.split()) for text in found]

    def count(self, selector: str) -> int:
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def set(self, selector: str, value: str) -> None:
        """Change an input as a user does."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.js(
            f"{node}.value = {json.dumps(value)}; {node}.dispatchEvent(new Event('input', {{bubbles: true}}))"
        )

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is, after it was scrolled into sight."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{node}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        return self.js(
            f"(() => {{ const {{x, y, width, height}} = {node}.getBoundingClientRect(); return {{x, y, width, height}} }})()"
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, x0: float, x1: float, y: float) -> None:
        self.mouse("mouseMoved", x0, y)
        self.mouse("mousePressed", x0, y, button="left", clickCount=1)
        for part in (0.3, 0.6, 1.0):
            self.mouse("mouseMoved", x0 + (x1 - x0) * part, y, button="left", buttons=1)
        self.mouse("mouseReleased", x1, y, button="left", clickCount=1)

    def touch_drag(self, x0: float, x1: float, y: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x0, "y": y}])
        for part in (0.3, 0.6, 1.0):
            points = [{"x": x0 + (x1 - x0) * part, "y": y}]
            self.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=points)
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")
