"""A model on several devices: what each holds and computes, and what they say to each other.

Tensor parallelism divides heads, feed-forward widths and the vocabulary, and adds up partial results twice in each
layer (Megatron-LM, Shoeybi et al., 2019). Pipeline parallelism divides the layers. Experts are divided by width like
the rest, or dealt out whole (expert parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.cost.hardware import Link
from headway.cost.layers import Experts, ShapeError, StateSpec
from headway.cost.memory import weight_bytes
from headway.cost.precision import Precision
from headway.cost.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How a model is spread. One replica takes tensor * pipeline * data devices."""

    tensor: int = 1  # devices that share each layer
    pipeline: int = 1  # stages that share the layers
    # Groups of `tensor` devices that each attend to their own sequences and share the experts; above 1 only with
    # `experts`.
    data: int = 1
    experts: bool = False  # experts are dealt out whole to the devices of a stage
    sequence: bool = False  # norms and residuals are divided among the devices by token (Korthikanti et al., 2022)

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name}_parallel_size is {getattr(self, name)}; it must be at least 1")
        if self.data > 1 and not self.experts:
            raise ShapeError(
                f"data_parallel_size is {self.data} without expert parallelism: that is {self.data} replicas; give "
                "--count instead, or --enable-expert-parallel"
            )

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data


def check(shape: ModelShape, parallelism: Parallelism, link: Link | None = None) -> None:
    """Raises ShapeError when the model cannot be spread like this; says which sizes would do."""
    tensor, pipeline = parallelism.tensor, parallelism.pipeline
    if shape.heads % tensor or shape.ffn % tensor:
        most = link.max_devices if link else 64
        fits = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most and not shape.heads % n and not shape.ffn % n]
        raise ShapeError(
            f"tensor_parallel_size is {tensor}, which does not divide both {shape.heads} query heads and a "
            f"feed-forward width of {shape.ffn}; use {', '.join(map(str, fits))}"
        )
    if max(shape.kv_heads, tensor) % min(shape.kv_heads, tensor):
        raise ShapeError(
            f"tensor_parallel_size is {tensor}, which neither divides {shape.kv_heads} key/value heads nor is a "
            "multiple of them"
        )
    state = shape.state
    if state is not None and ((state.heads or state.channels) % tensor or state.key_heads % tensor):
        raise ShapeError(
            f"tensor_parallel_size is {tensor}, which does not divide the heads or channels of recurrent layers"
        )
    if shape.kinds and (tensor > 1 or pipeline > 1):
        raise ShapeError("models whose layers have different sizes are not divided among devices")
    if pipeline > shape.layers:
        raise ShapeError(f"pipeline_parallel_size is {pipeline}, but there are only {shape.layers} layers to divide")
    if parallelism.experts and shape.experts is None:
        raise ShapeError("expert parallelism was asked for, but the model has no experts")
    if shape.experts is not None and parallelism.experts and shape.experts.count % (tensor * parallelism.data):
        raise ShapeError(
            f"{shape.experts.count} experts can't be dealt out to {tensor * parallelism.data} devices evenly"
        )
    if link is None and parallelism.devices > 1:
        raise ShapeError(f"{parallelism.devices} devices were asked for, but the hardware has no link between devices")


def machines(devices: int, link: Link | None) -> int:
    """How many machines hold so many devices, if each holds as many as its link joins."""
    return -(-devices // link.max_devices) if link is not None else 1


def device_shape(shape: ModelShape, parallelism: Parallelism) -> ModelShape:
    """What one device of a stage computes in each layer, all layers: its share of heads, widths and vocabulary."""
    tensor = parallelism.tensor
    return replace(
        shape,
        heads=shape.heads // tensor,
        kv_heads=shape.heads // tensor if shape.latent else max(1, shape.kv_heads // tensor),
        ffn=-(-shape.ffn // tensor),
        vocab=-(-shape.vocab // tensor),
        experts=_share(shape.experts, parallelism) if shape.experts else None,
        state=_state_share(shape.state, tensor) if shape.state else None,
    )


def _state_share(state: StateSpec, tensor: int) -> StateSpec:
    heads, key_heads = state.heads // tensor, state.key_heads // tensor
    return replace(state, channels=state.channels // tensor, heads=heads, key_heads=key_heads)


def _share(experts: Experts, parallelism: Parallelism) -> Experts:
    devices = parallelism.tensor * parallelism.data
    shared_width = -(-experts.shared_width // parallelism.tensor)
    if parallelism.experts:
        return replace(experts, held=experts.count // devices, senders=parallelism.data, shared_width=shared_width)
    return replace(experts, width=-(-experts.width // parallelism.tensor), shared_width=shared_width)


def stage_layers(layers: int, pipeline: int) -> int:
    """Layers of the longest stage."""
    return -(-layers // pipeline)


def device_weight_bytes(shape: ModelShape, precision: Precision, parallelism: Parallelism) -> int:
    """Bytes of weights on the device that holds the most: the first stage has the embedding, the last the head."""
    local = device_shape(shape, parallelism)
    if parallelism.pipeline == 1:
        return weight_bytes(local, precision)
    head = precision.head.bytes_of_matrices(local.projections()["head"])
    embedding = precision.rest.bytes_of(local.vocab * local.hidden)
    fullest = max(weight_bytes(stage, precision) for stage in stages(local, parallelism.pipeline))
    tables = head + (0 if shape.tied_embeddings else embedding)
    return fullest - tables + (head if shape.tied_embeddings else max(head, embedding))


def stages(shape: ModelShape, pipeline: int) -> list[ModelShape]:
    """The different stages of a pipeline, with equal ones once.

    Each is taken to have as many layers with experts as it can have, as those weigh most.
    """
    length = stage_layers(shape.layers, pipeline)
    return list(dict.fromkeys(_stage(shape, first, length) for first in range(0, shape.layers, length)))


def _stage(shape: ModelShape, first: int, length: int) -> ModelShape:
    layers = range(first, min(first + length, shape.layers))
    attending = [layer for layer in range(shape.layers) if layer not in shape.recurrent]
    windows = zip(attending, shape.sliding_windows, strict=True)
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, layers=min(len(layers), experts.layers))
    return replace(
        shape,
        layers=len(layers),
        sliding_windows=tuple(window for layer, window in windows if layer in layers),
        recurrent=tuple(layer - first for layer in shape.recurrent if layer in layers),
        experts=experts,
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the devices of a stage send in one step."""

    # all_reduces, all_reduce_bytes: how many all-reduces there are, and the bytes of all their tensors.
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    gather_bytes: int = 0  # bytes of the logits, which are gathered
    # all_to_alls, all_to_all_bytes: how often tokens go to their experts or back, and the bytes that a device sends.
    all_to_alls: int = 0
    all_to_all_bytes: int = 0
    # hops, hop_bytes: how often activations go from stage to stage, and their bytes.
    hops: int = 0
    hop_bytes: int = 0


def traffic(shape: ModelShape, parallelism: Parallelism, precision: Precision, tokens: int, rows: int) -> Traffic:
    """What is sent in a step of `tokens` tokens, of which `rows` want logits. `shape` is the whole model's.

    Sequence parallelism splits each all-reduce into a reduce-scatter and an all-gather, which move as much.
    """
    act = precision.activations
    reduces = all_to_alls = 0
    if parallelism.tensor > 1:
        reduces = shape.layer_norms * shape.layers + 1  # one for the embedding
        if shape.experts is not None and parallelism.data > 1 and not shape.experts.shared_width:
            reduces -= shape.experts.layers  # their results come back whole
    if shape.experts is not None and parallelism.data > 1:
        all_to_alls = 2 * shape.experts.layers
    devices = parallelism.tensor * parallelism.data
    copies = shape.experts.per_token if shape.experts else 0
    sent = act.bytes_of(tokens * copies * shape.hidden) * (devices - 1) // (devices * parallelism.tensor)
    message = act.bytes_of(tokens * shape.hidden)
    return Traffic(
        all_reduces=reduces,
        all_reduce_bytes=reduces * message,
        gather_bytes=act.bytes_of(rows * shape.vocab) if parallelism.tensor > 1 else 0,
        all_to_alls=all_to_alls,
        all_to_all_bytes=all_to_alls * sent,
        hops=parallelism.pipeline - 1,
        hop_bytes=(parallelism.pipeline - 1) * message // parallelism.tensor,
    )
