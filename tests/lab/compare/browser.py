"""A real browser for tests: chromium without a window, driven by WebDriver over plain HTTP."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_TIMEOUT = 60  # seconds, for one command


def missing() -> str | None:
    """Why there is no browser here; None if there is one."""
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian: chromium chromium-driver)"
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has just ended, or is another's


class Browser:
    """One tab that can reach nothing but files. Close it, or use it in a ``with`` block."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hocket-browser-", ignore_cleanup_errors=True)
        self._mark = f"TMPDIR={self._folder.name}".encode()
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the test, which then ends all of it
            env={**os.environ, "TMPDIR": self._folder.name, "HOME": self._folder.name},
        )
        try:
            assert self._driver.stdout is not None
            for line in self._driver.stdout:  # it says on which port it listens
                if "started successfully on port" in line:
                    self._address = f"http://127.0.0.1:{line.split()[-1].rstrip('.')}"
                    break
            else:
                raise RuntimeError("chromedriver ended before it listened")
            arguments = [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-extensions",
                "--disable-background-networking",
                "--no-first-run",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={self._folder.name}/profile",
            ]
            options = {"binary": shutil.which("chromium"), "args": arguments}
            asked = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
            self._session = f"/session/{self._ask('POST', '/session', asked)['sessionId']}"
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the driver, whose child the browser is."""
        return self._driver.pid

    def open(self, path: Path) -> None:
        """Shows the file; returns when it is loaded."""
        self._ask("POST", f"{self._session}/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """What the body of a function, ``script``, returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(args)})

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the developer tools' protocol: ``Page.printToPDF`` …"""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def width(self, pixels: int, height: int = 800) -> None:
        """The window becomes so wide, also where that is narrower than windows of a desktop can be."""
        size = {"width": pixels, "height": height}
        self.command("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=pixels < 600)

    def media(self, kind: str = "screen", scheme: str = "light") -> None:
        """``screen`` or ``print``, ``light`` or ``dark``."""
        self.command(
            "Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def picture(self, path: Path) -> None:
        """Writes what the whole page looks like, as PNG."""
        data = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        self.command("Emulation.setEmulatedMedia", media="")  # or it would be printed as the screen that was asked for
        made = self.command("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        return base64.b64decode(made["data"])

    def close(self) -> None:
        """Ends browser and driver, and removes their files."""
        try:
            self._ask("DELETE", self._session)
        except (OSError, RuntimeError):
            pass
        finally:
            self._end()

    def processes(self) -> list[int]:
        """All that are alive of driver and browser; the folder in their environment tells them from others."""
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if self._mark in _read(path)]

    def _end(self) -> None:
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._driver.wait()
        if self._driver.stdout is not None:
            self._driver.stdout.close()
        self._folder.cleanup()

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._address + path, data, headers, method=method)
        # A proxy of the environment is not for this machine's own ports.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_TIMEOUT) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            said = json.load(error)["value"]
            raise RuntimeError(f"{path}: {said['error']}: {said['message'].splitlines()[0]}") from error
