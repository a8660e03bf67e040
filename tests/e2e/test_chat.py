"""``hcache chat`` in a browser, with a real server: restores shown, a server that dies, keyboard, small screens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import yaml
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect

from sglang_hcache.cli.demo.parts import MARK
from sglang_hcache.cli.logbooks import starters
from sglang_hcache.cli.server.ports import free_port
from tests.e2e.chat_page import PATIENCE_MS, ChatProcess, Tab, running_browser
from tests.e2e.harness import TierServer

_DESKTOP: ViewportSize = {"width": 1360, "height": 860}
_PHONE: ViewportSize = {"width": 360, "height": 740}
_SMALL_PHONE: ViewportSize = {"width": 320, "height": 560}
_ANSWER_TOKENS = "40"
_LONG_ANSWER_TOKENS = "5000"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(
    browser: Browser, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TierServer]:
    folder = tmp_path_factory.mktemp("chat-server")
    config = folder / "hcache.yaml"
    settings = {
        "dirs": [str(folder / "disk")], "disk_size": "256MB", "disk_free_floor": 0, "host_size": "64MB",
        "staging_size": "16MB",
    }  # fmt: skip
    config.write_text(yaml.safe_dump(settings))
    arguments = [
        *("--model-path", str(tiny_model()), "--dtype", "float32", "--served-model-name", "random-model"),
        *("--max-total-tokens", "6144", "--chunked-prefill-size", "1024"),
        *("--hcache-config", str(config)),
    ]
    with TierServer(folder, arguments, port=free_port()) as running:
        yield running


@pytest.fixture(scope="module")
def chat(server: TierServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatProcess]:
    folder = tmp_path_factory.mktemp("chat") / "here"
    options = ("--url", server.process.url, "--max-tokens", _ANSWER_TOKENS, "--temperature", "0")
    running = ChatProcess(folder, ["chat", *options])
    try:
        running.url()
        yield running
        assert "Traceback" not in running.log.read_text()
    finally:
        running.kill()


@pytest.fixture(scope="module")
def screenshots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = request.config.getoption("--screenshots") or tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def open_tab(browser: Browser, chat: ChatProcess) -> Iterator[Callable[..., Tab]]:
    """Opens a tab as a new browser would have it: no cookies. Whatever it asks for must come from the page's server."""
    contexts: list[BrowserContext] = []
    asked: set[str] = set()
    errors: list[str] = []

    def watch(page: Page) -> None:
        page.on("request", lambda request: asked.add(request.url))
        page.on(
            "requestfailed", lambda request: asked.discard(request.url) if request.failure == "csp" else None
        )
        page.on("websocket", lambda socket: asked.add(socket.url))
        page.on("pageerror", lambda error: errors.append(str(error)))

    def open_one(url: str = "", viewport: ViewportSize = _DESKTOP, dark: bool = False) -> Tab:
        contexts.append(browser.new_context(viewport=viewport, color_scheme="dark" if dark else "light"))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        page = contexts[-1].new_page()
        watch(page)
        tab = Tab(page)
        tab.open(url or chat.url())
        return tab

    expect.set_options(timeout=PATIENCE_MS)
    yield open_one
    for context in contexts:
        context.close()
    hosts = {urlsplit(url).hostname for url in asked if urlsplit(url).scheme not in ("data", "blob")}
    assert hosts == {"127.0.0.1"}
    ports = {urlsplit(url).port for url in asked if urlsplit(url).scheme not in ("data", "blob")}
    assert len(ports) == 1
    assert not errors


