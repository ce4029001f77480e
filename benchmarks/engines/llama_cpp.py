"""llama.cpp, driven through the C interface that llama-cpp-python binds, as its own batched programs use it.

There is no scheduler in llama.cpp: prompts go in together, up to the step budget, then every sequence gets a token a
step. The next token is the largest logit, found here by numpy; llama.cpp's own greedy sampler takes longer.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from typing import Any

from benchmarks.engines.interface import ISA, STEP_TOKENS, Settings

_MORE_THAN_AVX2 = ("AVX512", "AVX_VNNI", "AMX")
_ROUND_UP = 256  # llama.cpp pads each sequence's part of the cache to it
_AT_ONCE = 2048  # tokens that go through the layers together; no slower than the default of 512, and often faster


class LlamaCpp:
    """See benchmarks.engines.interface.Engine."""

    def __init__(self, settings: Settings) -> None:
        import llama_cpp  # type: ignore[import-not-found]
        import numpy

        self._numpy: Any = numpy
        self._lib: Any = llama_cpp.llama_cpp
        self.version = llama_cpp.__version__
        self._lib.llama_backend_init()
        built_for = self._lib.llama_print_system_info().decode()
        present = [each.strip() for each in built_for.split("|") if each.strip().endswith("= 1")]
        if os.environ.get(ISA) == "avx2" and any(name.startswith(_MORE_THAN_AVX2) for name in present):
            raise RuntimeError(
                f"this llama.cpp is not built for AVX2 alone but for {built_for}; see benchmarks/README.md"
            )
        self._model = self._lib.llama_model_load_from_file(
            settings.model.encode(), self._lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {settings.model}")
        params = self._lib.llama_context_default_params()
        params.n_ctx = settings.sequences * -(-settings.longest // _ROUND_UP) * _ROUND_UP
        params.n_seq_max = settings.sequences
        params.n_batch = STEP_TOKENS
        params.n_ubatch = _AT_ONCE
        params.flash_attn_type = self._lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if settings.kv_bits == 8:
            params.type_k = params.type_v = self._lib.GGML_TYPE_Q8_0
        params.n_threads = params.n_threads_batch = settings.threads
        params.no_perf = True
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context; see above")
        vocabulary = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self._logits_shape = (vocabulary,)
        self._batch = self._lib.llama_batch_init(STEP_TOKENS, 0, 1)
        self._waiting: list[tuple[int, int, int, bool]] = []
        self._texts: list[list[int]] = []
        self._lengths: list[int] = []  # of the prompts
        self._grammars: list[Any] = []  # of each prompt; empty without a schema
        self._candidates = numpy.zeros(vocabulary, [("id", "i4"), ("logit", "f4"), ("p", "f4")])
        self._candidates["id"] = numpy.arange(vocabulary)

    def start(self, prompts: list[list[int]], new_tokens: int, schema: str = "") -> None:
        """See Engine. How many tokens each is to get is the caller's to know: a sequence here has no end."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        for grammar in self._grammars:
            self._lib.llama_sampler_free(grammar)
        self._grammars = [self._grammar(schema) for _ in prompts] if schema else []
        self._texts = [list(prompt) for prompt in prompts]
        self._lengths = [len(prompt) for prompt in prompts]
        self._waiting = [
            (token, place, number, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]

    def step(self) -> list[int]:
        """See Engine. Raises RuntimeError when llama.cpp refuses the batch."""
        if self._waiting:
            rows, self._waiting = self._waiting[:STEP_TOKENS], self._waiting[STEP_TOKENS:]
        else:
            rows = [(text[-1], len(text) - 1, number, True) for number, text in enumerate(self._texts)]
        self.decode(rows)
        for place, (_, _, number, wanted) in enumerate(rows):
            if wanted:
                held = self._grammars[number] if self._grammars else None
                self._texts[number].append(self._allowed(place, held) if held else self.largest(place))
        return self._counts

    @property
    def _counts(self) -> list[int]:
        return [len(text) - length for text, length in zip(self._texts, self._lengths, strict=True)]

    @property
    def said(self) -> list[list[int]]:
        """See Speaking."""
        return [text[length:] for text, length in zip(self._texts, self._lengths, strict=True)]

    def keep(self, number: int, length: int) -> None:
        """Forget what was computed of a sequence behind so many tokens."""
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), number, length, -1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode rows of a token, its position, its sequence, and whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for place, (token, position, number, wanted) in enumerate(rows):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, wanted
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = number
        if code := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code} on {len(rows)} tokens; see above")

    def _grammar(self, schema: str) -> Any:
        from llama_cpp.llama_grammar import json_schema_to_gbnf  # type: ignore[import-not-found]

        vocabulary = self._lib.llama_model_get_vocab(self._model)
        made = self._lib.llama_sampler_init_grammar(vocabulary, json_schema_to_gbnf(schema).encode(), b"root")
        if not made:
            raise RuntimeError("llama.cpp cannot make a grammar; see above")
        return made

    def _allowed(self, place: int, grammar: Any) -> int:
        """The largest logit that a grammar allows. As llama.cpp's server does, the largest is tried before all are."""
        logits = self._lib.llama_get_logits_ith(self._context, place)
        self._candidates["logit"] = self._numpy.ctypeslib.as_array(logits, self._logits_shape)
        token = int(self._candidates["logit"].argmax())
        if self._apply(grammar, self._candidates[token : token + 1].copy())["logit"][0] == -self._numpy.inf:
            token = int(self._apply(grammar, self._candidates)["logit"].argmax())
        self._lib.llama_sampler_accept(grammar, token)
        return token

    def _apply(self, grammar: Any, candidates: Any) -> Any:
        """The candidates, with -inf for those that the grammar does not allow."""
        data = candidates.ctypes.data_as(ctypes.POINTER(self._lib.llama_token_data))
        array = self._lib.llama_token_data_array(data, len(candidates), -1, False)
        self._lib.llama_sampler_apply(grammar, ctypes.byref(array))
        return candidates

    def largest(self, place: int) -> int:
        """The likeliest token behind a row of the last batch."""
        logits = self._lib.llama_get_logits_ith(self._context, place)
        return int(self._numpy.ctypeslib.as_array(logits, self._logits_shape).argmax())


