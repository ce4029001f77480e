"""The page at /: who gets it, what it may do, and that its parts belong together."""

from __future__ import annotations

import base64
import hashlib
import re

from headway.policy.step.ledger import QUEUE_PHASES, Phase
from headway.server.page.document import FOLDER, SCRIPTS, page
from tests.server.conftest import StartServer
from tests.server.live_server import LiveServer

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SOURCE = "\n".join((FOLDER / each).read_text() for each in SCRIPTS)


def test_browsers_get_the_page_and_others_what_they_got(server: LiveServer) -> None:
    answer = server.client.get("/", headers=BROWSER)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert answer.text == page().html and answer.headers["vary"] == "accept"
    for accept in ("*/*", "application/json", ""):
        places = server.client.get("/", headers={"accept": accept}).json()
        assert set(places) == {"server", "api", "models", "health", "metrics"}


def test_the_page_can_be_turned_off(start_server: StartServer) -> None:
    server = start_server(pages=False)
    assert server.client.get("/", headers=BROWSER).json()["api"] == "/docs"
    assert server.client.get("/debug/live").status_code == 404


def test_the_page_itself_needs_no_key_and_what_it_shows_does(start_server: StartServer) -> None:
    server = start_server(api_keys=["sk-one"])
    assert server.client.get("/", headers=BROWSER).text == page().html
    assert server.client.get("/debug/live").status_code == 401


def test_the_policy_allows_the_pages_own_parts_alone(server: LiveServer) -> None:
    answer = server.client.get("/", headers=BROWSER)
    policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert len(inside) == 1
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert policy[kind] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_fetches_nothing_from_elsewhere() -> None:
    html = page().html
    assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", html)
    assert not re.findall(r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\()", SOURCE)
    assert not re.findall(r"\s(?:style|on[a-z]+)=", html.partition("<script>")[0].partition("</style>")[2])


def test_the_page_knows_every_phase_and_what_it_names() -> None:
    table = SOURCE.partition("const PHASES = {")[2].partition("\n};")[0]
    phases = dict(re.findall(r'(\w+): \["[^"]+", "([\w-]+)"\]', table))
    assert phases.keys() == set(map(str, Phase))
    style = (FOLDER / "page.css").read_text()
    light, dark = style.partition("@media (prefers-color-scheme: dark)")[::2]
    for name in {*phases.values(), *re.findall(r'(?:ink\("|var\(--)([\w-]+)', SOURCE)}:
        assert f"--{name}:" in light and f"--{name}:" in dark.partition("* {")[0], name
    first = SOURCE.partition("const FIRST_TOKEN = [")[2].partition("]")[0]
    assert (
        {*map(str, QUEUE_PHASES), "prefill_compute", "receive"} <= set(re.findall(r'"(\w+)"', first)) <= phases.keys()
    )
    html = (FOLDER / "page.html").read_text()
    ids = set(re.findall(r'\bid="([\w-]+)"', html))
    assert set(re.findall(r'(?:\$|surface|fillTable)\("([\w-]+)"', SOURCE)) <= ids
    assert set(re.findall(r'(?:for|aria-labelledby)="([\w-]+)"', html)) <= ids
