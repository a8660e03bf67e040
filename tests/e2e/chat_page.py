"""What the browser tests share: the page's process, and a tab in which somebody types and clicks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from sglang_hcache.cli.server.client import ServerClient

HCACHE = Path(sys.executable).parent / "hcache"
PATIENCE_MS = 120_000.0  # machines that run tests are slow, and busy
_SOURCES = re.compile(r"by source: ([\d,]+) GPU, ([\d,]+) host, ([\d,]+) disk, ([\d,]+) recomputed")


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


class ChatProcess:
    """``hcache chat`` or ``hcache demo --chat``, in a folder of its own.

    Args:
        variables: of its environment, besides.
    """

    def __init__(self, folder: Path, command: Sequence[str], **variables: str) -> None:
        self.folder = folder
        self.log = folder.parent / f"{folder.name}.log"
        folder.mkdir()
        # NiceGUI takes a process with this variable for one of its own tests.
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(HCACHE), *command, "--port", "0"],
                cwd=folder,
                env={**environment, "TMPDIR": str(folder), **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A test run in the background of a script inherits "ignore".
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def url(self, timeout_s: float = 120.0) -> str:
        """The page's address, once it answers."""
        deadline = time.monotonic() + timeout_s
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"waited {timeout_s} s:\n{self.log.read_text()}"
            if found := re.search(r"hcache chat: (http://\S+)", self.log.read_text()):
                try:
                    if httpx.get(found[1], trust_env=False).is_success:
                        return found[1]
                except httpx.HTTPError:
                    pass
            time.sleep(0.1)

    def interrupt(self) -> int:
        """Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def tier(self) -> object:
        """What the server that it talks to says of its tier."""
        found = re.search(r" talks to (http://[^;]+);", self.log.read_text())
        assert found is not None
        with ServerClient(found[1]) as client:
            return client.tier_state()

    def kill(self) -> None:
        """Whatever became of it, and whatever it started."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()


class Tab:
    """One tab, used as a reader of the page would."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.field = page.get_by_label("Message", exact=True)

    def open(self, url: str) -> None:
        self.page.goto(url)
        expect(self.page.get_by_role("status").filter(has_text="ready")).to_be_visible(timeout=PATIENCE_MS)

    def send(self, text: str) -> None:
        self.field.fill(text)
        self.field.press("Enter")
        expect(self.field).to_have_value("")

    def new(self) -> None:
        self.page.get_by_role("button", name="New conversation").first.click()
        expect(self.page.get_by_text("Ask something")).to_be_visible()

    @property
    def exchanges(self) -> Locator:
        return self.page.get_by_role("article")

    def answer(self, number: int) -> Locator:
        """The ``number``-th exchange of the conversation shown, when its answer has ended."""
        exchange = self.exchanges.nth(number)
        expect(exchange).to_have_attribute("aria-busy", "false", timeout=PATIENCE_MS)
        return exchange

    def sources(self, number: int) -> tuple[int, int, int, int]:
        """Tokens from GPU, host, disk, and recomputed ones, as the bar says them."""
        bar = self.answer(number).locator(".bar")
        expect(bar).to_be_visible()
        found = _SOURCES.search(bar.get_attribute("aria-label") or "")
        assert found is not None
        gpu, host, disk, recomputed = (int(part.replace(",", "")) for part in found.groups())
        return gpu, host, disk, recomputed

    def conversation(self, title: str) -> Locator:
        """Its row in the list."""
        return self.page.get_by_role("list", name="Conversations").get_by_role(
            "button", name=title, exact=True
        )

    def clear_gpu_cache(self) -> None:
        self.page.get_by_role("button", name="Clear the GPU cache").click()

    def tab_to(self, target: Locator, most: int = 40) -> None:
        """Press Tab until ``target`` has the focus."""
        for _ in range(most):
            self.page.keyboard.press("Tab")
            if target.evaluate("element => element === document.activeElement"):
                return
        raise AssertionError(f"{most} times Tab do not reach {target}")
