"""What a checkpoint's files say of embeddings and of scores, and how both are asked for.

sentence-transformers names the modules behind a model in modules.json, each with a config.json of its own. A model
without these files is pooled at its last token. It scores a pair of texts by the logits of "yes" and "no" if it has a
chat template, which is how Qwen3-Reranker does it; otherwise by the cosine of both embeddings.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.outputs.choices import TokenizedPrompt
from headway.policy.step.pooling import PoolingParams
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_files import TextError, read_json

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Qwen3-Reranker was trained with this text.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_KNOWS_PAIRS = re.compile(r"""(?s)(?=.*['"]query['"]).*['"]document['"]""")
# Names of sentence-transformers, older and newer, for what is done here.
_OF_GGUF = {1: "mean", 3: "lasttoken"}
_POOLINGS = {"lasttoken": "last", "mean": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


@dataclass(frozen=True, slots=True)
class Pooler:
    """How a checkpoint's embeddings and scores are made."""

    params: PoolingParams  # the parameters of its embeddings
    lacking: str = ""  # why it gives none, or an empty string
    width: int | None = None  # numbers of an embedding; None where config.json does not say
    dimensions: tuple[int, ...] = ()  # the dimensions to which embeddings may be cut; empty for any
    # Token ids of "relevant" and, if there is one, "not relevant"; None for scores by the cosine.
    judges: tuple[int, ...] | None = None
    end: int | None = None  # id that follows each text, if the tokenizer does not add it already

    @classmethod
    def load(cls, tokenizer: Tokenizer, template: ChatTemplate | None) -> Pooler:
        """Read the files in the tokenizer's folder.

        Raises:
            TextError: a file is damaged; it names the file.
        """
        folder = tokenizer.folder
        config = read_json(folder / "config.json", required=False)
        within, cuts = config.get("text_config"), config.get("matryoshka_dimensions")
        width = (within if isinstance(within, dict) else config).get("hidden_size")
        modules = _modules(folder)
        if not modules and isinstance(of_gguf := config.get("pooling_type"), int):
            modules = {"Pooling": {"pooling_mode": _OF_GGUF.get(of_gguf, f"type {of_gguf}")}, "Normalize": {}}
        params, lacking = _pooling(modules)
        if config.get("is_causal") is False:
            lacking = "config.json has is_causal: false, and attention to later tokens is not supported"
        judges = _judges(modules, config, tokenizer)
        if judges is None and not modules and template is not None:
            judges = _ids_of(("yes", "no"), tokenizer)
        ends = tokenizer.config.get("add_eos_token") is True
        return cls(
            params=params,
            lacking=lacking,
            width=width if isinstance(width, int) else None,
            dimensions=tuple(cuts) if isinstance(cuts, list) and all(isinstance(each, int) for each in cuts) else (),
            judges=judges,
            end=tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", "")) if ends else None,
        )

    # --- embeddings ---------------------------------------------------------------------------------

    def embedding(self, dimensions: int | None = None) -> PoolingParams:
        """How an embedding of so many dimensions is made.

        Raises:
            ValueError: this checkpoint has none; one line that says why.
        """
        if self.lacking:
            raise ValueError(f"this model gives no embeddings: {self.lacking}")
        if dimensions is None:
            return self.params
        if self.dimensions and dimensions not in self.dimensions:
            raise ValueError(f"dimensions is {dimensions}; this model has {', '.join(map(str, self.dimensions))}")
        if dimensions < 1 or (self.width is not None and dimensions > self.width):
            most = "" if self.width is None else f" and at most {self.width}"
            raise ValueError(f"dimensions is {dimensions}; it must be at least 1{most}")
        return PoolingParams(self.params.pooling, self.params.normalize, dimensions)

    def ended(self, prompt: TokenizedPrompt) -> TokenizedPrompt:
        """The prompt of a text with the token that ends it, which is pooled."""
        if self.end is not None and prompt.token_ids[-1:] != [self.end]:
            return TokenizedPrompt([*prompt.token_ids, self.end], prompt.text)
        return prompt

    # --- scores -------------------------------------------------------------------------------------

    @property
    def judgement(self) -> PoolingParams:
        """How a pair is judged that is one prompt. Only for a model with `judges`."""
        return PoolingParams(token_ids=self.judges or ())


def floats(vector: bytes) -> list[float]:
    """The numbers of a vector."""
    return list(array("f", vector))


def relevance(logits: Sequence[float]) -> float:
    """The probability of "relevant" against "not relevant", from the logits of `judges`."""
    odds = logits[0] - (logits[1] if len(logits) > 1 else 0.0)
    return 1.0 / (1.0 + math.exp(-odds)) if odds > -700.0 else 0.0


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 if one of them has no length."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def pairs(queries: list[str], documents: list[str]) -> list[tuple[int, int]]:
    """Which query belongs to which document, by their numbers: one query to all documents, or each to its own.

    Raises:
        ValueError: there are no such pairs; one line that says why.
    """
    if not queries or not documents:
        raise ValueError("there is no text on one side; give at least one query and one document")
    if len(queries) not in (1, len(documents)):
        raise ValueError(
            f"there are {len(queries)} queries and {len(documents)} documents; give one query, or one for each document"
        )
    return [(number if len(queries) > 1 else 0, number) for number in range(len(documents))]


def judged_messages(
    template: ChatTemplate, query: str, document: str, instruction: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables of the prompt in which a model judges a pair, by its chat template.

    A template for reranking has the roles query, document and, for the instruction, system. Another one gets the words
    that Qwen3-Reranker knows.
    """
    if _KNOWS_PAIRS.match(template.source):
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return ([{"role": "system", "content": instruction}] if instruction else []) + messages, {}
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]
    return messages, {"enable_thinking": False}


# --- the files --------------------------------------------------------------------------------------


def _modules(folder: Path) -> dict[str, dict[str, Any]]:
    """sentence-transformers' modules by the last part of their types, each with its config.json; empty without any."""
    path = folder / "modules.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    except (OSError, ValueError) as error:
        raise TextError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(listed, list):
        raise TextError(f"{path} holds a {type(listed).__name__}; a JSON array is needed")
    if not listed:
        pooling = read_json(folder / "1_Pooling" / "config.json", required=False)
        return {"Pooling": pooling, "Normalize": {}} if pooling else {}
    modules = {}
    for each in listed:
        name, of = (each.get("type"), each.get("path")) if isinstance(each, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(of, str) or ".." in of or of.startswith("/"):
            raise TextError(f"{path}: a module has no type, or no path within the folder")
        modules[name.rpartition(".")[2]] = read_json(folder / of / "config.json", required=False) if of else {}
    return modules


def _pooling(modules: dict[str, dict[str, Any]]) -> tuple[PoolingParams, str]:
    """How states are pooled, and why they can't be, or an empty string."""
    unknown = modules.keys() - {"Transformer", "Pooling", "Normalize", "LogitScore"}
    if unknown:
        return PoolingParams(), f"modules.json has {' and '.join(sorted(unknown))}, which is not supported"
    config = modules.get("Pooling")
    if config is None:
        return PoolingParams(), ""
    stated = config.get("pooling_mode")
    modes = stated if isinstance(stated, list) else [stated] if stated is not None else []
    modes = modes or [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    known = [_POOLINGS[mode] for mode in modes if mode in _POOLINGS]
    if len(known) != 1 or len(modes) != 1:
        return (
            PoolingParams(),
            f"it pools by {' and '.join(map(str, modes)) or 'nothing'}; only last and mean are known",
        )
    if config.get("include_prompt") is False and known == ["mean"]:
        return PoolingParams(), "it leaves the instruction out of the mean, which is not supported"
    return PoolingParams(known[0], "Normalize" in modules), ""


def _judges(modules: dict[str, dict[str, Any]], config: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The tokens by which a reranker judges, as sentence-transformers or vLLM name them."""
    score = modules.get("LogitScore")
    if score is not None:
        found = [score.get(key) for key in ("true_token_id", "false_token_id")]
        return tuple(each for each in found if isinstance(each, int)) or None
    words = config.get("classifier_from_token")
    if isinstance(words, list) and len(words) == 2 and all(isinstance(word, str) for word in words):
        return _ids_of((words[1], words[0]), tokenizer)
    return None


def _ids_of(words: tuple[str, str], tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The ids of both words; None unless each is one token."""
    ids = [tokenizer.encode_here(word, add_special_tokens=False) for word in words]
    return tuple(each[0] for each in ids) if all(len(each) == 1 for each in ids) else None
