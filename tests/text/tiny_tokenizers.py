"""Small tokenizers trained on the spot, in the two styles that checkpoints use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a small house by the sea.",
    "She said: 'It is not the time that matters, but what you do with it.' And so they went on, and on.",
    "日本語の文章もあります。東京は大きな都市です。今日はいい天気ですね。",
    "你好,世界!这是一个小小的分词器。我们喜欢数学和音乐。",
    "Emoji: 😀😃🎉👩‍👩‍👧‍👦🇳🇱 ça va? naïve café — “quotes” … ½ ∑∞",
    "def main():\n    return {'a': 1, \"b\": [2, 3]}\n\n\tprint(main())",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(vocab_size: int = 500) -> Tokenizer:
    """A tokenizer like those of GPT-2, Llama 3 and Qwen: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("[[plain]]", special=False), AddedToken("日本", special=False)])
    return tokenizer


def sentencepiece_style(vocab_size: int = 560) -> Tokenizer:
    """A tokenizer like Llama 2's and Mistral's: words begin with a mark for a space, unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Write a folder as a checkpoint has it, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config})
    )
    return folder


def save_chat_model(folder: Path, **generation_config: Any) -> Path:
    """A folder with a byte-level tokenizer, a chat template and a model config with room above the tokenizer's ids."""
    tokenizer = byte_level()
    save(folder, tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=TEMPLATE)
    config = {"vocab_size": tokenizer.get_vocab_size() + 10, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2], **generation_config}))
    return folder
