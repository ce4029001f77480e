"""Checkpoint folders without weights: the config of a known shape and a tokenizer that spans its vocabulary.

Engines fill them with random weights (`load_format="dummy"`), which cost the same to compute as trained ones, or read
those that benchmarks.weights writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headway.bundled import STORY

_QWEN2_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

_LLAMA_1B = {
    **_LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
    "tie_word_embeddings": True,
}

_TINY = {
    **_QWEN2_05B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

# Takes in 16,384 tokens in seconds, on two cores.
_QWEN2_30M = {
    **_QWEN2_05B,
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}

_QWEN2_7B = {
    **_QWEN2_05B,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _QWEN2_05B,
    "llama-3.2-1b": _LLAMA_1B,
    "llama-3.1-8b": _LLAMA_8B,
    "qwen2.5-7b": _QWEN2_7B,
    "deepseek-r1-distill-qwen-7b": {**_QWEN2_7B, "rope_theta": 10000.0},
    "qwen2-30m": _QWEN2_30M,
    "story": json.loads((STORY / "config.json").read_text()),  # the bundled model's config
    "tiny": _TINY,
}


def write_checkpoint(shape: str, folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Write config.json, generation_config.json and the tokenizer of `shape` to folder / shape; return that path.

    Args:
        config: of a shape that is not one of SHAPES.

    Raises:
        KeyError: `shape` is not one of SHAPES.
    """
    config = config or SHAPES[shape]
    target = folder / shape
    target.mkdir(parents=True, exist_ok=True)
    vocabulary = int(str(config["vocab_size"]))
    for name, content in (
        ("config", config),
        # Greedy in every server that reads this file, as their defaults differ and sampling costs time.
        ("generation_config", {"bos_token_id": 0, "eos_token_id": 0, "temperature": 0.0}),
        (
            "tokenizer_config",
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "model_max_length": 32768},
        ),
    ):
        (target / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    _byte_tokenizer(vocabulary).save(str(target / "tokenizer.json"))
    return target


def _byte_tokenizer(vocabulary: int) -> Tokenizer:
    """Byte-level, one token for each byte; the other ids decode to words of their own, so that all ids are valid."""
    entries = {"<|end|>": 0}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        entries[symbol] = len(entries)
    while len(entries) < vocabulary:
        entries[f"Ġw{len(entries)}"] = len(entries)
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer
