"""What all requests share: engine, tokenizer, settings, metrics, and the list of those in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from headway.config_files.classes import ClassFile
from headway.config_files.tenants import TenantFile
from headway.engine.client import AdapterError, EngineClient, EngineDead
from headway.engine.messages import AdapterFound, Explain, Explanation, Ready
from headway.outputs.pooling import Pooler
from headway.policy.admission.queue_bound import Place
from headway.policy.admission.tenants import DEFAULT_TENANT
from headway.policy.objectives.service_class import ServiceClass
from headway.policy.step.bounds import Bounds
from headway.server.activity import Activity
from headway.server.api.parameters import server_defaults
from headway.server.api.request_body import BodyReader
from headway.server.aside import Aside
from headway.server.auto_tune import AutoTune
from headway.server.door import Door
from headway.server.edge.behind import backlog
from headway.server.edge.connection import Connection
from headway.server.edge.pacing import Pace
from headway.server.encoder import Encoder
from headway.server.ended import Ended
from headway.server.errors import ApiError, bad_request, not_found, unavailable
from headway.server.grammars import GrammarChecks
from headway.server.metrics.metrics import Metrics, of_clients, of_encoder, of_grammars
from headway.server.quotas import TenantQuotas
from headway.server.request_log import log_of
from headway.server.settings import ServerSettings
from headway.server.text_work import TextWork
from headway.server.traces import tracer_of
from headway.text.calls.families import family_of
from headway.text.chat_template import ChatTemplate
from headway.text.known_texts import KnownTexts, safe_cuts
from headway.text.process import TextProcess
from headway.text.tokenizer import Tokenizer

# How long a scrape waits for the engine to say what its allocators hold, which it does between two steps.
MEMORY_S = 0.1
logger = logging.getLogger("headway.server")


class ModelNames(Collection[str]):
    """The names that a request may use at the moment: of the base model, and of adapters."""

    def __init__(self, settings: ServerSettings, engine: EngineClient) -> None:
        self._settings, self._engine = settings, engine

    def __contains__(self, name: object) -> bool:
        return name in self._settings.known_names or name in self._engine.adapters

    def __iter__(self) -> Iterator[str]:
        yield from self._settings.known_names
        yield from self._engine.adapters

    def __len__(self) -> int:
        return len(self._settings.known_names) + len(self._engine.adapters)


class Service(Door):
    """The state behind every route.

    Attributes:
        auto_tune: what changes settings; None without --auto-tune.
        connections: of clients, as the server of this application has them.

    Raises:
        TextError: the checkpoint's generation_config.json has values out of range, or a file on embeddings is damaged.
        ValueError: the journal of quotas cannot be kept, or the request log not be written.
    """

    quotas: TenantQuotas | None

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, template: ChatTemplate | None, settings: ServerSettings
    ) -> None:
        if settings.tenants is not None and settings.data_dir is not None:
            with contextlib.suppress(OSError):  # what is wrong with it the journal says
                settings.data_dir.mkdir(parents=True, exist_ok=True)
        super().__init__(settings)
        self.engine, self.tokenizer, self.template, self.settings = engine, tokenizer, template, settings
        source = "" if template is None else template.source
        self.family = family_of(source, settings.tool_call_parser, settings.reasoning_parser)
        # Its tags that are special tokens.
        self.tag_ids = tokenizer.special_ids_of(self.family.tags)
        self.defaults = {} if settings.generation_config == "none" else server_defaults(tokenizer.generation_config)
        self.bodies = BodyReader(settings.max_body_size)
        self.text_work = TextWork(settings.max_queued_text)
        self.text_process = TextProcess()
        self.process_work = TextWork(settings.max_queued_text, threads=1, inline=-1)  # waits for the process
        self.pooler = Pooler.load(tokenizer, template)
        cuts = None if template is None else safe_cuts(tokenizer.backend, template.source)
        known = KnownTexts(cuts, settings.max_known_text)
        self.encoder = Encoder(tokenizer, known, self.text_work, self.process_work, self.text_process)
        self.grammars = GrammarChecks(tokenizer, settings)
        self.metrics = Metrics(settings.metrics_prefix, settings.served_model_names[0], engine)
        self.metrics.add(partial(of_encoder, encoder=self.encoder))
        self.metrics.add(partial(of_grammars, checks=self.grammars))
        self.connections: Collection[Connection] = ()
        self.metrics.add(lambda families: of_clients(families, self.backlog()))
        self.created = int(time.time())
        self.model_names = ModelNames(settings, engine)
        self.pace = Pace()
        if self.quotas is not None:
            self.metrics.add_tenants(self.quotas)
        self.take_files(settings.service_classes or ClassFile(), settings.tenants or TenantFile())
        self.activity = Activity(engine)
        self.auto_tune: AutoTune | None = None
        if settings.auto_tune:
            self.auto_tune = AutoTune(engine, settings.auto_tune_bounds or Bounds(), self.metrics.families)
            self.metrics.registry.register(self.auto_tune)
        self.tracer = tracer_of(settings.otlp_endpoint, settings.trace_sample)
        self.request_log = log_of(settings)
        # Whoever wants to be told of each choice that has ended.
        self.when_ended: list[Callable[[Ended], None]] = [each.ended for each in self._aside]
        engine.subscribe(self.metrics.on_step)
        engine.subscribe(self.activity.on_step)

    @property
    def _aside(self) -> list[Aside]:
        return [each for each in (self.tracer, self.request_log) if each is not None]

    def backlog(self) -> tuple[int, int]:
        """How many clients are behind, and the bytes that they have yet to take."""
        return backlog(self.connections)

    # --- what may come in ---------------------------------------------------------------------------

    def reload_files(self) -> None:
        """Read the files of classes and of tenants again. If one is wrong, all stays as it is, and the log says so."""
        if not self.has_files:
            return
        is_done = self.read_files_again()
        if is_done:
            self.engine.set_classes(self.classes.table, self.tenants.table.weights)
            if self.auto_tune is not None:
                self.auto_tune.reload(self.classes.table)
        self.metrics.on_reload("done" if is_done else "failed")

    def take_files(self, classes: ClassFile, tenants: TenantFile) -> None:
        super().take_files(classes, tenants)
        self.metrics.settle()
        self.metrics.by_class.set_classes(classes.table)
        if self.metrics.by_tenant is not None:
            self.metrics.by_tenant.set_tenants(tenants.table)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 when `name` is not a model that is served."""
        if name is not None and name not in self.model_names:
            served = ", ".join([*self.settings.served_model_names, *self.engine.adapters])[:1000]
            message = f"model {name[:200]!r} is not served here; the server has {served}"
            raise not_found(message, "model_not_found", "model")

    # --- adapters -----------------------------------------------------------------------------------

    def adapter_of(self, model: str | None) -> str:
        """The digest of the adapter that is asked for by a name which is served; empty for the base model."""
        return "" if model is None or (found := self.engine.adapters.get(model)) is None else found.digest

    async def load_adapter(self, name: str, path: str) -> AdapterFound:
        """Serve an adapter by a name. Raises ApiError: 400 where it cannot be served, 503 where the engine is not."""
        try:
            found = await self.engine.adapters.load(name, path)
        except AdapterError as error:
            raise bad_request(str(error), "lora_path") from None
        except EngineDead as error:
            raise unavailable(str(error), "engine_dead", 5) from None
        logger.info("adapter %s is %s, of rank %d (%s)", name, path, found.rank, found.digest)
        return found

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more; its requests end as the settings say. Raises ApiError 404 where it is not there."""
        if name not in self.engine.adapters:
            raise not_found(f"adapter {name[:200]!r} is not loaded", "model_not_found", "lora_name")
        digest = self.engine.adapters[name].digest
        self.engine.adapters.drop(name)
        logger.info("adapter %s is unloaded", name)
        if self.settings.lora_unload == "abort":
            why = f"adapter {name[:200]!r} was unloaded while this request ran"
            for generation in list(self.generations):
                if getattr(generation, "adapter", "") == digest:
                    generation.abort(not_found(why, "adapter_unloaded", "model"))

    def card(self, model: AdapterFound | str) -> dict[str, Any]:
        """What /v1/models says of the base model by one of its names, or of an adapter."""
        base, settings = isinstance(model, str), self.settings
        return {
            "id": model if isinstance(model, str) else model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "headway",
            "root": (settings.root or model) if isinstance(model, str) else model.path,
            "parent": None if base else settings.served_model_names[0],
            "max_model_len": self.check_ready().max_model_len,
        }

    def check_ready(self) -> Ready:
        """The engine's limits.

        Raises:
            ApiError: 503 while it loads, when it is dead or ends no step, and when the server shuts down.
        """
        self.check_up()
        if self.engine.state == "ready" and self.engine.ready is not None:
            if self.engine.stalled_s:
                reason = f"the engine has ended no step for {self.engine.stalled_s:.3g} s (--engine-timeout)"
                raise unavailable(f"{reason}; unless it goes on, it is restarted", "engine_stalled", 5)
            return self.engine.ready
        if self.engine.state == "loading":
            reason = f" ({self.engine.last_error})" if self.engine.restarts else ""
            raise unavailable(f"the model is loading{reason}", "engine_loading", 5)
        raise unavailable(f"the engine is not running: {self.engine.last_error}", "engine_dead", 30)

    async def explained(self, asked: Explain) -> Explanation:
        """What the engine tells of its last steps. Raises ApiError where it is not ready or has died."""
        self.check_ready()
        try:
            return await self.engine.explain(asked)
        except EngineDead as error:
            raise unavailable(str(error), "engine_dead", 5) from None

    async def look_at_memory(self) -> None:
        """Have metrics of what the engine's allocators hold; of its last word where it does not answer at once."""
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(MEMORY_S):
                self.metrics.allocators = (await self.explained(Explain(0, with_memory=True))).allocators

    @contextlib.contextmanager
    def counting_refusals(self, service_class: str = "") -> Iterator[None]:
        """Count an ApiError that refuses a request."""
        try:
            yield
        except ApiError as error:
            self.metrics.on_refused(error, service_class)
            raise

    def refuse_if_full(self, tenant: str) -> None:
        """Raise ApiError when no request of a tenant can come in: 429, or what check_ready() raises."""
        with self.counting_refusals():
            self.admission.fit_to(self.check_ready())
            self.admission.refuse_if_full()
            if self.quotas is not None:
                self.quotas.refuse_if_over(tenant)

    def admit(self, choices: int, service: ServiceClass, tenant: str = DEFAULT_TENANT) -> Place:
        """A place in the queue. Raises ApiError as check_ready() and Admission.admit()."""
        self.admission.fit_to(self.check_ready())
        return self.admission.admit(choices, service, tenant)

    async def close(self) -> None:
        """Stop the engine and the threads."""
        self.full_collections.stop()
        self.end_background()
        await self.engine.stop()
        for each in self._aside:
            await asyncio.to_thread(each.close)
        self.text_process.close()
        self.grammars.close()
        self.text_work.close()
        self.process_work.close()
        self.bodies.close()
        if self.quotas is not None:
            self.quotas.close()
