"""The page: what is served, and what a browser makes of it."""

import re
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.testclient import TestClient

from graphseed.server.app import create_app
from graphseed.server.watch.page import PUBLIC_PATHS
from tests.server.small import listening

FOLDER = files("graphseed.server.watch") / "static"
NAMES = sorted(entry.name for entry in FOLDER.iterdir())
SECONDS = 30.0


def test_the_page_and_its_files_are_served_with_a_policy_for_content(server):
    kinds = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
    assert {f"/page/{name}" for name in NAMES if name != "index.html"} < PUBLIC_PATHS
    for path in PUBLIC_PATHS:
        response = server.get(path)
        assert response.status_code == 200, path
        kind = path.rpartition(".")[2] if "." in path else "html"
        assert response.headers["content-type"] == f"{kinds[kind]}; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        name = "index.html" if kind == "html" else path.rpartition("/")[2]
        assert response.content == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_the_page_names_another_server_or_sets_markup(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert not re.search(r"https?://|\bsrc=\"//|@import", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    if name == "index.html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
        named = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', text)
        assert {f"/{one}" for one in named} <= PUBLIC_PATHS


def test_without_a_page_there_is_none(make_server):
    server = make_server(has_ui=False)
    for path in PUBLIC_PATHS:
        assert server.get(path).json()["error"]["message"] == "File Not Found"
    assert server.get("/props").json()["ui"] is False


def test_the_page_needs_no_key_and_no_model(make_server):
    assert make_server(api_keys=("secret",)).get("/").status_code == 200
    loading = make_server(is_loaded=False)
    assert loading.get("/").status_code == 200
    assert loading.get("/prompt-graphs").status_code == 503


@pytest.mark.parametrize("path", ["/page/", "/page/../settings.py", "/page/%2e%2e/page.py"])
def test_nothing_but_the_pages_own_files_is_served(server, path):
    assert server.get(path).status_code == 404


def test_behind_a_prefix_the_page_is_where_its_files_are(server):
    http = TestClient(
        create_app(server.state, server.lifecycle, prefix="/llm"), base_url="http://server"
    )
    moved = http.get("/llm", follow_redirects=False)
    assert moved.status_code == 307 and moved.headers["location"] == "llm/"
    assert http.get("/llm").url.path == "/llm/"
    assert http.get("/llm/").content == (FOLDER / "index.html").read_bytes()
    assert http.get("/llm/page/app.js").status_code == 200


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HAS_BROWSER = CHROMIUM is not None and find_spec("playwright") is not None
in_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_BROWSER, reason="needs playwright and a chromium"),
]


def marked(test: Callable[..., Any]) -> Callable[..., Any]:
    for mark in in_browser:
        test = mark(test)
    return test


class Opened:
    """A page in a browser, what it asked for, and what went wrong in it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(SECONDS * 1000)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._said)
        page.goto(f"{address}/")

    def _said(self, message: Any) -> None:
        if message.type == "error" and "401" not in message.text:
            self.errors.append(message.text)

    def text(self, name: str) -> str:
        return str(self.page.locator(f"#{name}").inner_text())

    def wait(self, name: str, pattern: str) -> None:
        """Wait until an element says something."""
        from playwright.sync_api import expect

        expect(self.page.locator(f"#{name}")).to_have_text(
            re.compile(pattern), timeout=SECONDS * 1000
        )

    def polls(self) -> int:
        return sum(urlsplit(url).path == "/prompt-graphs" for url in self.requests)

    def check(self) -> None:
        """Nothing went wrong, and no request left the server."""
        assert self.errors == []
        mine = urlsplit(self.address).netloc
        assert {urlsplit(url).netloc for url in self.requests if url[:5] != "data:"} == {mine}


@pytest.fixture
def browse() -> Iterator[Callable[..., Opened]]:
    """`browse(server, **context)` opens its page in a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        stops = []

        def open_page(server: Any, **context: Any) -> Opened:
            served = listening(server.app)
            address = served.__enter__()
            stops.append(served)
            return Opened(browser.new_context(**context).new_page(), address)

        yield open_page
        browser.close()
        for served in stops:
            served.__exit__(None, None, None)


def ask(opened: Opened, prompt: str = "x" * 70, **more: Any) -> None:
    body = {"prompt": prompt, "n_predict": 4, "cache_prompt": False, **more}
    httpx.post(f"{opened.address}/completion", json=body, timeout=SECONDS).raise_for_status()


@marked
def test_a_request_makes_timeline_counters_and_table_move(make_server, browse):
    opened = browse(make_server(policy="seed"))
    opened.wait("condition", "idle")
    assert opened.text("hit-rate") == "–" and opened.text("identities-told") == "None was seen yet."
    ask(opened)
    opened.wait("prompt-rate", "[1-9]")  # of the last two seconds
    opened.wait("hit-rate", r"33\.3 %")
    opened.wait("hit-more", "1 of 3 prompt observations replayed")
    opened.wait("timeline-text", "0 direct, 2 seeded, 1 replayed, 0 refused, 1 released")
    opened.wait("identities", "released: first batch-one decode graph")
    opened.wait("host-time", "ms replayed")
    opened.wait("held-decode", r"KiB of at most 4 GiB")
    marks = opened.page.locator("#timeline").evaluate(
        """(canvas) => {
            const { width, height } = canvas;
            const all = canvas.getContext("2d").getImageData(0, 0, width, height).data;
            const seen = new Set();
            for (let at = 0; at < all.length; at += 4) {
                if (all[at + 3] === 255) seen.add([all[at], all[at + 1], all[at + 2]].join());
            }
            return [...seen];
        }"""
    )
    for colour in ("168,100,0", "0,103,165", "155,63,138"):  # seeded, replayed, released
        assert colour in marks
    assert "192,58,0" not in marks  # refused
    opened.page.select_option("#namespace", "decode")
    opened.wait("timeline-text", "decode observations.* 0 direct, 1 seeded, 2 replayed")
    opened.check()