def test_two_conversations_and_a_restore(
    open_tab: Callable[..., Tab], server: TierServer, screenshots: Path
) -> None:
    tab = open_tab()
    tab.page.screenshot(path=screenshots / "empty.png")
    starter = starters()[0]
    tab.page.get_by_role("button", name=starter.name).click()
    gpu, host, disk, recomputed = tab.sources(0)
    prompt = gpu + host + disk + recomputed
    assert (gpu, host, disk) == (0, 0, 0)
    assert prompt > 256

    title = "Log of the Heron, voyage 1. Day 1. Wind…"
    expect(tab.conversation(title)).to_have_attribute("aria-current", "true")
    tab.new()
    tab.send("Good morning. What do you know about ships?")
    tab.answer(0)
    expect(tab.exchanges).to_have_count(1)

    tab.conversation(title).click()
    expect(tab.exchanges.first).to_contain_text("Log of the Heron")
    tab.send("Who did most of the work?")
    gpu, host, disk, _ = tab.sources(1)
    assert gpu >= prompt - 64  # still in the GPU cache
    assert host + disk == 0

    server.settle()
    tab.clear_gpu_cache()
    expect(tab.page.get_by_text("GPU cache cleared. The next answer")).to_be_visible()
    expect(tab.page.get_by_role("separator").last).to_have_text("GPU cache cleared")
    tab.send("And which day had the roughest sea?")
    gpu, host, disk, _ = tab.sources(2)
    assert gpu == 0
    assert host + disk >= prompt - 64  # from the tier
    expect(tab.exchanges.nth(2)).to_contain_text("TTFT")
    expect(tab.exchanges.nth(2)).to_contain_text("tokens/s")
    panel = tab.page.get_by_role("region", name="Tier")
    expect(panel).to_contain_text("done1")
    expect(panel).to_contain_text("hidden states: 4 layers")
    expect(panel).to_contain_text("writing K and V")
    expect(tab.page.get_by_text("GPU cache cleared. The next answer")).to_be_hidden()
    tab.page.screenshot(path=screenshots / "restore.png")

    tab.page.reload()
    expect(tab.exchanges).to_have_count(3)
    assert tab.sources(2) == (gpu, host, disk, tab.sources(2)[3])


