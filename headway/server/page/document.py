"""The page at /: chat and live in one HTML file, which fetches nothing but the server's own API."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SCRIPTS = ("page.js", "chat.js", "live.js", "replay.js")


@dataclass(frozen=True, slots=True)
class Page:
    """HTML with its style and script inside, and the headers that keep everything else out.

    The policy allows the page's own style and script by their hashes, connections to this server, and no other content.
    Trusted types forbid the script to make HTML of text, so nothing that a model says can become markup.
    """

    html: str
    headers: dict[str, str]


def page(recording: bytes | None = None) -> Page:
    """Put the page together.

    Args:
        recording: what it plays in place of asking a server, as JSON: the `model` and the `looks`. Such a page is a
            file of its own, so its policy stands in it.
    """
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    script = '"use strict";\n{\n' + "\n".join((FOLDER / each).read_text(encoding="utf-8") for each in SCRIPTS) + "}\n"
    html = (FOLDER / "page.html").read_text(encoding="utf-8")
    own = "'self'" if recording is None else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'; "
        f"connect-src {own}"
    )
    told = meta = ""
    if recording is not None:
        meta = f'<meta http-equiv="content-security-policy" content="{policy}">'
        # Within a script element, only this character could end it.
        told = recording.decode().replace("<", "\\u003c")
        told = f'<script type="application/json" id="recording">{told}</script>'
    for name, part in (("policy", meta), ("style", style), ("script", script), ("recording", told)):
        html = html.replace(f"{{{name}}}", part, 1)
    return Page(
        html,
        {
            "content-security-policy": f"{policy}; frame-ancestors 'none'",
            "cross-origin-opener-policy": "same-origin",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
            "vary": "accept",
        },
    )


def _hash(text: str) -> str:
    """Text as a source of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
