"""Embeddings, scores and rankings over HTTP and through the `openai` client, against a live server."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headway.config_files.classes import read_class_file
from headway.text.tokenizer import Tokenizer
from tests.server.batches.test_batch_command import Command, read, write
from tests.server.fake_engine import WIDTH, FakeEngine
from tests.server.live_server import MODEL, LiveServer, eventually
from tests.text.tiny_tokenizers import save, save_chat_model, sentencepiece_style

TEXTS = ["Hello", "Once upon a time", "The quick brown fox jumps"]


def length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text))


def expected(tokens: int, width: int = WIDTH) -> list[float]:
    """What the scripted engine gives for a prompt, as float32."""
    numbers = [tokens / (at + 1) for at in range(width)]
    return list(struct.unpack(f"{width}f", struct.pack(f"{width}f", *numbers)))


def test_the_openai_client_gets_vectors_and_usage(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)  # in base64, unless it is told otherwise
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert [each.embedding for each in answer.data] == [expected(length(tokenizer, text)) for text in TEXTS]
    assert (answer.object, answer.model) == ("list", MODEL)
    tokens = sum(length(tokenizer, text) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    plain = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [each.embedding for each in plain.data] == [each.embedding for each in answer.data]


@pytest.mark.parametrize(
    ("given", "lengths"), [("Hello", None), ([5, 6, 7], [3]), ([[5, 6], [7]], [2, 1]), (["Hello"], None)]
)
def test_an_input_is_a_text_or_token_ids_or_a_list_of_either(
    server: LiveServer, engine: FakeEngine, tokenizer: Tokenizer, given: Any, lengths: list[int] | None
) -> None:
    data = server.post("/v1/embeddings", input=given, encoding_format="float").json()["data"]
    lengths = lengths or [length(tokenizer, "Hello")]
    assert [each["embedding"] for each in data] == [expected(each) for each in lengths]
    assert all(one.pooling is not None and one.pooling.pooling == "last" for one in engine.requests)


def test_base64_is_float32_in_little_endian(server: LiveServer) -> None:
    (entry,) = server.post("/v1/embeddings", input=[5, 6, 7], encoding_format="base64").json()["data"]
    assert struct.unpack(f"<{WIDTH}f", base64.b64decode(entry["embedding"])) == tuple(expected(3))


def test_dimensions_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.embeddings.create(model=MODEL, input="Hello", dimensions=3)
    assert len(answer.data[0].embedding) == 3
    assert engine.requests[-1].pooling is not None and engine.requests[-1].pooling.dimensions == 3


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("embeddings", {}, "input", "input is missing"),
        ("embeddings", {"input": []}, "input", "input is an empty list; give at least one prompt"),
        ("embeddings", {"input": ""}, "input", "input is empty; give at least one token"),
        ("embeddings", {"input": ["a", ""]}, "input", "input 1 is empty"),
        ("embeddings", {"input": [-1]}, "input", "input has -1 at position 0"),
        ("embeddings", {"input": ["a"] * 2049}, "input", "input has 2049 texts; at most 2048"),
        ("embeddings", {"input": [5] * 513}, "input", "so a prompt may have at most 256"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "it must be at least 1"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ("embeddings", {"input": "a", "n": 2}, "n", "unknown field n"),
        ("embeddings", {"input": "a", "priority": 1}, "priority", "--scheduling-policy priority"),
        ("embeddings", {"input": "a", "service_class": "best"}, "service_class", "not a class here"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to 256"),
        (
            "embeddings",
            {"input": "a", "truncate_prompt_tokens": -2},
            "truncate_prompt_tokens",
            "-1 for as much as fits",
        ),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "it must be from 1 to"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": "5"}, "truncate_prompt_tokens", "valid integer"),
        ("embeddings", {"input": "a", "truncation_side": "both"}, "truncation_side", "'left' or 'right'"),
        ("score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to"),
        (
            "rerank",
            {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 300},
            "truncate_prompt_tokens",
            "to 256",
        ),
        ("score", {"text_1": "a"}, "text_2", "text_2 is missing"),
        ("score", {"text_1": "a", "queries": "b", "documents": "c"}, "text_1", "or queries and documents"),
        ("score", {"queries": ["a", "b"], "documents": ["c"] * 3}, "documents", "2 queries and 3 documents"),
        ("score", {"text_1": "a", "text_2": []}, "text_2", "no text on one side"),
        ("score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "without an instruction"),
        ("rerank", {"query": "a", "documents": []}, "documents", "no text on one side"),
        ("rerank", {"query": "a", "documents": [{"text": 5}]}, "documents", "objects with a text"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal to 0"),
    ],
)
def test_bad_input_is_named(server: LiveServer, path: str, body: dict[str, Any], param: str, message: str) -> None:
    answer = server.post(f"/v1/{path}", **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


LONG = "".join(f"line {number} \u00e9\U0001f30a" for number in range(200))


@pytest.fixture(scope="module")
def framing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Begins each text with a token; the model wants another at its end."""
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    folder = save(tmp_path_factory.mktemp("framing"), sentencepiece_style(), add_eos_token=True, **names)
    return Tokenizer.load(folder)


