"""A Chromium without a window, driven through its DevTools pipe: nothing but the standard library, no network."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowtide import Chain
from lowtide.report.timeline import Span

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

FLAGS = (
    "--headless",
    "--no-sandbox",  # continuous integration runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)

# The browser reads its commands from descriptor 3 and writes its answers to descriptor 4.
LAUNCHER = """
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

# Where pictures of the page are kept.
ARTEFACTS = Path(__file__).parents[2] / "artefacts"

# How long a page may take to answer before a test is called hung; no measure of speed.
PATIENCE_SECONDS = 60.0


def find_chromium() -> str | None:
    """The browser's path: what `LOWTIDE_CHROMIUM` says, or the first one there is."""
    given = os.environ.get("LOWTIDE_CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """Start a browser with an empty profile; it is gone, with its profile, at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        to_browser, commands = os.pipe()
        answers, from_browser = os.pipe()
        given = [str(to_browser), str(from_browser), path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *given],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(commands, answers)
        finally:
            os.close(commands)
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(answers)


class Browser:
    """Commands to a browser and its answers, as JSON texts that end in a zero byte."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.numbers = itertools.count(1)
        self.buffer = b""
        self.events: list[dict[str, Any]] = []
        self.targets: list[str] = []
        os.set_blocking(answers, False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(answers, selectors.EVENT_READ)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"\0" not in self.buffer:
            assert time.monotonic() < deadline, "the browser does not answer"
            if self.selector.select(timeout=1.0):
                part = os.read(self.answers, 1 << 20)
                assert part, "the browser has ended"
                self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def new_tab(self) -> Tab:
        """A new, empty tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.targets.append(target)
        return Tab(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])

    def close_tabs(self) -> None:
        while self.targets:
            self.call("Target.closeTarget", targetId=self.targets.pop())
        self.events.clear()

    def open(self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Tab:
        """A new tab with a file in it, drawn."""
        tab = self.new_tab()
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.call("Page.navigate", url=path.resolve().as_uri())
        tab.wait("document.readyState === 'complete' && !document.getElementById('page').hidden")
        return tab


class Tab:
    """One page: scripts, pointer, keys and pictures."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.complaints()}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is in the window, after scrolling to it."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        return self.evaluate(f"{element}.getBoundingClientRect().toJSON()")

    def mouse(self, kind: str, x: float, y: float, *, button: str = "none") -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=int(button != "none"))

    def click(self, selector: str) -> None:
        box = self.box(selector)
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left")

    def press(self, key: str, *, code: str = "", number: int = 0, text: str = "") -> None:
        common = {"key": key, "code": code or key, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of the window, or of the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def complaints(self) -> list[str]:
        """Everything that the page has said on its console, every exception, and every request but its own file."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            method, values = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(values["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled":
                found.append(f"console.{values['type']}: {values['args']}")
            elif method == "Log.entryAdded":
                found.append(f"{values['entry']['level']}: {values['entry']['text']}")
            elif method == "Network.requestWillBeSent":
                url = values["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:")):
                    found.append(f"request: {url}")
        return found


def words(chain: Chain, span: Span) -> str:
    """An operation as the page names it."""
    verb, *rest = span.step.operation.to_list()
    name = chain.stage(span.step.operation.stage).name
    if verb == "forward":
        return f"{'Recompute' if span.step.repeated else 'Forward of'} {name}"
    if verb == "backward":
        return f"Backward of {name}"
    value = {"a": f"the output of {name}", "abar": f"what {name} saved"}[rest[0]]
    return {
        "offload": f"Start copying {value} to the host",
        "release": f"Free {value} on the device",
        "prefetch": f"Start copying {value} back",
        "await": f"Wait until {value} has arrived",
    }[verb]