@marked
def test_the_chat_streams_and_tells_its_own_timings_by_keyboard_alone(make_server, browse):
    opened = browse(make_server(policy="resident"))
    opened.wait("condition", "idle")
    page = opened.page
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    order = ["namespace", "window", "timeline", "chat-mode", "prompt", "max-tokens"]
    assert [name for name in reached if name in order] == order
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    opened.wait("chat-told", "Answered")
    told = opened.text("messages")
    assert "Hello" in told and "queue" in told and "observations" in told
    assert re.search(r"answer\s+\d+ tokens in", told)
    ring = page.evaluate("getComputedStyle(document.querySelector(':focus-visible')).outlineStyle")
    assert ring == "solid"
    page.focus("#timeline")
    page.keyboard.press("End")
    last = opened.text("picked")
    page.keyboard.press("Home")
    assert re.search(r"prompt (direct|seeded|replayed), ", last)
    assert opened.text("picked") != last
    opened.check()


@marked
def test_stop_ends_a_stream_and_frees_its_slot(make_server, browse):
    server = make_server(context_len=2048)
    opened = browse(server)
    opened.wait("condition", "idle")
    opened.page.select_option("#chat-mode", "text")
    opened.page.fill("#max-tokens", "2000")
    opened.page.click("#send")
    opened.wait("requests", "^1 of 2 slots")
    opened.page.click("#stop")
    opened.wait("chat-told", "Stopped|Answered")
    opened.wait("requests", "^0 of 2 slots")
    opened.check()


@marked
def test_an_alarm_is_shown_and_goes_when_a_graph_replays(make_server, browse):
    opened = browse(make_server(policy="seed"))
    for _ in range(8):
        ask(opened, "x" * 20, n_predict=2)
    opened.wait("alarms", "8 prompt graphs seeded and none replayed")
    assert opened.page.locator("#alarms").get_attribute("role") == "alert"
    ask(opened)
    opened.wait("alarms", "^$")
    opened.check()


@marked
def test_graphs_are_released_by_the_button(make_server, browse):
    opened = browse(make_server(policy="resident"))
    ask(opened)
    opened.wait("held-prompt", "KiB")
    opened.page.get_by_role("button", name="Release prompt graphs").click()
    opened.wait("release-told", r"prompt graphs released in .* came back")
    opened.wait("held-prompt", "^0 of")
    opened.check()


@marked
def test_a_key_is_asked_for_used_and_kept_for_the_tab_only(make_server, browse):
    opened = browse(make_server(api_keys=("secret",)))
    opened.wait("condition", "needs an API key")
    assert opened.page.evaluate("document.activeElement.id") == "key"
    opened.page.keyboard.type("wrong")
    opened.page.keyboard.press("Enter")
    opened.wait("key-told", "does not know this key")
    opened.page.fill("#key", "secret")
    opened.page.keyboard.press("Enter")
    opened.wait("condition", "idle")
    assert not opened.page.locator("#key-form").is_visible()
    assert opened.page.evaluate("localStorage.length") == 0
    opened.page.reload()
    opened.wait("condition", "idle")
    opened.check()


@marked
def test_text_of_the_server_is_never_markup(make_server, browse):
    name = "<img src=x onerror=alert(1)><b>bold</b>"
    opened = browse(make_server(aliases=(name,)))
    opened.wait("condition", "idle")
    assert opened.text("model") == name and opened.page.locator("#model b").count() == 0
    opened.check()


@marked
def test_a_hidden_page_asks_nothing_and_goes_on_when_it_is_shown(make_server, browse):
    opened = browse(make_server())
    opened.wait("condition", "idle")
    page = opened.page
    show = """(state) => {
        Object.defineProperty(document, "hidden", {value: state, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(show, True)
    page.wait_for_timeout(300)  # one that was under way may end
    before = opened.polls()
    page.wait_for_timeout(2500)
    assert opened.polls() == before
    page.evaluate(show, False)
    page.wait_for_timeout(1500)
    assert opened.polls() > before
    opened.check()


@marked
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_its_width_and_can_be_read(make_server, browse, tmp_path, width, scheme):
    server = make_server(policy="seed")
    opened = browse(server, viewport={"width": width, "height": 844}, color_scheme=scheme)
    ask(opened)
    opened.wait("hit-rate", "%")
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 30 and [one for one in contrasts if one[1] < 4.5] == []
    opened.check()


# The contrast of every text that is shown with what is behind it, as WCAG 2 has it.
CONTRASTS = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
        .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const node of document.querySelectorAll("body *")) {
        const hasText = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
        if (!hasText || node.offsetParent === null || node.matches(".unseen, option, :disabled")) {
            continue;
        }
        const pair = [light(parse(getComputedStyle(node).color)), light(behind(node))];
        pair.sort((one, other) => other - one);
        found.push([node.textContent.trim().slice(0, 40), (pair[0] + 0.05) / (pair[1] + 0.05)]);
    }
    return found;
}"""
