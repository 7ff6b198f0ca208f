"""A Chromium without a window, spoken to over a pipe: it opens a file and takes pictures."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


class Browser:
    """One page in a new profile.

    Args:
        profile: A folder for what the browser keeps.
        width: That of the window, in pixels.
        dark: Whether the page is told that its reader prefers a dark one.
        offline: Whether there is no network.
    """

    def __init__(
        self, profile: Path, width: int = 1100, *, dark: bool = False, offline: bool = True
    ) -> None:
        assert CHROMIUM is not None
        take, self._write = os.pipe()
        self._read, give = os.pipe()
        # The browser reads its descriptor 3 and writes 4.
        command = (
            f'exec 3<&{take} 4>&{give}; exec "$0" --headless --no-sandbox --disable-gpu '
            f'--hide-scrollbars --remote-debugging-pipe --user-data-dir="$1" about:blank'
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, str(profile)],
            pass_fds=(take, give),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(take)
        os.close(give)
        self._kept = b""
        self._count = 0
        self._session: str | None = None
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(one for one in targets if one["type"] == "page")
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session = self.ask("Target.attachToTarget", **attach)["sessionId"]
        size = {"width": width, "height": 900, "deviceScaleFactor": 2, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[feature])
        speed = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.ask("Network.enable")
        self.ask("Network.emulateNetworkConditions", offline=offline, **speed)
        self.ask("Page.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; return what is answered."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._kept:
                part = os.read(self._read, 1 << 20)
                assert part, "the browser has ended"
                self._kept += part
            line, _, self._kept = self._kept.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, address: str) -> None:
        """Open an address."""
        self.ask("Page.navigate", url=address)

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in an input of the page."""
        root = self.ask("DOM.getDocument")["root"]["nodeId"]
        node = self.ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.ask("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def value(self, script: str) -> Any:
        """Return the value of a line of JavaScript."""
        parameters = {"expression": script, "awaitPromise": True, "returnByValue": True}
        return self.ask("Runtime.evaluate", **parameters)["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        """Wait until a line of JavaScript is true."""
        end = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < end, f"not true after {seconds} s: {script}"
            time.sleep(0.1)

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        taken = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(taken["data"]))
