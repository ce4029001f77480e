"""`headway top`: what it makes of the metrics of Headway, vLLM and llama.cpp, and how it fails."""

from __future__ import annotations

import http.server
import io
import math
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from headway.cli.top import top as app
from headway.top import TopError, View, fetch, quantile, snapshot

# As their documentation and sources name them.
VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.43
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} {prompts}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} {generated}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} {fast}
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.2",model_name="m"} {all}
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} {all}
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} {all}
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.0
"""
LLAMA = """
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 100
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 500
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 4
"""


def vllm(prompts: int, generated: int, fast: int, every: int) -> str:
    values = {"prompts": prompts, "generated": generated, "fast": fast, "all": every}
    text = VLLM
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def seen(view: View, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(view.render(console.width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_vllm_tells_is_shown() -> None:
    view = View("http://there")
    view.add(snapshot(vllm(1000, 5000, 10, 10), 10.0))
    assert "since its start" in seen(view) and "tokens/s" not in seen(view)
    view.add(snapshot(vllm(1100, 5600, 10, 20), 12.0))
    text = seen(view)
    for said in ("vllm", "7 running", "2 waiting", "KV cache 43%", "50.0 prompt tokens/s", "300.0 tokens/s"):
        assert said in text, said
    assert "150.0 ms" in text and "199.0 ms" in text  # all ten of the window lie between 100 and 200 ms
    assert "class" not in text and "E2E" not in text


def test_what_llama_cpp_tells_is_shown() -> None:
    view = View("http://there")
    view.add(snapshot(LLAMA, 0.0))
    view.add(snapshot(LLAMA.replace(" 500", " 530"), 2.0))
    text = seen(view)
    assert "llamacpp" in text and "1 running · 4 waiting" in text and "15.0 tokens/s" in text and "KV" not in text


def test_no_word_is_cut_in_a_small_terminal() -> None:
    view = View("http://there")
    counts = (f'class_requests_{each}{{service_class="interactive"}} 3' for each in ("running", "waiting"))
    view.add(snapshot("".join(f"headway:{each}\n" for each in (*counts, "num_requests_running 3")), 0.0))
    for width in (40, 80):
        text = seen(view, width)
        assert "…" not in text and "interactive" in text and "missed" in text
        assert max(map(len, text.splitlines())) <= width


def test_a_server_that_was_started_anew_is_a_new_one() -> None:
    view = View("http://there")
    view.add(snapshot(vllm(1000, 5000, 10, 10), 0.0))
    view.add(snapshot(vllm(0, 3, 0, 0), 1.0))
    assert len(view.snapshots) == 1 and "tokens/s" not in seen(view)


def test_the_window_moves_and_its_memory_is_bounded() -> None:
    view = View("http://there")
    for second in range(300):
        view.add(snapshot(vllm(0, second * (10 if second < 200 else 50), 0, 0), float(second)))
    assert 60 <= len(view.snapshots) <= 63 and len(view.history) == 40
    assert view.rate(("generation_tokens_total",)) == 50.0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_lie_in_the_bucket_of_the_observation(values: list[float], at: float) -> None:
    bounds = [0.5, 1.0, 2.0, 5.0, 10.0, math.inf]
    found = quantile({bound: sum(value <= bound for value in values) for bound in bounds}, at)
    exact = sorted(values)[max(0, math.ceil(at * len(values)) - 1)]
    upper = next(bound for bound in bounds if exact <= bound)
    lower = max((bound for bound in bounds if bound < upper), default=0.0)
    assert found is not None and lower <= found <= upper
    assert quantile({1.0: 0.0, math.inf: 0.0}, at) is None and quantile({}, at) is None
    assert quantile({1.0: 0.0, math.inf: 3.0}, at) == 1.0  # beyond the last bound nothing is known


class Answers(http.server.BaseHTTPRequestHandler):
    answer = (200, LLAMA)

    def do_GET(self) -> None:
        status, text = self.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (401, "", "--api-key"),
        (404, "", "is the address right?"),
        (501, "", "llama-server with --metrics"),
        (200, "<html>hello</html>", "no text of Prometheus metrics"),
        (200, "# TYPE up gauge\nup 1\n", "is it a model's server?"),
        (200, "", "is it a model's server?"),
    ],
)
def test_servers_that_have_no_metrics_for_us_are_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch, status: int, text: str, said: str
) -> None:
    monkeypatch.setattr(Answers, "answer", (status, text))
    with pytest.raises(TopError) as error:
        fetch(f"http://{address}")
    assert said in str(error.value) and "\n" not in str(error.value)
    ran = CliRunner().invoke(app, [address, "--once", "--interval", "0.2"])
    assert ran.exit_code == 2 and said in ran.output and "Traceback" not in ran.output


def test_once_prints_what_happens(address: str) -> None:
    ran = CliRunner().invoke(app, [address, "--once", "--interval", "0.2"])
    assert ran.exit_code == 0 and "1 running · 4 waiting" in ran.output and "0.0 tokens/s" in ran.output


@pytest.mark.parametrize("given", [["localhost:1"], ["ftp://x"], ["http://"], ["--interval", "0"]])
def test_bad_input_is_one_line(given: list[str]) -> None:
    ran = CliRunner().invoke(app, [*given, "--once"])
    assert ran.exit_code == 2 and "Traceback" not in ran.output
