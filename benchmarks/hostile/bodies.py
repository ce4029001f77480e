"""Bodies that are large, deep or odd: of the memory, the event loop and JSON itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from benchmarks.hostile.client import Talk
from benchmarks.hostile.messages import CHAT, COMPLETIONS, HELLO, PLAIN, Attack, chat, keyed, listed, nested, post

# --- a body, whole and in one piece -----------------------------------------------------------------------

_INDENTED_LIST = nested(150, ",".join(["1"] * 45_000))  # 0.1 MB
_LARGER_LIST = nested(150, ",".join(["1"] * 200_000))  # 0.4 MB


def _bodies() -> Iterator[tuple[str, str, str, Callable[[], str], str]]:
    """Group, name, path, body, server: what is refused with 400, 404, 413 or 422."""
    memory = "memory"
    yield (
        memory,
        "0.1 MB nested under tojson(indent=4)",
        CHAT,
        lambda: chat(f',"chat_template_kwargs":{{"tools":{_INDENTED_LIST}}}'),
        "indented",
    )
    yield (
        memory,
        "0.4 MB nested under tojson(indent=4)",
        CHAT,
        lambda: chat(f',"chat_template_kwargs":{{"tools":{_LARGER_LIST}}}'),
        "indented",
    )
    yield (
        memory,
        "tools inside of chat_template_kwargs",
        CHAT,
        lambda: chat(',"chat_template_kwargs":{"tools":[{"type":"function"}]}'),
        "indented",
    )
    text = "the cat sat on a mat "
    yield memory, "8 MB of prompt", COMPLETIONS, lambda: json.dumps({"prompt": text * 390_000}), PLAIN
    yield memory, "8 MB in one message", CHAT, lambda: chat("", json.dumps(text * 390_000)), PLAIN
    yield memory, "8 MB of one letter", COMPLETIONS, lambda: json.dumps({"prompt": "a" * 8_300_000}), PLAIN
    yield memory, "8 MB of spaces", COMPLETIONS, lambda: json.dumps({"prompt": " " * 8_300_000}), PLAIN
    yield memory, "8 MB of emoji", COMPLETIONS, lambda: '{"prompt":"' + "😀" * 2_050_000 + '"}', PLAIN
    yield memory, "8 MB of combining marks", COMPLETIONS, lambda: '{"prompt":"' + "a\u0301" * 2_700_000 + '"}', PLAIN
    yield memory, "8 MB of NUL", COMPLETIONS, lambda: '{"prompt":"' + "\\u0000" * 1_380_000 + '"}', PLAIN
    yield (
        memory,
        "8 MB of special tokens' texts",
        COMPLETIONS,
        lambda: '{"prompt":"' + "<|im_start|>" * 690_000 + '"}',
        PLAIN,
    )
    yield (
        memory,
        "8 MB to be cut by truncate_prompt_tokens",
        COMPLETIONS,
        lambda: json.dumps({"prompt": text * 390_000, "truncate_prompt_tokens": 5, "max_tokens": 1}),
        PLAIN,
    )
    loop = "event loop"
    yield loop, "600,000 unknown fields", COMPLETIONS, lambda: f'{{"prompt":"a",{keyed(600_000)}}}', PLAIN
    yield loop, "a field name of 8 MB", COMPLETIONS, lambda: f'{{"prompt":"a","{"x" * 8_300_000}":1}}', PLAIN
    yield loop, "two million lists of one id", COMPLETIONS, lambda: f'{{"prompt":{listed("[1]")}}}', PLAIN
    yield loop, "two million empty strings", COMPLETIONS, lambda: f'{{"prompt":{listed(json.dumps(""))}}}', PLAIN
    yield loop, "four million ids", COMPLETIONS, lambda: f'{{"prompt":{listed("1")}}}', PLAIN
    yield loop, "ids, the last a string", COMPLETIONS, lambda: f'{{"prompt":{listed("1")[:-1]},"a"]}}', PLAIN
    yield loop, "a million half numbers", COMPLETIONS, lambda: f'{{"prompt":{listed("1.5")}}}', PLAIN
    yield (
        loop,
        "1,500 prompts, 8 choices each",
        COMPLETIONS,
        lambda: json.dumps({"prompt": ["a"] * 1500, "n": 8, "max_tokens": 1}),
        PLAIN,
    )
    yield loop, "20,000 prompts", COMPLETIONS, lambda: json.dumps({"prompt": ["a"] * 20_000, "max_tokens": 1}), PLAIN
    yield loop, "/tokenize: two million strings", "/tokenize", lambda: f'{{"prompt":{listed(json.dumps("a"))}}}', PLAIN
    yield loop, "/tokenize: 8 MB", "/tokenize", lambda: json.dumps({"prompt": text * 390_000}), PLAIN
    yield loop, "/detokenize: four million ids", "/detokenize", lambda: f'{{"tokens":{listed("1")}}}', PLAIN
    yield (
        loop,
        "chat_template_kwargs of 8 MB",
        CHAT,
        lambda: chat(f',"chat_template_kwargs":{{"a":{listed("1")}}}'),
        PLAIN,
    )
    yield (
        loop,
        "600,000 chat_template_kwargs",
        CHAT,
        lambda: chat(f',"chat_template_kwargs":{{{keyed(600_000)}}}'),
        PLAIN,
    )
    yield (
        loop,
        "260,000 messages",
        CHAT,
        lambda: '{"messages":' + listed('{"role":"user","content":""}') + ',"max_tokens":1}',
        PLAIN,
    )
    yield loop, "two million content parts", CHAT, lambda: chat("", listed("{}")), PLAIN
    yield (
        loop,
        "a message with 600,000 fields",
        CHAT,
        lambda: f'{{"messages":[{{"role":"user","content":"a",{keyed(600_000)}}}]}}',
        PLAIN,
    )
    yield (
        loop,
        "logit_bias with 600,000 entries",
        COMPLETIONS,
        lambda: f'{{"prompt":"a","max_tokens":1,"logit_bias":{{{keyed(600_000)}}}}}',
        PLAIN,
    )
    yield (
        loop,
        "two million stop strings",
        COMPLETIONS,
        lambda: f'{{"prompt":"a","stop":{listed(json.dumps("a"))}}}',
        PLAIN,
    )
    yield (
        loop,
        "a stop string of 8 MB",
        COMPLETIONS,
        lambda: json.dumps({"prompt": "a", "stop": "a" * 8_300_000}),
        PLAIN,
    )
    yield (
        loop,
        "four million stop_token_ids",
        COMPLETIONS,
        lambda: f'{{"prompt":"a","stop_token_ids":{listed("1")}}}',
        PLAIN,
    )
    yield (
        loop,
        "two million inputs of /v1/embeddings",
        "/v1/embeddings",
        lambda: f'{{"input":{listed(json.dumps("a"))}}}',
        PLAIN,
    )
    yield (
        loop,
        "two million documents to /v1/score",
        "/v1/score",
        lambda: f'{{"text_1":"a","text_2":{listed(json.dumps("a"))}}}',
        PLAIN,
    )
    yield (
        loop,
        "two million documents to /v1/rerank",
        "/v1/rerank",
        lambda: f'{{"query":"a","documents":{listed(json.dumps("a"))}}}',
        PLAIN,
    )
    yield (
        loop,
        "400,000 document objects to /v1/rerank",
        "/v1/rerank",
        lambda: f'{{"query":"a","documents":{listed(json.dumps({"text": "a"}))}}}',
        PLAIN,
    )
    yield (
        loop,
        "a model name of 8 MB",
        COMPLETIONS,
        lambda: json.dumps({"prompt": "a", "model": "m" * 8_300_000}),
        PLAIN,
    )
    yield loop, "a user name of 8 MB", COMPLETIONS, lambda: json.dumps({**HELLO, "user": "u" * 8_300_000}), PLAIN
    yield (
        loop,
        "stream_options with 600,000 fields",
        COMPLETIONS,
        lambda: f'{{"prompt":"a","stream":true,"stream_options":{{{keyed(600_000)}}}}}',
        PLAIN,
    )
    yield loop, "response_format of 8 MB", CHAT, lambda: chat(f',"response_format":{listed("1")}'), PLAIN
    yield (
        loop,
        "a batch's metadata of 8 MB",
        "/v1/batches",
        lambda: f'{{"metadata":{{{keyed(600_000, json.dumps("a"))}}}}}',
        PLAIN,
    )
    values = "JSON"
    yield values, "a million levels", COMPLETIONS, lambda: f'{{"prompt":{nested(1_000_000)}}}', PLAIN
    yield values, "four million levels, open", COMPLETIONS, lambda: '{"prompt":' + "[" * 4_000_000, PLAIN
    yield values, "a million levels of objects", COMPLETIONS, lambda: '{"a":' * 1_000_000, PLAIN
    yield values, "600,000 times the same key", COMPLETIONS, lambda: "{" + '"promptx":"a",' * 590_000 + '"n":1}', PLAIN
    yield values, "8 MB of white space", COMPLETIONS, lambda: " " * 8_300_000, PLAIN
    yield values, "a number of 8 MB", COMPLETIONS, lambda: f'{{"prompt":"a","max_tokens":{"9" * 8_300_000}}}', PLAIN
    yield (
        values,
        "a fraction of 8 MB",
        COMPLETIONS,
        lambda: f'{{"prompt":"a","temperature":0.{"9" * 8_300_000}}}',
        PLAIN,
    )
    yield values, "ids of 4,000 digits", COMPLETIONS, lambda: f'{{"prompt":[{"9" * 4000}]}}', PLAIN
    yield values, "1e999", COMPLETIONS, lambda: '{"prompt":"a","temperature":1e999}', PLAIN
    yield values, "NaN", COMPLETIONS, lambda: '{"prompt":"a","temperature":NaN}', PLAIN
    yield values, "half a surrogate pair", COMPLETIONS, lambda: '{"prompt":"\\ud800"}', PLAIN
    yield values, "raw surrogates", COMPLETIONS, lambda: '{"prompt":"\ud800"}', PLAIN
    yield values, "a body of UTF-16", COMPLETIONS, lambda: '\x00{\x00"\x00a', PLAIN
    yield values, "seeds beyond 64 bits", COMPLETIONS, lambda: '{"prompt":"a","seed":18446744073709551617}', PLAIN


def _whole(path: str, body: Callable[[], str]) -> Callable[[], list[Talk]]:
    return lambda: [Talk([post(path, body())])]


_REFUSED = frozenset({400, 404, 413, 422, 429})
# Nothing is wrong with these: they are only large, and may also be served.
_SERVED = {
    "1,500 prompts, 8 choices each",
    "20,000 prompts",
    "/tokenize: 8 MB",
    "/detokenize: four million ids",
    "8 MB to be cut by truncate_prompt_tokens",
    "a user name of 8 MB",
    "chat_template_kwargs of 8 MB",
    "600,000 chat_template_kwargs",
}
_SHORT = {
    "0.1 MB nested under tojson(indent=4)",
    "a field name of 8 MB",
    "two million lists of one id",
    "260,000 messages",
    "a million levels",
}


def of_bodies() -> Iterator[Attack]:
    for group, name, path, body, server in _bodies():
        expect = _REFUSED | ({200} if name in _SERVED else set())
        yield Attack(name, group, expect, _whole(path, body), 15.0, server, short=name in _SHORT and server == PLAIN)
