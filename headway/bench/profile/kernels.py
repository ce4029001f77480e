"""What a pass is made of: attention, matrix products and other kernels, by the server's own timings."""

from __future__ import annotations

import json
import statistics
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from typing import Any

from headway.load.request import PlannedRequest

KINDS = ("attention_ms", "products_ms", "other_ms")
# Milliseconds of each of KINDS in a pass, by its name: `prefill`, the whole prompt, and `decode_step`.
Kernels = dict[str, dict[str, float]]


def timed_kernels(url: str, requests: Sequence[PlannedRequest], timeout_s: float) -> dict[int, Kernels]:
    """Send requests, one after the other, while the server times its kernels.

    Returns:
        The kernels of each planned prompt length; none where the server times none, as on a GPU, or fails.
    """
    found: dict[int, Kernels] = {}
    for request in requests:
        asked = {"prompt": request.prompt.text, "max_tokens": request.output_tokens}
        body = {**asked, "temperature": 0.0, "ignore_eos": True}
        try:
            _post(f"{url}/start_profile", {}, timeout_s)
            _post(f"{url}/v1/completions", body, timeout_s)
            trace = _post(f"{url}/stop_profile", {}, timeout_s)
        except (OSError, ValueError, urllib.error.HTTPError):
            continue
        if passes := kernels_of(event["args"] for event in trace["traceEvents"] if event["name"] == "step"):
            found[request.prompt_tokens or 0] = passes
    return found


def kernels_of(steps: Iterable[dict[str, Any]]) -> Kernels:
    """The kernels of the steps of one request: the sum of those with a prompt, and the median of the others."""
    timed = [each for each in steps if any(kind in each for kind in KINDS)]
    prompts = [each for each in timed if each["prompt_tokens"]]
    decodes = [each for each in timed if not each["prompt_tokens"]]
    passes: Kernels = {}
    if prompts:
        passes["prefill"] = {kind: sum(each.get(kind, 0.0) for each in prompts) for kind in KINDS}
    if decodes:
        passes["decode_step"] = {kind: statistics.median(each.get(kind, 0.0) for each in decodes) for kind in KINDS}
    return passes


def _post(url: str, body: dict[str, Any], timeout_s: float) -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with direct.open(request, timeout=timeout_s) as answer:
        return json.load(answer)
