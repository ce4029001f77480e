"""The page at / in a browser: what is clicked and typed there, and what is seen. Needs Chromium and its driver."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from headway.engine.messages import EngineStats, LiveSequence
from headway.text.tokenizer import Tokenizer
from tests.server.browser import LOOKS, Browser, browser, keep, missing
from tests.server.conftest import StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.xdist_group("browser"),
    pytest.mark.timeout(240),
]
EVIL = 'Hi <script>document.title = "gone"</script><img src=x onerror="document.title=1"> & <b>bold</b>'
RIGHT, TAB, ENTER = "\ue014", "\ue004", "\ue007"
ANSWERED = "document.querySelector('.answer .strip') && !document.querySelector('#messages').ariaBusy"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as window:
        yield window


@pytest.fixture
def page(chromium: Browser, server: LiveServer) -> Iterator[Browser]:
    """The chat of the server, which must complain of nothing until the end of the test."""
    chromium.emulate()
    chromium.complaints()
    chromium.open(server.url + "/")
    chromium.until("!document.querySelector('#chat').hidden")
    yield chromium
    assert chromium.complaints() == []


def test_a_chat_streams_and_shows_its_ledger(page: Browser, engine: FakeEngine) -> None:
    engine.step_s = 0.01
    page.type("#text", "Tell me a story")
    page.press(ENTER)
    page.until(ANSWERED)
    assert page.text(".question p") == "Tell me a story"
    assert page.text(".answer .text") == "Once upon a time there was a fox."
    tokens = page.run("return [...document.querySelectorAll('.answer .text span')].map((each) => each.title)")
    assert len(tokens) > 3 and "after it was asked for" in tokens[0]
    assert all("after the one before" in each for each in tokens[1:])
    assert "in all · first token after" in page.text(".answer .said:nth-of-type(3)")
    label = page.run("return document.querySelector('.answer .strip').ariaLabel")
    assert label.startswith("Ledger of this answer: ") and "decode" in label
    page.run("document.querySelector('.answer .text').focus()")
    page.press(RIGHT, RIGHT)
    assert "token 2: " in page.text(".answer .said")
    assert page.run("return document.querySelectorAll('.chosen').length") == 1
    page.type("#text", "And then?")
    page.click("#send")
    page.until("document.querySelectorAll('.answer .strip').length === 2")
    assert len(engine.requests) == 2 and engine.requests[-1].params.temperature == 1.0
    keep(page, "chat-light")


def test_parameters_reach_the_engine(page: Browser, engine: FakeEngine) -> None:
    page.click("#ask summary")
    fields = {"temperature": "0.25", "top_p": "0.5", "seed": "7", "max_tokens": "3", "system": "Be brief."}
    for name, given in fields.items():
        page.type(f"#{name}", given)
    page.type("#text", "Hi")
    page.click("#send")
    page.until(ANSWERED)
    params = engine.requests[-1].params
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.25, 0.5, 7, 3)
    assert "Be brief." in engine.tokenizer.decode(engine.requests[-1].prompt_token_ids)
    page.run("document.querySelector('#service_class').value = 'nowhere'")
    page.type("#text", "Hi")
    page.click("#send")
    page.until("document.querySelector('[role=alert].error')")
    assert "nowhere" in page.text(".error")
    assert any("400" in each for each in page.complaints())  # the network's, of the refused request


def test_what_a_model_says_is_never_html(page: Browser, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.reply = lambda request, index: tokenizer.encode(EVIL)
    page.type("#text", EVIL)
    page.click("#send")
    page.until(ANSWERED)
    assert page.text(".answer .text") == page.text(".question p") == EVIL
    assert page.run("return document.querySelectorAll('#messages script, #messages img, #messages b').length") == 0
    assert page.run("return document.title") == "Chat – tiny – Headway"
    with pytest.raises(AssertionError, match=r"TrustedHTML|javascript error"):
        page.run("document.querySelector('#messages').innerHTML = '<b>x</b>'")
    page.complaints()


def test_an_answer_can_be_stopped(page: Browser, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.step_s, engine.reply = 0.02, lambda request, index: tokenizer.encode("tick " * 40)
    page.type("#text", "Count")
    page.click("#send")
    page.until("document.querySelectorAll('.answer .text span').length > 3")
    page.click("#stop")
    page.until("document.querySelector('#stop').disabled")
    assert "Stopped" in page.text(".answer .said")
    deadline = time.monotonic() + 10
    while not engine.aborted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.aborted
    page.click("#fresh")
    assert page.run("return document.querySelectorAll('.message').length") == 0


def test_the_page_asks_for_the_key(chromium: Browser, start_server: StartServer) -> None:
    server = start_server(api_keys=["sk-one"])
    chromium.emulate()
    chromium.open(server.url + "/")
    chromium.until("!document.querySelector('#key-form').hidden")
    assert chromium.run("return document.activeElement.id") == "key"
    chromium.type("#key", "wrong")
    chromium.press(ENTER)
    chromium.until("document.querySelector('#key-said').textContent.includes('not accept')")
    chromium.run("document.querySelector('#key').value = ''")
    chromium.type("#key", "sk-one")
    chromium.press(ENTER)
    chromium.until("!document.querySelector('#chat').hidden")
    chromium.run("location.hash = '#live'")
    chromium.until("document.querySelector('#live-said').textContent === 'Live'")
    chromium.complaints()


def busy(engine: FakeEngine) -> None:
    """Let the engine look as if it had work."""
    now, ms = time.monotonic_ns(), 1_000_000
    engine.sequences = [
        LiveSequence(
            f"{number:08x}-0",
            0,
            ("interactive", "batch")[number % 2],
            now - (8_000 - 300 * number) * ms,
            "decode_compute",
            {
                "transport": 3 * ms,
                "queue_capacity": 130 * number * ms,
                "prefill_compute": 400 * ms,
                "decode_compute": (3_000 - 150 * number) * ms,
                "decode_stall_prefill": 900 * ms,
                "sampling": 300 * ms,
            },
            40,
            60,
            20,
            1 + number // 3,
            (20 - 3 * number) * ms if number % 2 == 0 else None,
        )
        for number in range(12)
    ]
    engine.stats = EngineStats(12, 3, 0.5, blocks_of_class={"interactive": 20, "batch": 14})
    engine.num_waiting = 3


@pytest.mark.parametrize(("name", "look"), LOOKS)
def test_live_shows_what_the_engine_does(
    name: str, look: dict[str, int], page: Browser, server: LiveServer, engine: FakeEngine
) -> None:
    page.emulate(**look)
    page.run("location.hash = '#live'")
    page.until("document.querySelector('#live-said').textContent === 'Live'")
    engine.step_s = 0.005
    for _ in range(3):
        server.post("/v1/completions", model="tiny", prompt="x")
    busy(engine)
    page.until("document.querySelectorAll('#slowest .strip').length === 4")
    page.until("document.querySelector('#timelines-said').textContent.includes('12 running, 3 waiting')")
    assert "34 of 64 blocks of 16 tokens in use, 7 cached, 23 free" in page.text("#kv-said")
    assert "predictions were within 5 %" in page.text("#steps-said")
    assert page.run("return document.querySelectorAll('#now tbody tr').length") == 12
    late = "return [...document.querySelectorAll('#now td.late')].map((each) => each.textContent)"
    assert page.run(late)[0].startswith("−")
    for canvas in ("timelines", "steps", "kv"):
        drawn = (
            "const context = document.getElementById(arguments[0]).getContext('2d');"
            "return new Set(new Uint32Array(context.getImageData(0, 0, 400, 100).data.buffer)).size"
        )
        assert page.run(drawn, canvas) > 2, canvas
    assert page.run("return document.documentElement.scrollWidth <= innerWidth"), "it must not scroll sideways"
    keep(page, f"live-{name}")
    page.run("location.hash = '#chat'")
    page.type("#text", "A story, please")
    page.click("#send")
    page.until(ANSWERED)
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    keep(page, f"chat-{name}")


def test_pause_stops_what_moves_and_leaving_ends_the_stream(
    page: Browser, server: LiveServer, engine: FakeEngine
) -> None:
    busy(engine)
    page.click("#to-live")
    page.until("document.querySelector('#live-said').textContent === 'Live'")
    page.click("#pause")
    picture = "document.querySelector('#timelines').toDataURL()"
    before = page.run(f"return {picture}")
    time.sleep(0.3)
    assert page.run(f"return {picture}") == before
    page.click("#pause")
    page.until(f"{picture} !== arguments[0]", before)
    assert server.service.when_ended
    page.click("#to-chat")
    deadline = time.monotonic() + 10
    while server.service.when_ended and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server.service.when_ended


def test_everything_can_be_reached_by_keyboard(page: Browser) -> None:
    reached = []
    for _ in range(12):
        page.press(TAB)
        reached.append(page.run("return document.activeElement.id || document.activeElement.className"))
    assert reached[0] == "skip" and {"to-chat", "to-live", "text", "send", "fresh", "timed"} <= set(reached)
    page.run("document.querySelector('#to-live').focus()")
    page.press(ENTER)
    page.until("!document.querySelector('#live').hidden")
    named = (
        "return [...document.querySelectorAll('button, input:not([hidden]), textarea, a, canvas')]"
        ".filter((each) => !each.innerText && !each.labels?.length && !each.getAttribute('aria-labelledby'))"
        ".map((each) => each.outerHTML)"
    )
    assert page.run(named) == []
