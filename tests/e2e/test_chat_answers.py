"""``hcache chat`` in a browser: what a model, a writer or another web site sends that no page should fall for."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.chat_page import PATIENCE_MS, ChatProcess, Tab, running_browser
from tests.e2e.scripted_server import ScriptedServer, scripted_server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def script() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture(scope="module")
def chat(script: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatProcess]:
    folder = tmp_path_factory.mktemp("chat") / "here"
    running = ChatProcess(folder, ["chat", "--url", script.url, "--allow-host", "chat.test"])
    try:
        running.url()
        yield running
        assert "Traceback" not in running.log.read_text()
        assert not list(folder.iterdir())  # nothing was written
    finally:
        running.kill()


@pytest.fixture
def tab(browser: Browser, chat: ChatProcess) -> Iterator[Tab]:
    expect.set_options(timeout=PATIENCE_MS)
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened = Tab(context.new_page())
    opened.open(chat.url())
    yield opened
    context.close()


def test_tags_of_a_model_are_text(tab: Tab, script: ScriptedServer) -> None:
    script.answer = (
        "<div\n</div> std::vector<int> <title>seen</title> <style>* { display: none }</style>\u2028"
        '<p style="position: fixed">over</p> <form action="http://a.b"><input></form> the end\n\n'
        "| a | b |\n|:-|-:|\n| 1 | 2 |\n\n- one\n\n```python\ndef f(): pass\n```\n\n[a link](http://a.b/)"
    )
    tab.send("Say it")
    tab.answer(0)
    text = tab.exchanges.first.locator(".answer .text")
    for said in ("<div", "std::vector<int>", "<title>seen</title>", "<style>*", "<form action=", "the end"):
        expect(text).to_contain_text(said)
    expect(text.locator("style, form, input, title, p[style]")).to_have_count(0)
    expect(text.locator("td").last).to_have_css("text-align", "right")
    expect(text.locator("td").last).to_have_css("border-top-width", "1px")
    expect(text.locator("li")).to_have_css("list-style-type", "disc")
    expect(text.locator("pre .k").first).to_have_css("color", "rgb(0, 128, 0)")
    expect(tab.exchanges.first.locator(".thoughts")).to_have_css("overflow-wrap", "anywhere")  # hidden here
    expect(text.get_by_role("link")).to_have_attribute("href", "http://a.b/")
    tab.page.reload()  # where a page that cannot be built shows
    expect(text).to_contain_text("the end")


def test_a_wide_table_scrolls_and_keeps_its_words_whole(tab: Tab, script: ScriptedServer) -> None:
    words = (
        "recomputed",
        "hidden states",
        "transformation",
        "bandwidth",
        "characteristics",
        "a longer heading",
    )
    script.answer = "\n".join(f"| {' | '.join(row)} |" for row in (words, ["-"] * len(words), words, words))
    tab.page.set_viewport_size({"width": 360, "height": 740})
    tab.send("A table")
    table = tab.answer(0).locator(".answer table")
    assert table.evaluate("element => element.scrollWidth > element.clientWidth")
    assert tab.page.evaluate("document.scrollingElement.scrollWidth") <= 360
    assert table.get_by_role("cell", name="characteristics").first.evaluate(
        "element => element.scrollWidth <= element.clientWidth && element.clientWidth > 100"
    )


def test_a_text_that_is_too_long_is_not_taken(tab: Tab, script: ScriptedServer) -> None:
    script.answer = "Yes."
    tab.field.fill("short")
    tab.page.evaluate("navigator.clipboard.writeText('\u00e9'.repeat(500000))")
    tab.field.press("Control+End")
    tab.field.press("Control+V")
    expect(tab.page.get_by_text("too long for one message")).to_be_visible()
    expect(tab.field).to_have_value("short")
    tab.page.get_by_role("button", name="Send", exact=True).click()
    expect(tab.field).to_have_value("")
    tab.answer(0)
    assert script.asked[-1] == "short"

    long = "y" * 900_000
    tab.field.fill(long)
    tab.page.get_by_role("button", name="Send", exact=True).click()
    expect(tab.field).to_have_value("")
    tab.answer(1)
    assert script.asked[-1] == long


def test_send_sends_what_stands_in_the_field(tab: Tab, script: ScriptedServer) -> None:
    script.answer = "Yes."
    tab.field.fill("known")
    send = tab.page.get_by_role("button", name="Send", exact=True)
    expect(send).to_be_enabled()
    tab.field.evaluate("field => { field.value = 'newer' }")  # of which the server was not told yet
    send.evaluate("button => button.click()")
    tab.answer(0)
    assert script.asked[-1] == "newer"


def test_the_enter_of_an_input_method_neither_sends_nor_renames(tab: Tab, script: ScriptedServer) -> None:
    script.answer = "Yes."
    as_safari_says = {"key": "Enter", "keyCode": 229}
    tab.field.fill("にほん")
    tab.field.dispatch_event("keydown", as_safari_says)
    tab.field.press("End")
    tab.field.type("ご")
    tab.field.press("Enter")
    tab.answer(0)
    assert script.asked[-1] == "にほんご"

    tab.page.get_by_role("button", name="Rename or delete this conversation").click()
    tab.page.get_by_text("Rename", exact=True).click()
    title = tab.page.get_by_label("Title")
    title.fill("に")
    title.dispatch_event("keydown", as_safari_says)
    title.fill("にほん")
    title.press("Enter")
    expect(tab.conversation("にほん")).to_be_visible()


def test_two_tabs_of_one_browser(tab: Tab, script: ScriptedServer, chat: ChatProcess) -> None:
    script.answer = "Yes."
    tab.send("one")
    tab.answer(0)
    other = Tab(tab.page.context.new_page())
    other.open(chat.url())
    expect(other.exchanges).to_have_count(1)  # as after a reload
    other.new()
    other.send("two")
    other.answer(0)
    tab.send("three")
    tab.answer(1)
    expect(tab.exchanges.first).to_contain_text("one")
    expect(other.exchanges).to_have_count(1)
    for each, title in ((tab, "one"), (other, "two")):
        expect(each.conversation(title)).to_have_attribute("aria-current", "true")
        expect(each.page.get_by_text("new answer")).to_have_count(0)  # some tab shows it

    other.new()
    tab.page.get_by_role("button", name="Rename or delete this conversation").last.click()
    tab.page.get_by_text("Delete", exact=True).click()
    tab.page.get_by_role("button", name="Delete", exact=True).click()
    expect(tab.page.get_by_text("Ask something")).to_be_visible()
    expect(other.conversation("one")).to_have_count(0)


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:1", 200), ("[::1]", 200), ("chat.test", 200), ("a.b", 400)],
)
def test_names_of_the_page(chat: ChatProcess, host: str, status: int) -> None:
    url = chat.url()
    page = httpx.get(url, headers={"Host": host}, trust_env=False)
    assert page.status_code == status
    socket = httpx.get(
        f"{url}_nicegui_ws/socket.io/?EIO=4&transport=polling", headers={"Host": host}, trust_env=False
    )
    assert (socket.text == "Invalid host header") == (status == 400)


def test_the_policy_is_a_header(chat: ChatProcess) -> None:
    policy = httpx.get(chat.url(), trust_env=False).headers["Content-Security-Policy"]
    for part in ("default-src 'self'", "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"):
        assert part in policy
