"""POST /v1/embeddings, /v1/score and /v1/rerank: what a model makes of texts without generating any."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from headway.outputs.choices import TokenizedPrompt
from headway.outputs.pooling import cosine, floats, judged_messages, pairs, relevance
from headway.policy.admission.lengths import check_prompt
from headway.policy.admission.queue_bound import Place
from headway.policy.step.pooling import PoolingParams
from headway.policy.step.sampling_params import InvalidParameter, SamplingParams
from headway.server.api import responses
from headway.server.api.answers import in_one_piece
from headway.server.api.prompts import as_list, completion_prompts, most_tokens, prompt_ids, rendered, truncated
from headway.server.api.schemas import EmbeddingBody, RequestBody, RerankBody, ScoreBody
from headway.server.api.serving import read_unless_full, serve
from headway.server.classes import Terms
from headway.server.edge.connection import ARRIVED
from headway.server.errors import bad_request
from headway.server.generation import Generation, clock
from headway.server.service import Service
from headway.server.timings import Stamps
from headway.text.process import MOST_CHARS

MAX_INPUTS = 2048  # OpenAI's limit
_NOTHING = SamplingParams(temperature=0.0, max_tokens=1)  # nothing is sampled with these
PAIRS_IN_A_TURN = 64  # pairs in one turn of the event loop; each takes some 30 us
_BYTES_OF_AN_ENTRY = 64  # so many bytes of vectors are written in the time of an entry of another answer
_ERRORS = responses.errors(400, 401, 403, 404, 408, 413, 429, 500, 503)


class VectorRoutes:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: FastAPI) -> None:
        """Register the routes. Those that vLLM, Jina and Cohere also have under other paths get all these paths."""
        routes: list[tuple[tuple[str, ...], Any, Any, type[RequestBody]]] = [
            (("/v1/embeddings",), self.embeddings, responses.Embeddings, EmbeddingBody),
            (("/v1/score", "/score"), self.score, responses.Scores, ScoreBody),
            (("/v1/rerank", "/rerank", "/v2/rerank"), self.rerank, responses.Ranking, RerankBody),
        ]
        for paths, handler, model, body in routes:
            for path in paths:
                asked, is_first = responses.json_body(body), path == paths[0]
                responses.add_route(app, "POST", path, handler, model, _ERRORS, asked, is_first)

    async def embeddings(self, request: Request) -> Response:
        service = self._service
        body = await read_unless_full(service, request, EmbeddingBody)

        async def make(terms: Terms, place: Place) -> Response:
            stamps = Stamps(request.scope[ARRIVED], clock())
            params = self._embedding(body.dimensions)
            given = body.input, body.add_special_tokens, body.cache_salt, "input", MAX_INPUTS, _is_cut(body)
            prompts = self._embedded(body, await completion_prompts(service, *given), body.add_special_tokens, terms)
            generation = self._generation(request, body, prompts, params, terms, place, stamps, "input")
            write = partial(_embeddings, generation, self._head(body), body.encoding_format == "base64")
            return await self._answer(body, generation, write)

        return await serve(service, request, body, lambda: _checked_count(len(as_list(body.input)), "input"), make)

    async def score(self, request: Request) -> Response:
        body = await read_unless_full(self._service, request, ScoreBody)
        fields, queries, documents = _sides(body)

        def write(scores: list[float], generation: Generation) -> dict[str, Any]:
            data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
            head = {"id": f"score-{generation.id}", "object": "list", "created": int(time.time())}
            return {**head, **self._head(body), "data": data, "usage": generation.usage()}

        return await self._scored(request, body, queries, documents, fields, write)

    async def rerank(self, request: Request) -> Response:
        body = await read_unless_full(self._service, request, RerankBody)
        documents = [each if isinstance(each, str) else each["text"] for each in body.documents]

        def write(scores: list[float], generation: Generation) -> dict[str, Any]:
            best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: body.top_n or None]
            shown = body.return_documents is not False
            results = [
                {"index": at, "relevance_score": scores[at]} | ({"document": {"text": documents[at]}} if shown else {})
                for at in best
            ]
            return {
                "id": f"rerank-{generation.id}",
                **self._head(body),
                "results": results,
                "usage": generation.usage(),
            }

        return await self._scored(request, body, [body.query], documents, ("query", "documents"), write)

    async def _scored(
        self,
        request: Request,
        body: ScoreBody | RerankBody,
        queries: list[str],
        documents: list[str],
        fields: tuple[str, str],
        write: Callable[[list[float], Generation], dict[str, Any]],
    ) -> Response:
        """Score documents by queries: each pair is judged as one prompt, or the cosine of embeddings is taken."""
        service = self._service
        judged = service.pooler.judges is not None
        try:
            asked = pairs(queries, documents)
        except ValueError as error:
            raise bad_request(str(error), fields[1]) from None
        if body.instruction is not None and not judged:
            message = "this model scores by the cosine of embeddings, without an instruction; put it in the texts"
            raise bad_request(message, "instruction")

        async def make(terms: Terms, place: Place) -> Response:
            stamps = Stamps(request.scope[ARRIVED], clock())
            if judged:
                params = service.pooler.judgement
                prompts = await self._judged(body, [(queries[q], documents[d]) for q, d in asked], fields[1], terms)
            else:
                params = self._embedding(None)
                given = [*queries, *documents], True, body.cache_salt, fields[1], 2 * MAX_INPUTS, _is_cut(body)
                prompts = self._embedded(body, await completion_prompts(service, *given), True, terms)
            generation = self._generation(request, body, prompts, params, terms, place, stamps, fields[1])

            def encoded() -> bytes:
                vectors = [floats(choice.vector or b"") for choice in generation.choices]
                if judged:
                    scores = [relevance(vector) for vector in vectors]
                else:
                    scores = [cosine(vectors[q], vectors[len(queries) + d]) for q, d in asked]
                return msgspec.json.encode(write(scores, generation))

            return await self._answer(body, generation, encoded)

        count = _checked_count(len(asked), fields[1]) + (0 if judged else len(queries))
        return await serve(service, request, body, lambda: count, make)

    # --- the parts ----------------------------------------------------------------------------------

    def _embedding(self, dimensions: int | None) -> PoolingParams:
        try:
            return self._service.pooler.embedding(dimensions)
        except ValueError as error:
            raise bad_request(str(error), None if dimensions is None else "dimensions") from None

    def _most_tokens(self, body: RequestBody, terms: Terms) -> int | None:
        return most_tokens(body, self._service.check_ready().max_model_len, terms.service.max_prompt_tokens)

    def _embedded(
        self, body: RequestBody, prompts: list[TokenizedPrompt], add_special_tokens: bool, terms: Terms
    ) -> list[TokenizedPrompt]:
        """The prompts with the token that ends them, as long as the request allows."""
        service, pooler = self._service, self._service.pooler
        prompts, end = [pooler.ended(each) for each in prompts], int(pooler.end is not None)
        keep_end = body.truncation_side == "left"
        return truncated(service, prompts, self._most_tokens(body, terms), add_special_tokens, keep_end, end)

    async def _judged(
        self, body: ScoreBody | RerankBody, texts: list[tuple[str, str]], field: str, terms: Terms
    ) -> list[TokenizedPrompt]:
        """Each pair as a prompt. The document of a pair that is too long is cut: the template's end has to stay."""
        most, texts = self._most_tokens(body, terms), list(texts)
        prompts = await self._rendered(body, texts, field)
        if most is None:
            return prompts
        while too_long := [at for at, prompt in enumerate(prompts) if len(prompt.token_ids) > most]:
            for at in too_long:
                query, document = texts[at]
                cut = document, len(prompts[at].token_ids) - most, body.truncation_side == "left"
                shorter = partial(self._service.tokenizer.shorter, *cut)
                texts[at] = query, await self._service.text_work.run(len(document), shorter)
                if not texts[at][1]:
                    raise bad_request(
                        f"truncate_prompt_tokens is {body.truncate_prompt_tokens}, which leaves no room for a document "
                        "beside the query and the chat template",
                        "truncate_prompt_tokens",
                    )
            prompts = await self._rendered(body, texts, field)
        return prompts

    async def _rendered(
        self, body: ScoreBody | RerankBody, texts: list[tuple[str, str]], field: str
    ) -> list[TokenizedPrompt]:
        service, template = self._service, self._service.template
        assert template is not None
        size = sum(len(query) + len(document) for query, document in texts) + len(body.instruction or "") * len(texts)
        if size > MOST_CHARS:
            raise bad_request(
                f"all pairs of queries and {field} have {size} characters together; at most {MOST_CHARS} are allowed "
                "in one request",
                field,
            )
        asked = list[str]()
        for number, (query, document) in enumerate(texts, 1):
            messages, variables = judged_messages(template, query, document, body.instruction)
            asked.append(await rendered(service, messages, field, variables=variables))
            if number % PAIRS_IN_A_TURN == 0:
                await asyncio.sleep(0)
        encoded = await prompt_ids(service, asked, False, body.cache_salt, field, _is_cut(body))
        return [TokenizedPrompt(token_ids, text) for token_ids, text in zip(encoded, asked, strict=True)]

    def _generation(
        self,
        request: Request,
        body: RequestBody,
        prompts: list[TokenizedPrompt],
        params: PoolingParams,
        terms: Terms,
        place: Place,
        stamps: Stamps,
        field: str,
    ) -> Generation:
        service = self._service
        with service.counting_refusals(terms.service.name):
            longest = service.check_ready().max_model_len
            try:
                for prompt in prompts:
                    check_prompt(len(prompt.token_ids), longest, terms.service)
            except InvalidParameter as error:
                raise bad_request(str(error), field) from None
            nothing = [_NOTHING] * len(prompts)
            about = prompts, nothing, place, terms, stamps, "embeddings"
            return Generation(service, request, body, *about, pooling=params)

    async def _answer(self, body: RequestBody, generation: Generation, encode: Callable[[], bytes]) -> Response:
        def num_entries() -> int:
            return sum(len(choice.vector or b"") for choice in generation.choices) // _BYTES_OF_AN_ENTRY

        return await in_one_piece(generation, num_entries, encode, body.include_timings)

    def _head(self, body: RequestBody) -> dict[str, Any]:
        return {"model": body.model or self._service.settings.served_model_names[0]}


