"""Parts of a text have the ids of the whole, whatever the tokenizer and the text."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headway.text.known_texts import ENTRY_CHARS, KnownTexts, safe_cuts
from tests.text.tiny_tokenizers import CORPUS, SPECIAL, byte_level, sentencepiece_style

MARKS = ["<|start|>", "<|end|>", "[INST]", "[/INST]", "<s>", "</s>"]
TEMPLATE = " ".join([*MARKS, *SPECIAL])


def added(tokenizer: Tokenizer, **options: Any) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False, **options) for mark in MARKS])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "never")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def prefix_space() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def split_as_gpt_4() -> Tokenizer:
    tokenizer = byte_level()
    pattern = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    from tokenizers import Regex

    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    special = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=250, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_company() -> Tokenizer:
    """Beside the marks there are tokens that are normalised, that take blanks along, and that look like marks."""
    tokenizer = added(split_as_gpt_4())
    tokenizer.add_tokens(
        [
            AddedToken("ST", normalized=True),
            AddedToken("<|en", normalized=True),
            AddedToken("< r >", rstrip=True, normalized=False),
            AddedToken("<l>", lstrip=True, normalized=False),
            AddedToken("<tool", normalized=False),
        ]
    )
    return tokenizer


MAKERS = {
    "byte level": lambda: added(byte_level()),
    "byte level with a space before": lambda: added(prefix_space()),
    "as GPT-4, with NFC": lambda: added(split_as_gpt_4()),
    "as Llama 2": lambda: added(sentencepiece_style()),
    "Metaspace, first": lambda: added(metaspace("first")),
    "Metaspace, always": lambda: added(metaspace("always")),
    "Metaspace, never": lambda: added(metaspace("never")),
    "word pieces, lower case": lambda: added(word_piece()),
    "Unigram, stripped": lambda: added(unigram()),
    "marks that take blanks after them": lambda: added(byte_level(), rstrip=True),
    "other tokens": with_company,
}


@functools.cache
def made(name: str) -> Tokenizer:
    return MAKERS[name]()


FRAGMENTS = st.sampled_from(
    [*MARKS, *SPECIAL, "<|", "|>", "<|st", "art|>", "ST", "<tool", "< r >", "<l>", "<", "[", "s>", "[[plain]]", "日本"]
    + [
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "e\u0301",
        "\u0301",
        "ﬁ",
        "½",
        "İ",
        "Once upon",
        " a time",
        "'s",
        "1234",
        "x",
        "😀",
    ]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=4)), max_size=20).map("".join)


@pytest.mark.parametrize("name", MAKERS)
@given(text=TEXTS)
def test_ids_of_parts_are_those_of_the_whole(name: str, text: str) -> None:
    tokenizer = made(name)
    cuts = safe_cuts(tokenizer, TEMPLATE)
    assert cuts is not None
    parts = KnownTexts(cuts, 1000).parts(text)
    assert "".join(parts) == text
    ids = [token_id for part in parts for token_id in tokenizer.encode(part, add_special_tokens=False).ids]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_where_is_cut() -> None:
    known = KnownTexts(safe_cuts(made("byte level"), TEMPLATE), 1000)
    parts = ["a", "<|im_start|>b", "<|im_end|>\n", "<|im_start|>"]
    assert known.parts("".join(parts)) == parts
    assert known.parts("<s>") == ["<s>"] and known.parts("") == [""]
    assert KnownTexts(None, 1000).parts("a<s>b") == ["a<s>b"]
    assert safe_cuts(made("byte level"), "no token of it") is None


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<s>", lstrip=True, normalized=False),
        AddedToken("<s>", normalized=True),
        AddedToken(" <s>", normalized=False),
        AddedToken("word", single_word=True),
    ],
    ids=str,
)
def test_tokens_that_depend_on_their_neighbours_are_no_cuts(token: AddedToken) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([token])
    assert safe_cuts(tokenizer, "<s> word") is None


@pytest.mark.parametrize("other", ["<s>>", "a<s>", "a<", "xx<s>yy"])
def test_tokens_that_others_overlap_are_no_cuts(other: str) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in ("<s>", other)])
    assert safe_cuts(tokenizer, "<s>") is None


def test_a_model_that_draws_has_no_ids_to_keep() -> None:
    tokenizer = added(byte_level())
    tokenizer.model.dropout = 0.5  # type: ignore[attr-defined]
    assert safe_cuts(tokenizer, TEMPLATE) is None


def test_what_is_not_used_is_forgotten_first() -> None:
    known = KnownTexts(safe_cuts(made("byte level"), TEMPLATE), 3 * (ENTRY_CHARS + 4))
    for part in ("<s>a", "<s>b", "<s>c"):
        known.keep(part, "", [1, 2])
    assert list(known.find("<s>a", "") or []) == [1, 2]
    assert known.find("<s>a", "salt") is None
    known.keep("<s>d", "", [3])
    assert known.find("<s>b", "") is None
    assert known.find("<s>a", "") is not None and known.find("<s>d", "") is not None
    assert known.size == 3 * (ENTRY_CHARS + 4)
    known.keep("x" * 1000, "", [1])
    assert known.find("x" * 1000, "") is None
    assert (known.queries, known.hits) == (4 * 5 + 1000, 4 * 3)