@pytest.fixture
def framed(framing: Tokenizer) -> Iterator[LiveServer]:
    server = LiveServer(FakeEngine(framing), framing).start()
    yield server
    server.stop()


@pytest.mark.parametrize("side", ["right", "left", None])
def test_a_text_that_is_too_long_is_truncated(
    client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer, side: str | None
) -> None:
    """Its first tokens stay, unless the request wants the last."""
    extra = {"truncate_prompt_tokens": 20, **({} if side is None else {"truncation_side": side})}
    answer = client.embeddings.create(model=MODEL, input=[LONG, "a"], extra_body=extra)
    ids, short = tokenizer.encode(LONG), tokenizer.encode("a")
    kept = ids[-20:] if side == "left" else ids[:20]
    assert [one.prompt_token_ids for one in engine.requests] == [kept, short]
    assert answer.usage.prompt_tokens == 20 + len(short)
    client.embeddings.create(model=MODEL, input=list(range(3, 63)), extra_body=extra)
    assert engine.requests[-1].prompt_token_ids == list(range(43, 63) if side == "left" else range(3, 23))
    scored = {"text_1": "a", "text_2": LONG, **extra}
    client.post("/score", body=scored, cast_to=object)
    assert [one.prompt_token_ids for one in engine.requests[-2:]] == [short, kept]


@pytest.mark.parametrize("side", ["right", "left"])
def test_tokens_around_a_text_stay(framed: LiveServer, framing: Tokenizer, side: str) -> None:
    bos, *ids = framing.encode(LONG)
    end = framing.eos_token_ids[0]
    cut = {"truncate_prompt_tokens": 20, "truncation_side": side}
    assert framed.post("/v1/embeddings", input=LONG, **cut).json()["usage"]["prompt_tokens"] == 20
    framed.post("/v1/completions", prompt=LONG, **cut)
    kept = [one.prompt_token_ids for one in framed.engine.requests]
    first, last = (ids[:18], ids[:19]) if side == "right" else (ids[-18:], ids[-19:])
    assert kept == [[bos, *first, end], [bos, *last]]
    error = framed.post("/v1/embeddings", input=LONG, truncate_prompt_tokens=2).json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "give at least 3" in error["message"]


def test_minus_one_truncates_to_what_fits(start_server: Callable[..., LiveServer], tmp_path: Path) -> None:
    """The model's context, or the longest prompt of the class; before a text, less what may follow."""
    path = tmp_path / "classes.toml"
    path.write_text('[[class]]\nname = "long"\n[[class]]\nname = "short"\nmax_prompt_tokens = 30\n')
    server = start_server(service_classes=read_class_file(str(path)))
    for service_class, most in (("long", 256), ("short", 30)):
        chosen = {"truncate_prompt_tokens": -1, "service_class": service_class}
        answer = server.post("/v1/embeddings", input=LONG, **chosen).json()
        assert answer["usage"]["prompt_tokens"] == most
        answer = server.post("/v1/completions", prompt=LONG, max_tokens=6, **chosen).json()
        assert answer["usage"]["prompt_tokens"] == min(most, 250)


