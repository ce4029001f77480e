"""The file that says which backends a gateway has, and how it treats them."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from headway.config_files.toml import number, parse, read_text, whole_number
from headway.policy.fleet.handover import WHEN
from headway.policy.fleet.health import HealthRule
from headway.policy.fleet.routing import scorers_of
from headway.policy.objectives.service_class import (
    A_BOOLEAN,
    A_NUMBER,
    A_STRING,
    ANYTHING,
    InvalidEntry,
    check_entry,
    entries_of,
    within,
)

KINDS = ("headway", "openai")
DEFAULT_ROUTING = "slack=2,prefix-hits,least-loaded"
MOST_BACKENDS, MOST_REQUESTS = 1000, 100_000
FILE_KEYS = (
    *("routing", "retries", "hedge_after_ms", "continue_streams", "handover"),
    *("timeouts", "health", "shared", "backend"),
)
PREFILL, DECODE = ROLES = ("prefill", "decode")
_KEYS = (
    dict.fromkeys(("name", "url", "kind", "key", "key_env"), A_STRING)
    | dict.fromkeys(("models", "labels", "weight", "max_requests", "min_prompt_tokens", "max_prompt_tokens"), ANYTHING)
    | {"health_path": A_STRING, "role": A_STRING}
    | dict.fromkeys(("drain", "resolve", "batches"), A_BOOLEAN)
)
_TIMEOUTS = dict.fromkeys(("connect_s", "first_byte_s", "stall_s", "keep_alive_s"), ANYTHING)
_HEALTH = dict.fromkeys(("every_s", "timeout_s", "failures", "eject_s", "most_eject_s", "slow_start_s"), ANYTHING)
WHEN_DOWN, REDIS_URLS = ("refuse", "allow"), ("redis://", "rediss://", "unix://")
_SHARED = dict.fromkeys(("redis", "redis_env", "when_down", "prefix"), A_STRING)
_SHARED |= dict.fromkeys(("timeout_s", "lease_s"), A_NUMBER)
_NAME, _VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"), re.compile(r"[!-~]{1,4096}")


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend as the file has it."""

    name: str
    url: str
    # host, port, is_tls, prefix: parts of `url`; `prefix` is the path before /v1.
    host: str
    port: int
    is_tls: bool
    prefix: str
    kind: str = "openai"  # a backend of `headway` is told classes and deadlines, and tells its ledger
    key: str = field(default="", repr=False)  # what it wants as a bearer token; empty for none
    models: tuple[str, ...] = ()  # names of models; empty where the backend is asked for them
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    max_requests: int = 1024  # most requests that are there at a time
    # min_prompt_tokens, max_prompt_tokens: the prompts that are sent there, by about how many tokens they have.
    min_prompt_tokens: int = 0
    max_prompt_tokens: float = float("inf")
    health_path: str = "/health"  # what is asked to see whether it is well; empty where nothing is
    drain: bool = False  # nothing new is sent there
    resolve: bool = False  # each address that the host's name has is a backend of its own
    batches: bool = False  # it has /v1/files and /v1/batches
    address: str = ""  # where to connect, if that is not what `host` is looked up as
    role: str = ""  # `prefill` computes prompts for those of `decode`; empty does neither

    def at(self, address: str) -> BackendEntry:
        """The backend at one address of its name."""
        return replace(self, name=f"{self.name}@{address}", address=address)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds."""

    connect_s: float = 5.0  # until a connection stands
    first_byte_s: float = 600.0  # from there until an answer begins
    stall_s: float = 60.0  # between two pieces of an answer that has begun
    keep_alive_s: float = 30.0  # that an idle connection is kept


@dataclass(frozen=True, slots=True)
class Shared:
    """Where several gateways keep what tenants have used."""

    redis: str = field(default="", repr=False)  # the URL of a Redis; empty where this gateway counts for itself
    when_down: str = "refuse"  # what happens to requests while Redis does not answer: refuse | allow
    timeout_s: float = 0.5  # seconds that a request waits for Redis
    lease_s: float = 60.0  # what a gateway has reserved is given back when nothing was heard of it for so many seconds
    prefix: str = "headway"  # what the keys begin with; gateways with one prefix share


@dataclass(frozen=True, slots=True)
class GatewayFile:
    """The contents of a file of a gateway."""

    backends: tuple[BackendEntry, ...]
    routing: str = DEFAULT_ROUTING
    retries: int = 2  # how often a request of whose answer nothing has come is sent again
    # After how many milliseconds without an answer another backend is asked too; 0 for never.
    hedge_after_ms: float = 0.0
    continue_streams: bool = False  # a stream of a Headway backend that breaks is gone on with at another one
    handover: str = "auto"  # whether prompts are handed over from backends of role prefill: auto | always | never
    timeouts: Timeouts = field(default_factory=Timeouts)
    health: HealthRule = field(default_factory=HealthRule)
    shared: Shared = field(default_factory=Shared)  # what it shares with other gateways
    path: str = ""  # where it was read


def read_gateway_file(path: str) -> GatewayFile:
    """Read and check the file.

    Raises:
        ValueError: naming the file, the line, and what is wrong there.
    """
    return parse_gateway_file(path, read_text(path))


def parse_gateway_file(path: str, text: str) -> GatewayFile:
    """Check a text like read_gateway_file() checks a file; `path` names it in errors."""
    return parse(path, text, FILE_KEYS, lambda content: gateway_of(content, path))


def gateway_of(content: Mapping[str, Any], path: str) -> GatewayFile:
    """The gateway that a file describes. Raises InvalidEntry."""
    backends = entries_of(content, "backend", backend_of)
    if not 1 <= len(backends) <= MOST_BACKENDS:
        raise InvalidEntry(
            f"there are {len(backends) or 'no'} backends; write [[backend]] once for each, at most 1000", "backend"
        )
    names = [each.name for each in backends]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InvalidEntry(f"two backends are named {name!r}; give each its own name", "backend", at, "name")
    routing = content.get("routing", DEFAULT_ROUTING)
    try:
        scorers_of(routing if isinstance(routing, str) else "")
    except ValueError as error:
        raise InvalidEntry(f"routing is {routing!r:.80}: {error}", "routing") from None
    times, health = _numbers(content, "timeouts", _TIMEOUTS), _numbers(content, "health", _HEALTH)
    retries = whole_number(content, "retries", 0, 10) if "retries" in content else 2
    if "failures" in health:
        with within("health"):
            health["failures"] = whole_number(health, "failures", 1, 1000)
    hedge_after_ms = number(content, "hedge_after_ms", 1) if "hedge_after_ms" in content else 0.0
    continues = content.get("continue_streams", False)
    if not isinstance(continues, bool):
        raise InvalidEntry(f"continue_streams is {continues!r:.80}; it must be true or false", "continue_streams")
    if continues and hedge_after_ms:
        raise InvalidEntry("continue_streams and hedge_after_ms are both there; choose one", "continue_streams")
    handover = content.get("handover", "auto")
    if handover not in WHEN:
        raise InvalidEntry(f"handover is {handover!r:.80}; choose one of {', '.join(WHEN)}", "handover")
    _check_roles(backends)
    timeouts, rule, shared = Timeouts(**times), HealthRule(**health), _shared(content)
    more = timeouts, rule, shared, path
    return GatewayFile(tuple(backends), routing, retries, hedge_after_ms, continues, handover, *more)


def _check_roles(backends: list[BackendEntry]) -> None:
    roles = {each.role for each in backends} - {""}
    if roles and roles != set(ROLES):
        lacking = PREFILL if roles == {DECODE} else DECODE
        raise InvalidEntry(
            f"no backend has the role {lacking}; give it to some, or leave role out", "backend", 0, "role"
        )


def _table(content: Mapping[str, Any], table: str, kinds: Mapping[str, str]) -> dict[str, Any]:
    given = content.get(table, {})
    if not isinstance(given, dict):
        raise InvalidEntry(f"{table} must be a table; write [{table}]", table)
    with within(table):
        check_entry(given, table, kinds)
    return given


def _numbers(content: Mapping[str, Any], table: str, kinds: Mapping[str, str]) -> dict[str, Any]:
    given = _table(content, table, kinds)
    with within(table):
        return {key: number(given, key, 0.01) for key in given}


def _shared(content: Mapping[str, Any]) -> Shared:
    given, usual = _table(content, "shared", _SHARED), Shared()
    if "shared" not in content:
        return usual
    with within("shared"):
        url = _secret(given, "redis", "redis_env")
        if not url.startswith(REDIS_URLS):  # not shown: it may have a password
            raise InvalidEntry("the address of Redis must be like redis://10.0.0.9:6379/0", "redis")
        if (when_down := given.get("when_down", usual.when_down)) not in WHEN_DOWN:
            raise InvalidEntry(f"when_down is {when_down!r}; choose one of {', '.join(WHEN_DOWN)}", "when_down")
        if not _NAME.fullmatch(prefix := given.get("prefix", usual.prefix)):
            raise InvalidEntry(f"prefix is {prefix!r:.80}; give letters, digits, dots, underscores, hyphens", "prefix")
        if importlib.util.find_spec("redis") is None:
            raise InvalidEntry("this needs the package redis; install headway[redis]")
        timeout_s = number(given, "timeout_s", 0.01, 60) if "timeout_s" in given else usual.timeout_s
        lease_s = number(given, "lease_s", 1) if "lease_s" in given else usual.lease_s
    return Shared(url, when_down, timeout_s, lease_s, prefix)


def backend_of(entry: Mapping[str, Any]) -> BackendEntry:
    """The backend that a table describes. Raises InvalidEntry."""
    check_entry(entry, "a backend", _KEYS)
    if not _NAME.fullmatch(name := entry.get("name", "")):
        raise InvalidEntry(f"name is {name!r:.80}; give 1 to 64 letters, digits, dots, underscores and hyphens", "name")
    kind, path = entry.get("kind", "openai"), entry.get("health_path", "/health")
    if kind not in KINDS:
        raise InvalidEntry(f"kind is {kind!r}; choose one of {', '.join(KINDS)}", "kind")
    if path and not (path.startswith("/") and _VALUE.fullmatch(path)):
        raise InvalidEntry(f'health_path is {path!r}; it must begin with /, or be "" for none', "health_path")
    models, labels = entry.get("models", []), entry.get("labels", {})
    if not isinstance(models, list) or not all(isinstance(each, str) and each for each in models):
        raise InvalidEntry('models must be a list of names, such as ["llama"]', "models")
    if not isinstance(labels, dict) or not all(
        _NAME.fullmatch(f"{k}") and _NAME.fullmatch(f"{v}") for k, v in labels.items()
    ):
        raise InvalidEntry('labels must be names with names, such as { accelerator = "H100" }', "labels")
    role = entry.get("role", "")
    if role not in ("", *ROLES):
        raise InvalidEntry(f"role is {role!r:.80}; choose one of {', '.join(ROLES)}, or leave it out", "role")
    if role and kind != "headway":
        raise InvalidEntry(f'role is {role!r}, which needs kind = "headway"', "role")
    least = whole_number(entry, "min_prompt_tokens", 0, 10**9) if "min_prompt_tokens" in entry else 0
    most = whole_number(entry, "max_prompt_tokens", max(1, least), 10**9) if "max_prompt_tokens" in entry else None
    return BackendEntry(
        name,
        *_address(entry.get("url", "")),
        kind=kind,
        key=_key(entry),
        models=tuple(models),
        labels={key: str(value) for key, value in labels.items()},
        weight=number(entry, "weight", 0.001, 1000.0) if "weight" in entry else 1.0,
        max_requests=whole_number(entry, "max_requests", 1, MOST_REQUESTS) if "max_requests" in entry else 1024,
        min_prompt_tokens=least,
        max_prompt_tokens=float("inf") if most is None else most,
        health_path=path,
        drain=entry.get("drain", False),
        resolve=entry.get("resolve", False),
        batches=entry.get("batches", False),
        role=role,
    )


def _key(entry: Mapping[str, Any]) -> str:
    key = _secret(entry, "key", "key_env")
    if key and not _VALUE.fullmatch(key):  # not shown: it is a secret
        raise InvalidEntry("the key has characters that a header cannot carry; give it without blanks", "key")
    return key


def _secret(entry: Mapping[str, Any], name: str, name_env: str) -> str:
    """What a key of the file says, or the environment variable that another key names; empty for neither."""
    said, variable = entry.get(name, ""), entry.get(name_env, "")
    if said and variable:
        raise InvalidEntry(f"{name} and {name_env} are both there; give one of them", name_env)
    if variable and not os.environ.get(variable):
        raise InvalidEntry(f"{name_env} names {variable!r}, which is not in the environment", name_env)
    return said or os.environ.get(variable, "")


def _address(url: str) -> tuple[str, str, int, bool, str]:
    """The URL, its host, port, whether it is HTTPS, and the path before /v1."""

    def wrong(what: str) -> InvalidEntry:
        return InvalidEntry(f"url is {url!r:.100}: {what}; give it like http://10.0.0.1:8000", "url")

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise wrong(str(error)) from None
    if not url.isascii() or any(each.isspace() for each in url) or parts.scheme not in ("http", "https"):
        raise wrong("it must begin with http:// or https://, and have no blanks")
    if parts.username is not None or parts.password is not None:
        raise InvalidEntry("url has a user name or password in it; give the key as key_env", "url")
    if not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise wrong("it needs a host, and nothing from ? or # on")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return url, parts.hostname, port or (443 if is_tls else 80), is_tls, prefix
