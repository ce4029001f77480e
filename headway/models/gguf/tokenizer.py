"""The tokenizer of a GGUF file as the files of a Hugging Face folder: tokenizer.json and its companions. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headway.cost.values import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens; other than unused ones and bytes
_SPACE = "\u2581"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """Letters with what stands before them, some digits, punctuation, spaces."""
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Digits in threes, then Chinese characters and kana, then words.
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)
# Lines, letters that have cases, signs, spaces at the end, Chinese, Japanese and Korean, digits.
_SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", _SIGNS, r"\s+$", _IDEOGRAPHS, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")
# Chinese characters by themselves, then words as O200K has them.
_NO_HAN = "&&[^\\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = (f"{each[:-1]}{_NO_HAN}" for each in (_UPPER, _LOWER))
_KIMI_K2 = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENDINGS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENDINGS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
# Vocabularies in which a word that is a token is taken as it is, and a text begins with BOS unless the file says
# otherwise.
_WHOLE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2")
_LLAMA3, _QWEN2, _SINGLE_DIGITS = (_words(r"\p{N}{1,3}"),), (_words(r"\p{N}"),), (r"\p{N}", _GPT2)
# Expressions that cut a text before its bytes are merged, applied in this order, by llama.cpp's names.
_CUTS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "default": _DEFAULT,
    **dict.fromkeys((*_WHOLE_LLAMA3, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open", "grok-2"), _QWEN2),
    "qwen35": (_QWEN35,),
    "seed-coder": (_SEED,),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("gpt2", "olmo", "mpt", "phi-2", "jais", "gigachat", "trillion", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "o200k", "minimax-m2"), (_O200K,)),
    "kimi-k2": (_KIMI_K2,),
    "tekken": (_TEKKEN,),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
}
_NORMALIZED = ("qwen2", "qwen35", "deepseek-r1-qwen")  # to NFC, as their Hugging Face tokenizers do
_WHOLE_WORDS = (*_WHOLE_LLAMA3, "tekken")


def tokenizer_files(values: dict[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """tokenizer.json, tokenizer_config.json and generation_config.json, of the keys and values of a GGUF file.

    Raises:
        ModelError: there is no tokenizer, or one of a kind that is not supported; `source` is the file it names.
    """
    kind, tokens = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ModelError(
            f"{source}: tokenizer.ggml.model is {kind!r}, which is not supported; only gpt2, llama and gemma4 are"
        )
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelError(f"{source}: tokenizer.ggml.tokens is not a list of tokens; use a file with its tokenizer")
    types = values.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.token_type is not one for each of {len(tokens):,} tokens")
    described = (
        _byte_level(values, tokens, source) if kind == "gpt2" else _sentence_pieces(values, tokens, types, source)
    )
    described["added_tokens"] = [
        _added(number, token, is_special=each in (_UNKNOWN, _CONTROL))
        for number, (token, each) in enumerate(zip(tokens, types, strict=True))
        if each in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    begins = kind != "gpt2" or values.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    config: dict[str, Any] = {"add_bos_token": bool(values.get("tokenizer.ggml.add_bos_token", begins))}
    if values.get("tokenizer.ggml.add_eos_token") is True:
        config["add_eos_token"] = True
    for name in ("bos", "eos", "unknown", "padding"):
        number = _token_id(values, name, tokens, source)
        if number is not None:
            config[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = tokens[number]
    if isinstance(values.get("tokenizer.chat_template"), str):
        config["chat_template"] = values["tokenizer.chat_template"]
    ends = {_token_id(values, name, tokens, source) for name in ("eos", "eot", "eom")} - {None}
    generation = {"eos_token_id": sorted(number for number in ends if number is not None)}
    return {"tokenizer.json": described, "tokenizer_config.json": config, "generation_config.json": generation}


def _token_id(values: dict[str, Any], name: str, tokens: list[str], source: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    number = values.get(key)
    if number is None or (name not in ("bos", "eos") and number in (-1, 0xFFFFFFFF)):
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ModelError(f"{source}: {key} is {number!r}, but there are {len(tokens):,} tokens")
    return number


def _added(number: int, content: str, is_special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **plain, "special": is_special}


def _tokenizer(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **nothing, **parts, "model": {"type": "BPE", **model}}


def _byte_level(values: dict[str, Any], tokens: list[str], source: str) -> dict[str, Any]:
    """BPE over bytes, each written as a printable character."""
    name = values.get("tokenizer.ggml.pre", "default")
    if name not in _CUTS:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre is {name!r}, which is not supported; use the safetensors checkpoint"
        )
    merges = _stated_merges(values, source)
    cuts = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in _CUTS[name]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
        "ignore_merges": name in _WHOLE_WORDS,
    }
    return _tokenizer(
        model,
        normalizer={"type": "NFC"} if name in _NORMALIZED else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        decoder=byte_level,
    )


def _stated_merges(values: dict[str, Any], source: str) -> list[list[str]]:
    merges = values.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(each, str) and " " in each for each in merges):
        raise ModelError(f"{source}: tokenizer.ggml.merges is not a list of merges; use a file with its tokenizer")
    return [each.split(" ", 1) for each in merges]


def _sentence_pieces(values: dict[str, Any], tokens: list[str], types: list[int], source: str) -> dict[str, Any]:
    """SentencePiece's BPE: pieces are merged whose whole has the best score; what is left are bytes.

    Gemma 4's has its merges in the file.
    """
    vocab = {token: number for number, token in enumerate(tokens)}
    if values.get("tokenizer.ggml.model") == "gemma4":
        merges = _stated_merges(values, source)
    else:
        scores = values.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise ModelError(f"{source}: tokenizer.ggml.scores is not one for each of {len(tokens):,} tokens")
        pieces = [piece for piece, each in zip(tokens, types, strict=True) if each == _NORMAL]
        merges = list(_merges(vocab, scores, pieces))
    prefixed = values.get("tokenizer.ggml.add_space_prefix", True)
    unknown = next((token for token, each in zip(tokens, types, strict=True) if each == _UNKNOWN), None)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, spaces] if prefixed else [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {"vocab": vocab, "merges": merges, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return _tokenizer(
        model,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _merges(vocab: dict[str, int], scores: list[float], pieces: list[str]) -> Iterator[list[str]]:
    """Every way to put a piece together of two, the best pieces first."""
    for piece in sorted(pieces, key=lambda each: (-scores[vocab[each]], vocab[each])):
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
        yield from (list(cut) for cut in sorted(known, key=lambda cut: (vocab[cut[0]], vocab[cut[1]])))