def test_prompts_of_texts_keep_their_end(client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    cut = {"truncate_prompt_tokens": 20}
    answer = client.completions.create(model=MODEL, prompt=LONG, max_tokens=1, echo=True, extra_body=cut)
    kept = tokenizer.encode(LONG)[-20:]
    assert engine.requests[-1].prompt_token_ids == kept
    assert answer.choices[0].text.startswith(tokenizer.decode(kept))
    messages: list[Any] = [{"role": "user", "content": LONG}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, extra_body=cut)
    assert chat.usage is not None and chat.usage.prompt_tokens == 20
    text = tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("assistant\n") and "199" in text
    with pytest.raises(openai.BadRequestError, match="from 1 to 256"):
        client.completions.create(model=MODEL, prompt=LONG, extra_body={"truncate_prompt_tokens": 257})


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


def test_timings_and_metrics_are_those_of_a_request(server: LiveServer, engine: FakeEngine) -> None:
    answer = server.post("/v1/embeddings", input=["Hello", "you"], include_timings=True)
    timings = answer.json()["timings"]
    assert sum(timings["phases_ns"].values()) == timings["e2e_ns"] > timings["ttft_ns"] > 0
    assert timings["tokens"] == 0 and "server-timing" in answer.headers
    text = server.client.get("/metrics").text
    ended = next(
        line for line in text.splitlines() if line.startswith("headway:request_success_total{") and "stop" in line
    )
    assert float(ended.rpartition(" ")[2]) >= 2
    assert not server.service.in_flight and not server.service.admission.queues.of_all.choices


def test_a_class_and_its_objectives_apply(server: LiveServer, engine: FakeEngine) -> None:
    headers = {"x-headway-service-class": "batch", "x-llm-d-slo-ttft-ms": "5000"}
    server.client.post("/v1/embeddings", json={"input": "a", "cache_salt": "s"}, headers=headers)
    (request,) = engine.requests
    assert (request.service_class, request.ttft_ms, request.cache_salt) == ("batch", 5000.0, "s")


def test_a_client_that_leaves_frees_the_engine(server: LiveServer, engine: FakeEngine) -> None:
    engine.open = False
    hasty = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=0.3)
    with hasty, pytest.raises(openai.APITimeoutError):
        hasty.embeddings.create(model=MODEL, input=TEXTS)
    eventually(lambda: len(engine.aborted) == 3 and not engine.running)