class Speculating(LlamaCpp):
    """llama.cpp with drafts: of a second model, or those that llama-cpp-python's prompt lookup finds.

    The loop is that of llama.cpp's `speculative-simple`, with its default of no least probability of a draft, for all
    sequences at once. It is written here, as llama-cpp-python has no programs, and no draft model of its own.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._most = int(settings.speculative["num_speculative_tokens"])
        self._new, self._known = 0, list[int]()  # tokens of each sequence that the draft model has computed
        self._draft: LlamaCpp | None = None
        if settings.speculative["method"] == "draft_model":
            self._draft = LlamaCpp(replace(settings, model=settings.speculative["model"], speculative={}))
            return
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]

        self._lookup = LlamaPromptLookupDecoding(settings.speculative["prompt_lookup_max"], self._most)

    def start(self, prompts: list[list[int]], new_tokens: int, schema: str = "") -> None:
        """See Engine."""
        super().start(prompts, new_tokens, schema)
        self._new, self._known = new_tokens, [0] * len(prompts)
        if self._draft is not None:
            self._draft.start([], 0)

    def step(self) -> list[int]:
        """See Engine."""
        if self._waiting:
            return super().step()
        texts = self._texts
        left = {number: self._new - count for number, count in enumerate(self._counts) if count < self._new}
        drafts = {number: found[: left[number] - 1] for number, found in self._drafts(list(left)).items()}
        self.decode(
            [
                (token, len(texts[number]) - 1 + at, number, True)
                for number, found in drafts.items()
                for at, token in enumerate([texts[number][-1], *found])
            ]
        )
        first = 0
        for number, found in drafts.items():
            for at, draft in enumerate([*found, -1]):
                texts[number].append(self.largest(first + at))
                if texts[number][-1] != draft:
                    break
            first += len(found) + 1
            self.keep(number, len(texts[number]) - 1)
        return self._counts

    def _drafts(self, numbers: list[int]) -> dict[int, list[int]]:
        """The drafts behind each of these sequences."""
        draft, texts = self._draft, self._texts
        if draft is None:
            looked = (self._lookup(self._numpy.array(texts[number], dtype=self._numpy.intc)) for number in numbers)
            return {number: [int(token) for token in found] for number, found in zip(numbers, looked, strict=True)}
        made: dict[int, list[int]] = {number: [] for number in numbers}
        for number in numbers:  # what it has computed of drafts that were refused
            self._known[number] = min(self._known[number], len(texts[number]) - 1)
            draft.keep(number, self._known[number])
        for _ in range(self._most):
            lacking = {number: [*texts[number], *made[number]][self._known[number] :] for number in numbers}
            rows = [
                (token, self._known[number] + at, number, at == len(tokens) - 1)
                for number, tokens in lacking.items()
                for at, token in enumerate(tokens)
            ]
            draft.decode(rows)
            for place, (_, position, number, is_last) in enumerate(rows):
                if is_last:
                    made[number].append(draft.largest(place))
                    self._known[number] = position + 1
        return made