def _embeddings(generation: Generation, head: dict[str, Any], as_base64: bool) -> bytes:
    """OpenAI's list of embeddings: numbers, or float32 in base64."""
    data = [
        {
            "object": "embedding",
            "index": choice.index,
            "embedding": base64.b64encode(choice.vector or b"").decode() if as_base64 else floats(choice.vector or b""),
        }
        for choice in generation.choices
    ]
    whole = {"id": f"embd-{generation.id}", "object": "list", "created": int(time.time()), **head, "data": data}
    return msgspec.json.encode({**whole, "usage": generation.usage()})


def _sides(body: ScoreBody) -> tuple[tuple[str, str], list[str], list[str]]:
    """Both sides of a request for scores, with the names of their fields."""
    names = ("queries", "documents") if body.queries is not None or body.documents is not None else ("text_1", "text_2")
    if names[0] == "queries" and (body.text_1 is not None or body.text_2 is not None):
        raise bad_request("give text_1 and text_2, or queries and documents", "text_1")
    sides = [getattr(body, name) for name in names]
    for name, side in zip(names, sides, strict=True):
        if side is None:
            raise bad_request(f"{name} is missing", name)
    first, second = [[side] if isinstance(side, str) else side for side in sides]
    return names, first, second


def _is_cut(body: RequestBody) -> bool:
    return body.truncate_prompt_tokens is not None


def _checked_count(count: int, field: str) -> int:
    """The number of texts in a field. Raises ApiError 400 where a request has too many."""
    if count > MAX_INPUTS:
        raise bad_request(f"{field} has {count} texts; at most {MAX_INPUTS} are allowed in one request", field)
    return count
