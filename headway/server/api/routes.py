"""The routes. Each reads a body, checks it, tokenizes, generates and answers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from functools import partial

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from headway import __version__
from headway.engine.messages import Explain
from headway.outputs.choices import TokenizedPrompt
from headway.policy.admission.queue_bound import Place
from headway.policy.objectives.service_class import ServiceClass
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduler import DECISIONS_KEPT
from headway.server.api import responses
from headway.server.api.adapters import LoadAdapterBody, UnloadAdapterBody
from headway.server.api.answers import Answer, Shaped
from headway.server.api.beams import check_room
from headway.server.api.chat import ChatAnswer
from headway.server.api.choices import ServedChoice
from headway.server.api.completions import CompletionAnswer, InferAnswer
from headway.server.api.handover import handover_of
from headway.server.api.held import held_to
from headway.server.api.messages_api import CountBody, MessagesBody
from headway.server.api.parameters import check_ids, fitted_params, sampling_params
from headway.server.api.parsed import ParsedChatAnswer, ParsedChoice, begins_in_reasoning, parsed_choice
from headway.server.api.prompts import (
    as_list,
    chat_prompt,
    completion_prompts,
    most_tokens,
    predicted_ids,
    prompt_ids,
    truncated,
)
from headway.server.api.request_body import check_body
from headway.server.api.responses_api import ResponsesBody
from headway.server.api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    InferBody,
    RerankBody,
    ScoreBody,
    TokenIds,
    TokenizeChat,
    TokenizeText,
)
from headway.server.api.serving import read, read_unless_full, serve
from headway.server.classes import Terms
from headway.server.edge.connection import ARRIVED
from headway.server.edge.edge import REQUEST_ID
from headway.server.edge.http_head import query_choice, query_number
from headway.server.edge.pacing import Shared
from headway.server.edge.probes import health
from headway.server.errors import bad_request, json_response
from headway.server.generation import Generation, clock
from headway.server.live import Live
from headway.server.metrics.metrics import CONTENT_TYPE
from headway.server.page.document import page
from headway.server.profile import Profiles
from headway.server.service import Service
from headway.server.timings import Stamps

BODIES = (
    CompletionBody,
    ChatBody,
    InferBody,
    MessagesBody,
    CountBody,
    ResponsesBody,
    LoadAdapterBody,
    UnloadAdapterBody,
    EmbeddingBody,
    ScoreBody,
    RerankBody,
    TokenizeText,
    TokenizeChat,
    DetokenizeBody,
)
# Token ids of /tokenize that are written at once, which takes less than a millisecond.
TOKENS_BETWEEN_PAUSES, PAUSE_S = 1024, 2e-5
MAX_CHOICES_OF_ALL_PROMPTS = 4096
# Metrics are written once in so many seconds at most, as that takes some 10 ms.
EXPOSITION_EVERY_S = 0.1
# The most entries of prompt_logprobs: enough for a prompt of 131,072 tokens with the most alternatives, and some 200 MB
# of JSON.
MAX_PROMPT_LOGPROBS = 3_000_000
# An id of 32 digits, and its first ones, which are enough to tell requests apart in a line for people.
_LONG_ID = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")
_WORKING = responses.errors(400, 401, 404, 408, 413, 429, 500, 503)
_GENERATING = responses.errors(403) | _WORKING


def _written(token_ids: list[int], show: Callable[[int], str] | None = None) -> msgspec.Raw:
    """Ids, or what is shown of each, as JSON, with pauses for the event loop."""
    parts = []
    for at in range(0, len(token_ids), TOKENS_BETWEEN_PAUSES):
        ids = token_ids[at : at + TOKENS_BETWEEN_PAUSES]
        parts.append(msgspec.json.encode(ids if show is None else [show(token_id) for token_id in ids])[1:-1])
        time.sleep(PAUSE_S)
    return msgspec.Raw(b"[%b]" % b",".join(parts))


class Routes:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._exposition = Shared(lambda: asyncio.ensure_future(self._exposed()), EXPOSITION_EVERY_S)
        self._page = page() if service.settings.pages else None
        self._live = Live(service)
        self._profiles = Profiles(service)

    def add_to(self, app: FastAPI) -> None:
        add, of_generation, body = partial(responses.add_route, app), responses.EVENT_STREAM, responses.json_body
        for path, handler, answer, kind in (
            ("/v1/completions", self.completions, responses.Completion, CompletionBody),
            ("/v1/chat/completions", self.chat_completions, responses.ChatCompletion, ChatBody),
        ):
            add("POST", path, handler, {"model": answer, **of_generation}, _GENERATING, body(kind))
        add("POST", "/infer", self.infer, responses.Inferred, _GENERATING, body(InferBody))
        add("POST", "/tokenize", self.tokenize, responses.Tokens, _WORKING, body(TokenizeText, TokenizeChat))
        add("POST", "/detokenize", self.detokenize, responses.Text, _WORKING, body(DetokenizeBody))
        add("GET", "/v1/models", self.models, responses.ModelList, responses.errors(401, 503))
        one = {"parameters": [responses.in_path("model_id")]}
        add("GET", "/v1/models/{model_id:path}", self.model, responses.ModelCard, responses.errors(401, 404, 503), one)
        add("GET", "/health", self.health, responses.Health, responses.errors(503))
        for method in ("GET", "POST"):  # SageMaker may use either
            add(method, "/ping", self.health, {}, {}, in_schema=False)
        add("GET", "/", self.root, {}, {}, in_schema=False)
        add("GET", "/version", self.version, responses.Version, {})
        add("GET", "/load", self.load, responses.Load, responses.errors(401))
        steps = responses.query(
            "steps", "How many of the last steps.", type="integer", minimum=1, maximum=DECISIONS_KEPT, default=50
        )
        form = responses.query("format", "JSON, or a line for each step.", enum=["json", "text"], default="json")
        plain = {"content": {"text/plain": {"schema": {"type": "string"}}}}
        failures = responses.errors(400, 401, 503)
        told = {"model": responses.Schedule, **plain}
        add("GET", "/debug/schedule", self.schedule, told, failures, {"parameters": [steps, form]})
        trace = {"content": {"application/json": {"schema": {"type": "object"}}}}
        timed = "Wait for the next steps, and time their kernels."
        kernels = responses.query("kernels", timed, enum=["true", "false"], default="false")
        add("GET", "/debug/profile", self.profile, trace, failures, {"parameters": [steps, kernels]})
        add("POST", "/start_profile", self.start_profile, {}, {}, in_schema=False)
        add("POST", "/stop_profile", self.stop_profile, {}, {}, in_schema=False)
        if self._service.auto_tune is not None:
            add("GET", "/debug/auto-tune", self.auto_tune, {}, {}, in_schema=False)
        if self._page is not None:
            add("GET", "/debug/live", self.live, {}, {}, in_schema=False)
        add("GET", "/metrics", self.metrics, plain, responses.errors(401), response_class=Response)

    # --- text generation ----------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self.generate(request, await read_unless_full(self._service, request, CompletionBody))

    async def chat_completions(self, request: Request) -> Response:
        return await self.generate(request, await read_unless_full(self._service, request, ChatBody))

    async def infer(self, request: Request) -> Response:
        """A text for a prompt, without any other field."""
        asked = await read_unless_full(self._service, request, InferBody)
        completion = CompletionBody(prompt=asked.prompt, max_tokens=asked.max_tokens, temperature=asked.temperature)
        name = asked.request_id or request.scope[REQUEST_ID]
        about = self._service.settings.served_model_names[0], self._service.tokenizer, name
        return await self.generate(request, completion, lambda made: InferAnswer(made, completion, *about))

    async def generate(
        self, request: Request, body: CompletionBody | ChatBody, shape: Callable[[Generation], Shaped] | None = None
    ) -> Response:
        """Answer a body, in the shape of its own API or in another one."""
        if not self._service.check_ready().generates:
            raise bad_request("this checkpoint has no output layer; it gives embeddings only, at /v1/embeddings")
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        make = partial(self._answer, request, body, shape or partial(self._shape, body))
        return await serve(self._service, request, body, lambda: self._num_choices(body), make)

    def _shape(self, body: CompletionBody | ChatBody, generation: Generation) -> Answer:
        service = self._service
        model = body.model or service.settings.served_model_names[0]
        if isinstance(body, ChatBody):
            is_parsed = isinstance(generation.choices[0], ParsedChoice)
            return (ParsedChatAnswer if is_parsed else ChatAnswer)(generation, body, model, service.tokenizer)
        return CompletionAnswer(generation, body, model, service.tokenizer)

    async def _answer(
        self,
        request: Request,
        body: CompletionBody | ChatBody,
        shape: Callable[[Generation], Shaped],
        terms: Terms,
        place: Place,
    ) -> Shaped | Response:
        """The whole response, or for a stream the Answer that will make it."""
        service = self._service
        await service.pace.turn()
        params = sampling_params(body, service.defaults, service.tokenizer.vocab_size)
        stamps = Stamps(request.scope[ARRIVED], clock())
        with service.counting_refusals(terms.service.name):
            prompts = self._truncated(body, await self._prompts(body), terms.service)
            self._check_prompt_logprobs(prompts, params, body)
            is_reasoning = begins_in_reasoning(service, body, prompts[0])
            held = params.structured_outputs
            params.structured_outputs = await held_to(service, request, body, held, is_reasoning, stamps)
            given = body.prediction if isinstance(body, ChatBody) else None
            prediction = () if given is None else await predicted_ids(service, given, params)
            fitted = self._fitted(body, params, prompts, terms.service)
            hands_over, handle = False, None
            if body.kv_transfer_params is not None:
                hands_over, handle = handover_of(service.engine.config.role, body, fitted[0], len(prompts))
            generation = Generation(
                service,
                request,
                body,
                prompts,
                fitted,
                place,
                terms,
                stamps,
                "chat" if isinstance(body, ChatBody) else "text_completion",
                prediction=prediction,
                keep=not body.stream,
                prompt_only=isinstance(body, CompletionBody) and body.prompt_only,
                hands_over=hands_over,
                handle=handle,
                make_choice=parsed_choice(service, body, is_reasoning) or ServedChoice,
            )
        answer = shape(generation)
        return answer if body.stream else await answer.whole()

    def _fitted(
        self,
        body: CompletionBody | ChatBody,
        params: SamplingParams,
        prompts: list[TokenizedPrompt],
        service_class: ServiceClass,
    ) -> list[SamplingParams]:
        """The parameters for each prompt, fitted to the context and the class."""
        ready, prompt_field = self._service.check_ready(), "messages" if isinstance(body, ChatBody) else "prompt"
        is_reduced = isinstance(body, ChatBody) and body.reduces_max_tokens
        fields = () if is_reduced else ("max_completion_tokens", "max_tokens")
        field = next((name for name in fields if getattr(body, name, None) is not None), None)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        fitted = fitted_params(params, lengths, ready.max_model_len, service_class, prompt_field, field)
        if params.use_beam_search:
            records = self._service.engine.config.record_steps is not None
            for each, length in zip(fitted, lengths, strict=True):
                check_room(ready, records, each, length, field or "max_tokens")
        return fitted

    async def _prompts(self, body: CompletionBody | ChatBody) -> list[TokenizedPrompt]:
        is_cut = body.truncate_prompt_tokens is not None
        if isinstance(body, ChatBody):
            return [await chat_prompt(self._service, body, body.cache_salt, is_cut)]
        given = body.prompt, body.add_special_tokens, body.cache_salt
        return await completion_prompts(self._service, *given, is_cut=is_cut)

    def _truncated(
        self, body: CompletionBody | ChatBody, prompts: list[TokenizedPrompt], service_class: ServiceClass
    ) -> list[TokenizedPrompt]:
        limit = self._service.check_ready().max_model_len
        wished = getattr(body, "max_completion_tokens", None) or body.max_tokens or body.min_tokens or 1
        most = most_tokens(body, limit, min(limit - wished, service_class.max_prompt_tokens))
        return truncated(
            self._service, prompts, most, is_framed=body.add_special_tokens, keep_end=body.truncation_side != "right"
        )

    def _num_choices(self, body: CompletionBody | ChatBody) -> int:
        n = body.n or 1
        prompts = 1 if isinstance(body, ChatBody) else len(as_list(body.prompt))
        if prompts * n > MAX_CHOICES_OF_ALL_PROMPTS:
            raise bad_request(
                f"{prompts} prompts with n = {n} make {prompts * n} choices; "
                f"at most {MAX_CHOICES_OF_ALL_PROMPTS} are allowed in one request",
                "n",
            )
        return prompts * n

    def _check_prompt_logprobs(
        self, prompts: list[TokenizedPrompt], params: SamplingParams, body: CompletionBody | ChatBody
    ) -> None:
        if params.prompt_logprobs is None:
            return
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        wanted = tokens * params.n * (params.prompt_logprobs + 1)
        if wanted > MAX_PROMPT_LOGPROBS:
            raise bad_request(
                f"the answer would have {wanted} log-probabilities of prompts ({tokens} tokens, {params.n} choices, "
                f"{params.prompt_logprobs + 1} each); at most {MAX_PROMPT_LOGPROBS} are allowed in one request",
                "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
            )

    # --- tokens -------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        service = self._service
        content = await service.bodies.read(request)
        body = check_body(TokenizeChat, content) if "messages" in content else check_body(TokenizeText, content)
        service.check_model(body.model)
        ready = service.check_ready()
        if isinstance(body, TokenizeChat):
            token_ids = (await chat_prompt(service, body, is_cut=True)).token_ids
        else:
            (token_ids,) = await prompt_ids(service, [body.prompt], body.add_special_tokens, None, "prompt", True)

        def write() -> bytes:
            text = service.tokenizer.token_text
            head = {"count": len(token_ids), "max_model_len": ready.max_model_len}
            strings = _written(token_ids, text) if body.return_token_strs else None
            return msgspec.json.encode({**head, "tokens": _written(token_ids), "token_strs": strings})

        encoded = await service.text_work.finish(len(token_ids), write)
        return Response(encoded, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        body = await read(service, request, DetokenizeBody)
        service.check_model(body.model)
        service.check_ready()
        check_ids(body.tokens, service.tokenizer.vocab_size, "tokens")
        tokens, tokenizer = body.tokens, service.tokenizer

        def decode() -> str:
            if isinstance(tokens, TokenIds):
                return service.text_process.decode(tokenizer.folder, tokens.tobytes(), False)
            return tokenizer.decode(tokens, False)

        work = service.process_work if isinstance(tokens, TokenIds) else service.text_work
        encoded = await work.run(len(tokens), lambda: msgspec.json.encode({"prompt": decode()}))
        return Response(encoded, media_type="application/json")

    # --- status -------------------------------------------------------------------------------------

    async def root(self, request: Request) -> Response:
        """The page, for browsers; for others where to go from here."""
        if self._page is not None and "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(self._page.html, headers=self._page.headers)
        places = {"api": "/docs", "models": "/v1/models", "health": "/health", "metrics": "/metrics"}
        return json_response({"server": f"headway {__version__}"} | places)

    async def models(self) -> Response:
        card, engine = self._service.card, self._service.engine
        cards = [card(name) for name in self._service.settings.served_model_names]
        return json_response({"object": "list", "data": cards + [card(each) for each in engine.adapters.values()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model_id"]
        self._service.check_model(name)
        return json_response(self._service.card(self._service.engine.adapters.get(name) or str(name)))

    async def health(self) -> Response:
        return health(self._service.check_ready)

    async def version(self) -> Response:
        return json_response({"version": __version__})

    async def load(self) -> Response:
        """Requests in flight."""
        return json_response({"server_load": self._service.in_flight})

    async def schedule(self, request: Request) -> Response:
        """The last steps and the reasons for them, the newest last."""
        self._service.check_ready()
        steps = query_number(request.query_params, "steps", 50, DECISIONS_KEPT)
        form = query_choice(request.query_params, "format", "json", ("json", "text"))
        told = await self._service.explained(Explain(steps))
        now = clock()
        decisions = [{"ago_ms": max(0, now - each.planned_ns) / 1e6, "decision": each.words} for each in told.steps]
        if form == "json":
            return json_response({"steps": decisions})
        lines = (f"{each['ago_ms']:.1f} ms ago: {each['decision']}\n" for each in decisions)
        return Response(_LONG_ID.sub(r"\1", "".join(lines)), media_type="text/plain")

    async def profile(self, request: Request) -> Response:
        """Steps and the requests in them as a trace for ui.perfetto.dev: the last ones, or the next with kernels."""
        steps = query_number(request.query_params, "steps", 50, DECISIONS_KEPT)
        kernels = query_choice(request.query_params, "kernels", "false", ("true", "false"))
        make = self._profiles.of_next if kernels == "true" else self._profiles.of_last
        return json_response(await make(steps))

    async def start_profile(self) -> Response:
        """Begin a profile, as vLLM does: steps from now on are in what stop_profile answers."""
        await self._profiles.start()
        return json_response({"status": "started"})

    async def stop_profile(self) -> Response:
        """The trace of the steps since start_profile, of the last ones where they are more than are kept."""
        return json_response(await self._profiles.stop())

    async def live(self) -> Response:
        """What the engine does now, twice a second, as server-sent events."""
        return self._live.stream()

    async def auto_tune(self) -> Response:
        """What the server has changed of its settings, and what it does about them now."""
        assert self._service.auto_tune is not None
        return json_response(self._service.auto_tune.look())

    async def metrics(self) -> Response:
        exposed = await asyncio.shield(await self._exposition.get())  # others wait for it, too
        return Response(exposed, media_type=CONTENT_TYPE)

    async def _exposed(self) -> bytes:
        service = self._service
        await service.look_at_memory()
        return service.metrics.exposition(bool(service.settings.metrics_keys))
