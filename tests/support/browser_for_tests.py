"""A headless browser, driven over the pipe of its DevTools protocol: JSON messages that end in a zero byte."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
]


class Browser:
    """One page. `dark` tells the page to use its dark color scheme."""

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, its_writes = os.pipe()
        its_reads, writes = os.pipe()
        command = f'exec "$0" "$@" 3<&{its_reads} 4>&{its_writes}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM), *OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(its_reads, its_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_reads)
        os.close(its_writes)
        self._in, self._out = os.fdopen(reads, "rb", buffering=0), os.fdopen(writes, "wb", buffering=0)
        self._rest, self._numbers, self._session = b"", itertools.count(1), ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Events that arrive in between are ignored."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        self._out.write(json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._in.read(65536)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        made: dict[str, Any] = json.loads(message)
        return made

    def open(self, url: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the screen in CSS pixels, and the color scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, through JSON."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20) -> None:
        """Wait until an expression is true. Fails if it does not become true in time."""
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.02)

    def picture(self) -> bytes:
        """Return a screenshot as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])
