"""What checkpoints' files say of embeddings and scores."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headway.outputs.choices import TokenizedPrompt
from headway.outputs.pooling import Pooler, cosine, judged_messages, pairs, relevance
from headway.policy.step.pooling import PoolingParams
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError
from tests.text.tiny_tokenizers import save_chat_model

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."


def written(folder: Path, modules: dict[str, Any] | None = None, **config: Any) -> Tokenizer:
    """A folder with these modules, each with its config.json, and further keys of the model's config.json."""
    save_chat_model(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 64} | config))
    listed = []
    for number, (kind, said) in enumerate((modules or {}).items()):
        at = "" if said is None else f"{number}_{kind.rpartition('.')[2]}"
        listed.append({"idx": number, "name": str(number), "path": at, "type": kind})
        if said is not None:
            (folder / at).mkdir()
            (folder / at / "config.json").write_text(json.dumps(said))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(listed))
    return Tokenizer.load(folder)


def load(folder: Path, modules: dict[str, Any] | None = None, **config: Any) -> Pooler:
    tokenizer = written(folder, modules, **config)
    return Pooler.load(tokenizer, ChatTemplate.load(tokenizer))


@pytest.mark.parametrize(
    ("modules", "pooling", "normalize"),
    [
        (
            {f"{OLD}Transformer": None, f"{OLD}Pooling": {"pooling_mode_lasttoken": True}, f"{OLD}Normalize": {}},
            "last",
            True,
        ),
        ({f"{OLD}Pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}}, "mean", False),
        ({f"{NEW}pooling.Pooling": {"pooling_mode": "mean"}, f"{NEW}normalize.Normalize": {}}, "mean", True),
        ({f"{NEW}pooling.Pooling": {"pooling_mode": ["lasttoken"]}}, "last", False),
        (None, "last", True),
    ],
)
def test_pooling_is_that_of_sentence_transformers(
    tmp_path: Path, modules: dict[str, Any] | None, pooling: str, normalize: bool
) -> None:
    assert load(tmp_path, modules).embedding() == PoolingParams(pooling, normalize)


def test_the_folder_of_a_pooling_suffices(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir(parents=True)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert load(tmp_path).embedding() == PoolingParams("mean", True)


def test_gguf_names_the_kind_of_pooling_by_a_number(tmp_path: Path) -> None:
    assert load(tmp_path / "mean", pooling_type=1).params.pooling == "mean"
    assert load(tmp_path / "last", pooling_type=3).params.pooling == "last"
    with pytest.raises(ValueError, match="it pools by type 2; only last and mean are known"):
        load(tmp_path / "first", pooling_type=2).embedding()


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        ({f"{OLD}Pooling": {"pooling_mode_cls_token": True}}, {}, "it pools by pooling_mode_cls_token; only last"),
        ({f"{OLD}Pooling": {}}, {}, "it pools by nothing"),
        ({f"{OLD}Pooling": {"pooling_mode": ["mean", "max"]}}, {}, "it pools by mean and max"),
        ({f"{OLD}Pooling": {"pooling_mode": "mean"}, f"{OLD}Dense": {}}, {}, "modules.json has Dense, which is not"),
        ({f"{OLD}Pooling": {"pooling_mode": "mean", "include_prompt": False}}, {}, "leaves the instruction out"),
        (None, {"is_causal": False}, "attention to later tokens is not supported"),
    ],
)
def test_what_cannot_be_pooled_is_said_in_one_line(
    tmp_path: Path, modules: dict[str, Any] | None, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="^this model gives no embeddings: .*" + message):
        load(tmp_path, modules, **config).embedding()


@pytest.mark.parametrize("content", ["{", "{}", '[{"type": "a"}]', '[{"type": "a", "path": "../b"}]', "[5]"])
def test_damaged_files_are_named(tmp_path: Path, content: str) -> None:
    tokenizer = written(tmp_path)
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(TextError, match=r"modules\.json"):
        Pooler.load(tokenizer, None)


def test_cuts_are_those_that_a_model_was_trained_for(tmp_path: Path) -> None:
    any_cut = load(tmp_path / "any")
    assert any_cut.embedding(64).dimensions == 64
    with pytest.raises(ValueError, match="dimensions is 65; it must be at least 1 and at most 64"):
        any_cut.embedding(65)
    some = load(tmp_path / "some", matryoshka_dimensions=[16, 32])
    assert some.embedding(32).dimensions == 32
    with pytest.raises(ValueError, match="dimensions is 20; this model has 16, 32"):
        some.embedding(20)


def test_rerankers_name_their_tokens(tmp_path: Path) -> None:
    score = {"sentence_transformers.cross_encoder.modules.logit_score.LogitScore": {"true_token_id": 7}}
    assert load(tmp_path / "one", score).judgement.token_ids == (7,)
    tokenizer = written(tmp_path / "words", classifier_from_token=["n", "y"])
    ids = tuple(tokenizer.encode(word)[0] for word in ("y", "n"))
    assert Pooler.load(tokenizer, None).judges == ids
    assert load(tmp_path / "none").judges is None, "neither yes nor no is one token here"


def test_a_chat_model_judges_by_yes_and_no(tmp_path: Path) -> None:
    tokenizer = written(tmp_path)
    tokenizer.backend.add_tokens(["yes", "no"])
    template = ChatTemplate.load(tokenizer)
    assert Pooler.load(tokenizer, template).judges == tuple(map(tokenizer.backend.token_to_id, ("yes", "no")))
    assert Pooler.load(tokenizer, None).judges is None
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert Pooler.load(tokenizer, template).judges is None, "it is an embedder"


def test_a_text_ends_with_the_token_that_is_pooled(tmp_path: Path) -> None:
    tokenizer = written(tmp_path)
    assert Pooler.load(tokenizer, None).end is None
    tokenizer.config["add_eos_token"] = True
    pooler = Pooler.load(tokenizer, None)
    end = tokenizer.backend.token_to_id("<|im_end|>")
    assert pooler.ended(TokenizedPrompt([5])).token_ids == [5, end]
    assert pooler.ended(TokenizedPrompt([5, end])).token_ids == [5, end]


QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def judged_text(template: ChatTemplate, query: str, document: str, instruction: str | None) -> str:
    messages, variables = judged_messages(template, query, document, instruction)
    return template.render(messages, variables=variables)


def test_the_prompt_of_qwen3_reranker_is_the_published_one() -> None:
    published = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: Where?\n<Document>: There.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert judged_text(ChatTemplate(QWEN3, {}), "Where?", "There.", None) == published


def test_a_template_for_pairs_gets_the_pair() -> None:
    source = (
        "{% for m in messages if m.role == 'system' %}[{{ m.content }}]{% endfor %}"
        "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} - "
        "{{ messages | selectattr('role', 'eq', \"document\") | map(attribute='content') | first }}"
    )
    template = ChatTemplate(source, {})
    assert judged_text(template, "a", "b", None) == "a - b"
    assert judged_text(template, "a", "b", "c") == "[c]a - b"


def test_arithmetic() -> None:
    assert relevance([2.0, 0.5]) == pytest.approx(math.exp(2.0) / (math.exp(2.0) + math.exp(0.5)))
    assert relevance([0.0]) == 0.5 and relevance([-5000.0, 0.0]) == 0.0 and relevance([5000.0, 0.0]) == 1.0
    assert cosine([3.0, 4.0], [4.0, 3.0]) == pytest.approx(0.96) and cosine([0.0], [1.0]) == 0.0
    assert pairs(["q"], ["a", "b"]) == [(0, 0), (0, 1)] and pairs(["p", "q"], ["a", "b"]) == [(0, 0), (1, 1)]
    for queries, documents in (([], ["a"]), (["q"], []), (["p", "q"], ["a", "b", "c"])):
        with pytest.raises(ValueError, match="give"):
            pairs(queries, documents)