def test_scores_are_cosines_of_embeddings_where_nothing_judges(server: LiveServer) -> None:
    """The scripted vectors all have one direction."""
    answer = server.post("/v1/score", text_1="Hello", text_2=TEXTS).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2] and answer["object"] == "list"
    assert [each["score"] for each in answer["data"]] == pytest.approx([1.0] * 3, abs=1e-6)
    pairwise = server.post("/score", queries=["a", "b"], documents=["c", "d"]).json()
    assert len(pairwise["data"]) == 2 and pairwise["usage"]["completion_tokens"] == 0


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a reranker, as sentence-transformers writes it."""
    folder = save_chat_model(tmp_path_factory.mktemp("judge"))
    module = {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "sentence_transformers.x.modules.LogitScore"}
    (folder / "modules.json").write_text(json.dumps([module]))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 40, "false_token_id": 41}))
    return Tokenizer.load(folder)


@pytest.fixture
def reranker(judging: Tokenizer) -> Any:
    server = LiveServer(FakeEngine(judging), judging).start()
    yield server
    server.stop()


def test_a_reranker_judges_each_document_with_its_query(reranker: LiveServer, judging: Tokenizer) -> None:
    engine = reranker.engine
    answer = reranker.post("/v1/rerank", query="Which?", documents=[*TEXTS[:2], {"text": TEXTS[2]}], top_n=2).json()
    prompts = [judging.decode(one.prompt_token_ids, skip_special_tokens=False) for one in engine.requests]
    assert all("<Query>: Which?\n<Document>: " in prompt and prompt.endswith("assistant\n") for prompt in prompts)
    assert all("<Instruct>: Given a web search query" in prompt for prompt in prompts)
    assert all(one.pooling is not None and one.pooling.token_ids == (40, 41) for one in engine.requests)
    ids = [one.prompt_token_ids for one in engine.requests]
    scores = [1 / (1 + math.exp(-len(each) / 2)) for each in ids]
    best = sorted(range(3), key=lambda at: (-scores[at], at))[:2]
    assert [each["index"] for each in answer["results"]] == best
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx([scores[at] for at in best])
    assert [each["document"] for each in answer["results"]] == [{"text": TEXTS[at]} for at in best]
    assert answer["usage"]["total_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize("side", ["right", "left"])
def test_of_a_pair_that_is_too_long_the_document_is_cut(reranker: LiveServer, judging: Tokenizer, side: str) -> None:
    reranker.post("/v1/rerank", query="Which?", documents=["a"])
    short = reranker.engine.requests[0].prompt_token_ids
    before, after = judging.decode(short, skip_special_tokens=False).split("<Document>: a")
    body = {"query": "Which?", "documents": [LONG, "a"], "truncation_side": side}
    most = len(short) + 40
    answer = reranker.post("/v1/rerank", **body, truncate_prompt_tokens=most).json()
    assert {each["document"]["text"] for each in answer["results"]} == {LONG, "a"}  # as they were given
    ids, other = (one.prompt_token_ids for one in reranker.engine.requests[1:])
    assert most - 4 <= len(ids) <= most and other == short
    text = judging.decode(ids, skip_special_tokens=False)
    assert text.startswith(before) and text.endswith(after)
    kept = text.removeprefix(f"{before}<Document>: ").removesuffix(after)
    assert len(kept) > 10 and (LONG.startswith(kept) if side == "right" else LONG.endswith(kept))
    error = reranker.post("/v1/rerank", **body, truncate_prompt_tokens=30).json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "no room for a document" in error["message"]


def test_an_instruction_is_part_of_the_prompt(reranker: LiveServer, judging: Tokenizer) -> None:
    body = {"query": "q", "documents": ["d"], "instruction": "Find rhymes", "return_documents": False}
    answer = reranker.post("/v2/rerank", **body).json()
    assert answer["results"][0].keys() == {"index", "relevance_score"}
    (request,) = reranker.engine.requests
    assert "<Instruct>: Find rhymes\n" in judging.decode(request.prompt_token_ids)
    assert reranker.post("/v1/score", text_1="q", text_2="d", instruction="x").status_code == 200


def test_a_model_without_output_layer_generates_nothing(server: LiveServer, engine: FakeEngine) -> None:
    assert engine.ready is not None
    engine.ready.generates = False
    error = server.post("/v1/completions", prompt="a").json()["error"]
    assert "no output layer; it gives embeddings only" in error["message"]
    assert server.post("/v1/embeddings", input="a").status_code == 200


def test_files_of_requests_may_ask_for_embeddings(model_folder: Path, tmp_path: Path) -> None:
    paths = {"embeddings": {"input": "Hello"}, "score": {"text_1": "a", "text_2": "b"}}
    paths["rerank"] = {"query": "a", "documents": ["b"]}
    rows = [{"custom_id": name, "method": "POST", "url": f"/v1/{name}", "body": body} for name, body in paths.items()]
    output = tmp_path / "out.jsonl"
    code, out, errors = Command(write(tmp_path / "in.jsonl", *rows), "-o", output, "--model", model_folder).end()
    assert code == 0 and "3 answered" in out, errors
    answers = {each["custom_id"]: each["response"]["body"] for each in read(output)}
    assert len(answers["embeddings"]["data"][0]["embedding"]) == WIDTH
    assert answers["score"]["data"][0]["object"] == "score" and answers["rerank"]["results"][0]["index"] == 0


def test_quotas_are_charged_the_tokens_of_prompts(
    start_server: Callable[..., LiveServer], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from headway.config_files.tenants import read_tenant_file

    path = tmp_path / "tenants.toml"
    path.write_text('[[tenant]]\nname = "default"\ntokens_per_minute = 1000\n')
    server = start_server(tenants=read_tenant_file(str(path)))
    answer = server.post("/v1/embeddings", input=TEXTS)
    used = answer.json()["usage"]["total_tokens"]
    left = int(server.post("/v1/embeddings", input="a").headers["x-ratelimit-remaining-tokens"])
    assert 1000 - used - 8 <= left <= 1000 - used
