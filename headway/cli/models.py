"""`headway models`: what can be served here, or what a server serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.bundled import DRAFT, STORY
from headway.cli.commands import command, fail


@command()
def models(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="Address of a server. Default: what is on this machine.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=["HEADWAY_API_KEY", "OPENAI_API_KEY"], help="API key of the server.")
    ] = None,
) -> None:
    """List the models that can be served here, or that a server serves."""
    rows = _local_models() if url is None else _served(url, api_key)
    widest = max((len(name) for name, _ in rows), default=0)
    for name, said in rows:
        print(f"{name.ljust(widest)}  {said}".rstrip())
    if url is None:
        print("\nAny folder or Hugging Face id of a supported model can be served: headway serve MODEL")


def _served(given: str, api_key: str | None) -> list[tuple[str, str]]:
    from headway.chat import ChatError, Conversation, as_url

    if (url := as_url(given)) is None:
        fail(f"{given!r} is not the address of a server, such as http://localhost:8000")
    try:
        cards = Conversation(url, "any", api_key).models()
    except ChatError as error:
        fail(f"{error}{'; give one with --api-key' * str(error).startswith('401')}")
    return [(str(card["id"]), _context(card.get("max_model_len"))) for card in cards]


def _context(tokens: Any) -> str:
    return f"context {tokens:,} tokens" if isinstance(tokens, int) else ""


def _local_models() -> list[tuple[str, str]]:
    bundled = [(f"headway/{folder.name}", f"{_size(folder)}, bundled") for folder in (STORY, DRAFT) if folder.is_dir()]
    return bundled + _downloaded()


def _downloaded() -> list[tuple[str, str]]:
    """Models with weights in the Hugging Face cache, and for each whether Headway can serve it."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = sorted(scan_cache_dir().repos, key=lambda each: each.repo_id.lower())
    except CacheNotFound:
        return []
    found = []
    for each in repositories:
        folders = [
            revision.snapshot_path for revision in each.revisions if (revision.snapshot_path / "config.json").exists()
        ]
        if each.repo_type == "model" and folders and any(folders[0].glob("*.safetensors")):
            found.append((each.repo_id, f"{_size(folders[0])}, downloaded{_unsupported(folders[0])}"))
    return found


def _unsupported(folder: Path) -> str:
    from headway.cost.config import read_shape
    from headway.cost.layers import ShapeError

    try:
        read_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")), str(folder))
    except (ShapeError, ValueError, OSError):
        return "; not supported"
    return ""


def _size(folder: Path) -> str:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
