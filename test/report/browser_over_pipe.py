"""Drives a real headless Chromium over its debugging pipe: no driver program, no port, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",  # it may run as root on a CI machine; it only ever opens pages made by the tests
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

# Chromium reads commands from descriptor 3 and writes to 4; what holds these numbers now is moved away.
_LAUNCHER = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """The Chromium of this machine."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            return path
    return None


class Browser:
    """One page of one Chromium. ``requests`` and ``complaints`` hold all that it fetched and logged."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(
            prefix="crosscurrent-chromium-", ignore_cleanup_errors=True
        )
        commands_out, commands_in = os.pipe()
        answers_out, answers_in = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _LAUNCHER, str(commands_out), str(answers_in), program),
                *FLAGS,
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            pass_fds=(commands_out, answers_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_out)
        os.close(answers_in)
        self._commands = os.fdopen(commands_in, "wb", buffering=0)
        self._answers = os.fdopen(answers_out, "rb", buffering=0)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        answer = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser that this object started, and only that."""
        self._commands.close()  # Chromium ends when its pipe does
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._profile.cleanup()

    def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the screen and the color scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self._call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = "dark" if dark else "light"
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, page: Path) -> None:
        """Open a file, and wait until it has loaded."""
        self._loaded = False
        self.requests.clear()
        self.complaints.clear()
        self._call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._receive()

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"the page's script failed: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def frame(self) -> None:
        """Wait until the page has drawn what was asked of it."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def tap(self, x: float, y: float) -> None:
        """Press and release the mouse."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def pinch(self, x: float, y: float, *, start: float, stop: float) -> None:
        """Two fingers around a point, moved from ``start`` to ``stop`` pixels apart."""

        def fingers(apart: float) -> list[dict[str, float]]:
            return [{"x": x - apart / 2, "y": y, "id": 0}, {"x": x + apart / 2, "y": y, "id": 1}]

        self._call("Input.dispatchTouchEvent", type="touchStart", touchPoints=fingers(start))
        for step in range(1, 6):
            apart = start + (stop - start) * step / 5
            self._call("Input.dispatchTouchEvent", type="touchMove", touchPoints=fingers(apart))
        self._call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def screenshot(self, *, whole_page: bool = True) -> bytes:
        """The page as PNG."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)
        return base64.b64decode(answer["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._answers.read(1 << 16)
            if not read:
                raise AssertionError(f"Chromium ended with status {self._process.wait()}")
            self._rest += read
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        handler = self._handlers().get(message.get("method", ""))
        if handler is not None:
            handler(message["params"])
        return message

    def _handlers(self) -> dict[str, Callable[[dict[str, Any]], None]]:
        return {
            "Page.loadEventFired": self._on_load,
            "Network.requestWillBeSent": lambda event: self.requests.append(event["request"]["url"]),
            "Runtime.exceptionThrown": lambda event: self.complaints.append(str(event["exceptionDetails"])),
            "Runtime.consoleAPICalled": lambda event: self.complaints.append(str(event)),
            "Log.entryAdded": lambda event: self.complaints.append(str(event["entry"])),
        }

    def _on_load(self, event: dict[str, Any]) -> None:
        self._loaded = True
