"""A headless Chromium, driven by the WebDriver protocol over plain HTTP."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id in answers (WebDriver, 12.1)
# What Browser.emulate() is to be like for those who look at pages, by name.
LOOKS = [
    ("light", {}),
    pytest.param("dark", {"dark": True}, marks=pytest.mark.slow),
    pytest.param("phone", {"width": 390, "height": 844, "phone": True}, marks=pytest.mark.slow),
    ("phone-dark", {"width": 320, "height": 700, "phone": True, "dark": True}),
]


def missing() -> str:
    """Why there is no browser here; empty where there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(absent)} (Debian: chromium, chromium-driver)" if absent else ""


class Browser:
    """One window.

    Args:
        session: the address of the WebDriver session.
    """

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def _ask(self, path: str, **body: Any) -> Any:
        answer = self._client.post(self._session + path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{answer['error']}: {answer['message'][:500]}")
        return answer

    def open(self, url: str) -> None:
        self._ask("/url", url="about:blank")  # so that a change of the fragment alone is a new page
        self._ask("/url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """The value that a script returns."""
        return self._ask("/execute/sync", script=script, args=list(args))

    def find(self, selector: str) -> str:
        return self._ask("/element", using="css selector", value=selector)[_ELEMENT]

    def click(self, selector: str) -> None:
        self._ask(f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Type text; characters from U+E000 on are keys (WebDriver, 17.4.2)."""
        self._ask(f"/element/{self.find(selector)}/value", text=text)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def until(self, condition: str, *args: Any, seconds: float = 20.0) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})", *args):
            assert time.monotonic() < deadline, f"not true in {seconds} s: {condition}"
            time.sleep(0.05)

    def screenshot(self) -> bytes:
        answer = self._client.get(self._session + "/screenshot").json()
        return base64.b64decode(answer["value"])

    def emulate(self, dark: bool = False, width: int = 1100, height: int = 900, phone: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._cdp("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self._cdp("Emulation.setDeviceMetricsOverride", **size)

    def _cdp(self, command: str, **params: Any) -> Any:
        return self._ask("/goog/cdp/execute", cmd=command, params=params)

    def complaints(self) -> list[str]:
        """What the page has written to the console since the last call: errors, and breaches of its policy."""
        return [f"{each['level']}: {each['message']}" for each in self._ask("/se/log", type="browser")]


def keep(window: Browser, name: str) -> None:
    """Keep a picture of the window in the folder SCREENSHOTS, where there is one."""
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder, f"{name}.png").write_bytes(window.screenshot())


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, which is closed at the end."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        found = next(m for line in driver.stdout if (m := re.search(r"started successfully on port (\d+)", line)))
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio"]
        wanted = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
        with httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", timeout=60) as client:
            made = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in made, made
            session = f"/session/{made['sessionId']}"
            yield Browser(client, session)
            client.delete(session)
    finally:
        driver.terminate()
        driver.wait(10)
