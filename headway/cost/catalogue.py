"""What is known by name: models, hardware, and what programs reach of it."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.cost.config import read_shape
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware, Link, Price, network_of
from headway.cost.shape import ModelShape

FOLDER = Path(__file__).parent / "tables"


class UnknownName(ValueError):
    """No entry of that name; one line that suggests the nearest."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model of the catalogue.

    Args:
        key: its short name.
        name: its name on the Hugging Face hub.
        weights: the precision in which its checkpoint is published: bf16, fp16, fp8-block or mxfp4.
        parameters_b, active_parameters_b: billions, as published; the latter for mixtures of experts.
        config: the keys of its config.json that decide its shape.
    """

    key: str
    name: str
    weights: str
    parameters_b: float
    config: dict[str, Any]
    active_parameters_b: float | None = None
    parameters_exact: int | None = None
    aliases: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        """The shape that the config describes. A window that it does not name is none, as TOML has no null."""
        return read_shape({"sliding_window": None, **self.config}, f"the catalogue's {self.key}")


@functools.cache
def models() -> Mapping[str, KnownModel]:
    """All models by key."""
    entries = _read("models.toml")
    return {key: msgspec.convert({"key": key, **entry}, KnownModel) for key, entry in entries.items()}


@functools.cache
def hardware() -> Mapping[str, Hardware]:
    """All hardware by key."""
    return {key: _hardware(key, entry) for key, entry in _read("hardware.toml").items()}


def find_model(name: str) -> KnownModel:
    """The model with this key, alias or hub name (also without its owner), in upper or lower case.

    Raises:
        UnknownName: no such model; the message has the nearest names.
    """
    spellings = {key: (each.name, *each.aliases) for key, each in models().items()}
    bare = {key: (*names, *(each.rpartition("/")[2] for each in names)) for key, names in spellings.items()}
    return models()[_find("model", name, bare)]


def find_hardware(name: str, others: Iterable[Hardware] = ()) -> Hardware:
    """The hardware with this key or alias, in upper or lower case.

    Args:
        others: hardware beside the catalogue's, such as calibrated machines; it comes first.

    Raises:
        UnknownName: no such hardware; the message has the nearest names.
    """
    table = {**hardware(), **{each.key: each for each in others}}
    return table[_find("hardware", name, {key: each.aliases for key, each in table.items()})]


def _find(kind: str, name: str, entries: Mapping[str, Iterable[str]]) -> str:
    wanted = name.strip().lower()
    spellings = {spelling.lower(): key for key in reversed(list(entries)) for spelling in entries[key]}
    spellings |= {key.lower(): key for key in entries}
    if wanted in spellings:
        return spellings[wanted]
    near = difflib.get_close_matches(wanted, spellings, n=3, cutoff=0.5)
    meant = ", ".join(dict.fromkeys(spellings[each] for each in near))
    known = f"did you mean {meant}?" if meant else f"known are {', '.join(entries)}"
    raise UnknownName(f"{kind} {name!r} is not known; {known}")


def _read(file: str) -> dict[str, dict[str, Any]]:
    with (FOLDER / file).open("rb") as stream:
        return tomllib.load(stream)


def _hardware(key: str, entry: dict[str, Any]) -> Hardware:
    link, network = entry.get("link"), entry.get("network_gb_s")
    price = entry.get("price_per_hour_usd")
    host = entry.get("host_gb_s")
    flops = {name: rate * 1e12 for name, rate in entry["tflops"].items()}
    if "fp4" in flops:
        flops["mxfp4"] = flops["fp8"]
        if entry["vendor"] == "NVIDIA":
            flops["nvfp4"] = flops["fp4"]
    return Hardware(
        key=key,
        name=entry["name"],
        kind=entry["kind"],
        architecture=entry["architecture"],
        memory_bytes=round(entry["memory_gib"] * 2**30),
        bytes_per_s=entry["bandwidth_gb_s"] * 1e9,
        flops_per_s=flops,
        link=Link(link["kind"], link["gb_s"] * 1e9, link["latency_us"] * 1e-6, link["max_devices"]) if link else None,
        host_bytes_per_s=host * 1e9 if host else None,
        network=network_of(network) if network else None,
        cuda_cores=entry.get("cuda_cores"),
        tensor_cores=entry.get("tensor_cores"),
        bus_bits=entry.get("bus_bits"),
        tdp_w=entry.get("tdp_w"),
        price=Price(price, entry["price_source"], str(entry["price_date"])) if price else None,
        sources=tuple(entry["sources"]),
        note=entry.get("note", ""),
        aliases=tuple(entry.get("aliases", ())),
    )


@functools.cache
def _efficiencies() -> dict[str, dict[str, Any]]:
    return _read("efficiency.toml")


def engines() -> tuple[str, ...]:
    """Serving programs whose efficiency is known, the default first."""
    return tuple(_efficiencies()["engine"])


def efficiency(hardware: Hardware, engine: str = "vllm") -> Efficiency:
    """What a serving program reaches of a device, fitted to published measurements (benchmarks/plan_accuracy.py).

    Raises:
        UnknownName: no such program.
    """
    tables = _efficiencies()
    if engine not in engines():
        raise UnknownName(f"engine {engine!r} is not known; known are {', '.join(engines())}")
    return msgspec.convert(
        {**tables["all"], **tables["architecture"].get(hardware.architecture, {}), **tables["engine"][engine]},
        Efficiency,
    )


def uncertainty(hardware: Hardware, metric: str) -> tuple[float, float]:
    """Factors on a prediction of ttft, ttft_arrivals, ttft_clients or tpot between which four in five measurements lie.

    They are wider for architectures of which no measurement was at hand, and for TTFTs under load: of requests that
    arrive at random times, or of several clients.
    """
    table = _efficiencies()["uncertainty"]
    if metric in ("ttft_arrivals", "ttft_clients"):
        low, high = table[metric]
        return low, high
    low, high = table[metric if hardware.architecture in table["measured"] else f"{metric}_elsewhere"]
    return low, high