def test_rename_delete_and_drafts(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.send("First things first")
    tab.answer(0)
    tab.new()
    tab.field.fill("half a thought")
    tab.conversation("First things first").click()
    expect(tab.field).to_have_value("")
    tab.conversation("New conversation").click()
    expect(tab.field).to_have_value("half a thought")
    tab.page.reload()
    expect(tab.field).to_have_value("half a thought")

    more = tab.page.get_by_role("button", name="Rename or delete this conversation")
    more.last.click()
    tab.page.get_by_text("Rename", exact=True).click()
    tab.page.get_by_label("Title").fill("Things")
    tab.page.get_by_label("Title").press("Enter")
    expect(tab.conversation("Things")).to_be_visible()
    more.last.click()
    tab.page.get_by_text("Delete", exact=True).click()
    tab.page.get_by_role("button", name="Delete", exact=True).click()
    expect(tab.conversation("Things")).to_have_count(0)
    more.last.click()
    tab.page.get_by_text("Rename", exact=True).click()
    expect(tab.page.get_by_label("Title")).to_be_visible()
    tab.page.close()  # with a dialog open: the page's process notices seconds later, and must not mind


def test_a_refusal_in_the_servers_own_words(open_tab: Callable[..., Tab], screenshots: Path) -> None:
    tab = open_tab()
    tab.send("too long " * 4000)
    failure = tab.exchanges.first.get_by_role("alert")
    expect(failure).to_contain_text("HTTP 400")
    expect(failure).to_contain_text("token")
    tab.page.screenshot(path=screenshots / "refused.png")
    tab.send("Short then")  # the conversation goes on without it
    assert sum(tab.sources(1)) < 100


def test_a_long_answer_and_stop(
    open_tab: Callable[..., Tab], server: TierServer, tmp_path: Path, screenshots: Path
) -> None:
    options = ("--url", server.process.url, "--max-tokens", _LONG_ANSWER_TOKENS, "--temperature", "0")
    long_chat = ChatProcess(tmp_path / "long", ["chat", *options])
    try:
        tab = open_tab(long_chat.url())
        tab.send("Tell me everything")
        text = tab.exchanges.first.locator(".answer .text")
        expect(text).to_contain_text(" ")
        before = len(text.inner_text())
        tab.page.wait_for_function(
            "n => document.querySelector('.answer .text').innerText.length > n", arg=before
        )
        expect(tab.exchanges.first).to_have_attribute("aria-busy", "true")

        tab.clear_gpu_cache()  # refused while it runs
        expect(tab.page.get_by_text("was not cleared")).to_be_visible()
        tab.page.screenshot(path=screenshots / "streaming.png")
        tab.new()  # another one, while the first goes on
        expect(tab.conversation("Tell me everything")).to_contain_text("answering")
        tab.page.reload()  # which loses nothing either
        tab.conversation("Tell me everything").click()
        expect(tab.exchanges.first).to_have_attribute("aria-busy", "true")

        tab.page.get_by_role("button", name="Stop this answer").click()
        stopped = tab.answer(0)
        expect(stopped).to_contain_text("stopped")
        assert len(text.inner_text()) > before
        server.assert_nothing_left()  # the request is gone there too
        assert long_chat.interrupt() == 0
        assert "Traceback" not in long_chat.log.read_text()
        assert not list(long_chat.folder.iterdir())  # nothing was written
    finally:
        long_chat.kill()


def test_a_server_that_dies_and_comes_back(
    open_tab: Callable[..., Tab], server: TierServer, screenshots: Path
) -> None:
    tab = open_tab()
    tab.page.get_by_role("button", name=starters()[1].name).click()
    sources = tab.sources(0)
    server.settle()
    tab.clear_gpu_cache()
    expect(tab.page.get_by_text("GPU cache cleared. The next answer")).to_be_visible()
    server.settle()  # what a kill leaves is what is on disk

    server.process.kill()
    trouble = tab.page.get_by_role("alert").filter(has_text="cannot be reached")
    expect(trouble.first).to_be_visible()
    expect(tab.page.get_by_role("status").filter(has_text="not reachable")).to_be_visible()
    tab.send("Are you there?")
    failed = tab.answer(1)
    expect(failed.get_by_role("alert")).to_contain_text("cannot be reached")
    expect(tab.exchanges.first).to_contain_text("Log of the")
    tab.page.screenshot(path=screenshots / "away.png")

    server.process.start()
    expect(tab.page.get_by_role("status").filter(has_text="ready")).to_be_visible()
    expect(tab.page.get_by_text("this page tries again")).to_be_hidden()
    tab.page.get_by_role("button", name="Try again").click()
    gpu, _, disk, _ = tab.sources(1)
    assert gpu == 0
    assert disk > sum(sources) // 2  # from the disk, over the restart


def test_by_keyboard_alone(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    keyboard = tab.page.keyboard
    expect(tab.field).to_be_focused()
    keyboard.type("one")
    keyboard.press("Shift+Enter")
    keyboard.type("two")
    expect(tab.field).to_have_value("one\ntwo")
    keyboard.press("Enter")
    tab.answer(0)
    expect(tab.field).to_be_focused()

    tab.tab_to(tab.page.get_by_role("button", name="New conversation").first)
    ring = tab.page.evaluate("getComputedStyle(document.activeElement).boxShadow")
    assert ring != "none"  # the focus can be seen
    keyboard.press("Enter")
    expect(tab.field).to_be_focused()
    keyboard.type("three")
    keyboard.press("Enter")
    tab.answer(0)
    tab.tab_to(tab.conversation("one two"))
    keyboard.press("Enter")
    expect(tab.exchanges.first).to_contain_text("one")
    assert tab.conversation("one two").evaluate("element => element === document.activeElement")
    nameless = "button => !button.ariaLabel && !button.innerText.trim()"
    assert tab.page.evaluate(f"[...document.querySelectorAll('button')].filter({nameless}).length") == 0


def test_a_narrow_screen(open_tab: Callable[..., Tab], screenshots: Path) -> None:
    tab = open_tab(viewport=_PHONE)
    tab.send("Good morning. What do you know about ships?")
    tab.answer(0)
    assert tab.page.evaluate("document.scrollingElement.scrollWidth") <= _PHONE["width"]
    expect(tab.conversation("Good morning. What do you know about…")).not_to_be_in_viewport()
    tab.page.screenshot(path=screenshots / "phone.png")
    tab.page.get_by_role("button", name="Tier", exact=True).click()
    expect(tab.page.get_by_role("button", name="Clear the GPU cache")).to_be_visible()
    tab.page.wait_for_timeout(500)
    tab.page.screenshot(path=screenshots / "phone-tier.png")
    tab.page.locator(".q-drawer__backdrop").last.click(position={"x": 10, "y": 300})
    tab.page.get_by_role("button", name="Conversations", exact=True).click()
    expect(tab.conversation("Good morning. What do you know about…")).to_be_in_viewport()
    tab.page.wait_for_timeout(500)
    tab.page.screenshot(path=screenshots / "phone-conversations.png")
    tab.conversation("Good morning. What do you know about…").click()
    expect(
        tab.conversation("Good morning. What do you know about…")
    ).not_to_be_in_viewport()  # out of the way


def test_drawers_of_the_narrowest_screen_can_be_closed(
    open_tab: Callable[..., Tab], screenshots: Path
) -> None:
    tab = open_tab(viewport=_SMALL_PHONE)
    tab.send("Hello")
    tab.answer(0)
    row = tab.conversation("Hello")
    for name, content in (
        ("Tier", tab.page.get_by_role("button", name="Clear the GPU cache")),
        ("Conversations", row),
    ):
        opens = tab.page.get_by_role("button", name=name, exact=True)
        opens.click()
        expect(content).to_be_in_viewport()
        tab.page.wait_for_timeout(500)
        tab.page.screenshot(path=screenshots / f"small-{name.lower()}.png")
        box = tab.page.get_by_role("complementary", name=name, exact=True).bounding_box()
        assert box is not None
        beside = 20 if box["x"] > 0 else _SMALL_PHONE["width"] - 20
        tab.page.mouse.click(beside, 300)
        expect(content).not_to_be_in_viewport()
        opens.click()
        expect(content).to_be_in_viewport()
        tab.page.keyboard.press("Escape")
        expect(content).not_to_be_in_viewport()
    tab.page.get_by_role("button", name="Conversations", exact=True).click()
    row.locator("xpath=..").get_by_role("button").last.click()
    tab.page.get_by_text("Rename", exact=True).click()
    tab.page.keyboard.press("Escape")  # closes the dialog only
    expect(tab.page.get_by_label("Title")).to_be_hidden()
    expect(row).to_be_in_viewport()


def test_the_panels_of_a_wide_screen_open_and_close(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    for name, shown in (("Conversations", "New conversation"), ("Tier", "Clear the GPU cache")):
        panel = tab.page.get_by_role("complementary", name=name, exact=True)
        expect(panel.get_by_role("button", name=shown).first).to_be_visible()
        content = tab.page.get_by_role("button", name=shown).first
        expect(content).to_be_in_viewport()
        for _ in range(2):
            tab.page.get_by_role("button", name=name, exact=True).click()
            expect(content).not_to_be_in_viewport()
            tab.page.get_by_role("button", name=name, exact=True).click()
            expect(content).to_be_in_viewport()


def test_dark_as_the_system_and_by_the_switch(open_tab: Callable[..., Tab], screenshots: Path) -> None:
    tab = open_tab(dark=True)
    body = tab.page.locator("body")
    expect(body).to_have_css("background-color", "rgb(20, 24, 30)")
    tab.send("Good evening")
    tab.answer(0)
    tab.page.screenshot(path=screenshots / "dark.png")
    switch = tab.page.get_by_role("button", name="Colours follow the system")
    switch.click()
    expect(body).to_have_css("background-color", "rgb(246, 247, 249)")
    tab.page.reload()
    expect(body).to_have_css("background-color", "rgb(246, 247, 249)")
    tab.page.get_by_role("button", name="Light colours").click()
    expect(body).to_have_css("background-color", "rgb(20, 24, 30)")


def test_the_demo(
    open_tab: Callable[..., Tab], tiny_model: Callable[..., Path], tmp_path: Path, screenshots: Path
) -> None:
    """With a model that is there from a run before: its own, which ``test_demo.py`` runs, takes ten times as long."""
    keep = tmp_path / "kept"
    shutil.copytree(tiny_model(max_position=8192), keep / "model")
    (keep / MARK).touch()
    # By them a restore is neither declined nor late, however busy the machine is
    switches = tmp_path / "switches"
    switches.mkdir()
    (switches / "always_restore").touch()
    command = ["demo", "--chat", "--keep", str(keep)]
    demo = ChatProcess(tmp_path / "demo", command, HCACHE_TEST_SWITCHES=str(switches))
    try:
        tab = open_tab(demo.url(400))
        expect(tab.page.get_by_text("random weights").first).to_be_visible()
        tab.page.get_by_role("button", name=starters()[2].name).click()
        prompt = sum(tab.sources(0))
        tab.clear_gpu_cache()
        expect(tab.page.get_by_role("separator")).to_have_count(1)
        tab.send("And then?")
        gpu, host, disk, _ = tab.sources(1)
        assert gpu == 0
        assert host + disk > prompt // 2, demo.tier()
        tab.page.screenshot(path=screenshots / "demo.png")
        processes = psutil.Process(demo.process.pid).children(recursive=True)
        assert len(processes) >= 2
        assert demo.interrupt() == 0
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
        assert not list(demo.folder.iterdir())
        assert (keep / "model" / "config.json").exists()
        assert "Starting a server with a random model\n" in demo.log.read_text()  # also without a terminal
    finally:
        demo.kill()


def test_nothing_is_asked_from_elsewhere_whatever_a_model_writes(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    violated = tab.page.evaluate(
        """() => new Promise(resolve => {
            document.addEventListener("securitypolicyviolation", event => resolve(event.violatedDirective));
            document.querySelector(".thread").innerHTML = '<img src="http://127.0.0.1:1/picture.png">';
            setTimeout(() => resolve("nothing"), 20000);
        })"""
    )
    assert violated.startswith("img-src")
