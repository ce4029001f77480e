"""The Kernels protocol in plain torch: any device, any dtype, no cleverness. The oracle of the other two."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.adapters import Adapted, AdapterRows, AdapterSpec, TorchAdapted
from headway.kernels.interface import (
    AttentionShape,
    Forbid,
    HeadLinear,
    KernelTime,
    LayerCache,
    LayerState,
    Linear,
    Mixture,
    RoutingCounts,
    SinkQueries,
    Span,
    StepGeometry,
)
from headway.kernels.weights import SILU, SOFTMAX, DeltaRule, Gate, Product, Scores, Weight

_WIDE_AT_ONCE = 8192  # rows of a weight of which there is a float32 copy at a time


def check_unquantized(weight: Weight, kernels: str) -> None:
    """Refuse what only the CPU's kernels have. Raises ValueError: the weight is packed or to be rounded."""
    if weight.format != "none":
        raise ValueError(f"the {kernels} kernels do not support weights in {weight.format}; use --device cpu")


class ReferenceLinear:
    """A weight [out, in] kept as it came; of parts that were lent, a copy.

    Args:
        wide: on a CPU, results are float32. Elsewhere torch would need a float32 copy of the weight.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, wide: bool = False) -> None:
        self.weight = weight.values if isinstance(weight.values, Tensor) else torch.cat(weight.values)
        self.bias = bias
        self._factor = weight.factor
        self._wide = wide
        self.out_features = self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self._wide and x.device.type == "cpu" and x.dtype != torch.float32:
            rows = x.float()
            product = torch.cat([F.linear(rows, part.float()) for part in self.weight.split(_WIDE_AT_ONCE)], 1)
        elif self._factor == 1.0:
            return F.linear(x, self.weight, self.bias)
        else:
            product = F.linear(x, self.weight)
        product = product * self._factor
        return product if self.bias is None else product + self.bias

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [T] of the weight -> [T, in]."""
        return self.weight.index_select(0, numbers)


class ReferenceGatedLinear:
    """A gated product of [2 * F, in]: a product, and an operation on its result [T, 2 * F]."""

    def __init__(self, linear: Linear, gate: Gate, apply_gate: Callable[[Tensor, Gate], Tensor]) -> None:
        self.linear = linear
        self._gate, self._apply_gate = gate, apply_gate

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, F]."""
        return self.through(self.linear(x))

    def through(self, gate_up: Tensor) -> Tensor:
        """The product's result [T, 2 * F] -> [T, F]."""
        return self._apply_gate(gate_up, self._gate)


class ReferenceHeadLinear:
    """A batched product."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weight = torch.stack([torch.cat(weight.parts) for weight in weights])  # [H, out, in]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H, in] -> [T, H, out]."""
        return (x.transpose(0, 1) @ self.weight.transpose(1, 2)).transpose(0, 1)


class ReferenceMixture:
    """Experts one after the other, in the order of their numbers."""

    def __init__(self, experts: list[tuple[Callable[[Tensor], Tensor], Linear]], counts: RoutingCounts) -> None:
        self.experts, self._counts = experts, counts

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        routed = chosen if shared is None else chosen[:, :-1]
        numbers, tokens_of = routed.unique(return_counts=True)
        for number in numbers.tolist():
            tokens, place = torch.where(routed == number)
            gate_up, down = self.experts[number]
            total[tokens] += weights[tokens, place, None] * down(gate_up(x[tokens])).float()
        if shared is not None:
            total += weights[:, -1:] * shared.float()
        self._count(tokens_of.tolist())
        return total.to(x.dtype)

    def _count(self, tokens_of: list[int]) -> None:
        counts = self._counts
        counts.mixtures += 1
        counts.pairs += sum(tokens_of)
        counts.touched += len(tokens_of)
        counts.busiest += max(tokens_of, default=0)


def forbid(x: Tensor, marked: Tensor) -> None:
    rows, words = marked[:, 0], marked[:, 1:]
    places = torch.arange(32, dtype=torch.int32, device=x.device)
    allowed = (words.unsqueeze(-1) >> places) & 1
    x[rows] = x[rows].masked_fill(allowed.flatten(1) == 0, -torch.inf)


class TorchKernels:
    """The operations that are left to torch alike on any device; what a device has of its own stands in a subclass."""

    name: str
    warm_up_tokens: int | None = None
    draw = None

    def __init__(self) -> None:
        self._counts = RoutingCounts()

    @property
    def forbid(self) -> Forbid:
        """Applies masks of allowed tokens."""
        return forbid

    def likeliest(self, logits: Tensor, size: int) -> tuple[list[float], list[int]]:
        """The likeliest of the first `size` tokens of each row, and its probability."""
        rows = logits[:, :size].float()
        best, tokens = rows.max(-1)
        return (best - rows.logsumexp(-1)).exp_().tolist(), tokens.tolist()

    def apply_gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """[T, 2 * F] -> [T, F]: the first half is the gate of the second."""
        raise NotImplementedError

    def linear(self, weight: Weight, bias: Tensor | None, wide: bool = False) -> Linear:
        """Wrap weight [out, in] without copying it, unless it is lent."""
        check_unquantized(weight, self.name)
        return ReferenceLinear(weight, bias, wide)

    def gated_linear(self, weight: Weight, bias: Tensor | None, gate: Gate = SILU) -> Callable[[Tensor], Tensor]:
        return ReferenceGatedLinear(self.linear(weight, bias), gate, self.apply_gate)

    def mixture(self, gate_up: Iterable[Product], down: Iterable[Product], count: int, gate: Gate = SILU) -> Mixture:
        gated = [self.gated_linear(*each, gate) for each in gate_up]
        return ReferenceMixture(list(zip(gated, [self.linear(*each) for each in down], strict=True)), self._counts)

    def adapted(self, product: Callable[[Tensor], Tensor], spec: AdapterSpec, rows: AdapterRows) -> Adapted:
        if isinstance(product, ReferenceGatedLinear):
            return TorchAdapted(product.linear, spec, rows, product.through)
        return TorchAdapted(product, spec, rows)

    def choose(self, dtype: torch.dtype, scheme: str) -> str:
        return ""

    @property
    def named(self) -> dict[str, object]:
        return {}

    def head_linear(self, weights: Iterable[Weight], count: int) -> HeadLinear:
        given = list(weights)
        for weight in given:
            check_unquantized(weight, self.name)
        return ReferenceHeadLinear(given)

    def join(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        return first.contiguous() if second is None else torch.cat([first, second], dim=2)

    def timed(self, wanted: bool | None) -> list[KernelTime]:
        """See Kernels; these are not timed."""
        return []

    def routing_counts(self) -> RoutingCounts:
        return replace(self._counts)

    def take(self, table: Tensor, rows: Tensor) -> Tensor:
        return table.index_select(0, rows)

    def route(
        self, logits: Tensor, per_token: int, normalized: bool, shared: bool, scores: Scores = SOFTMAX
    ) -> tuple[Tensor, Tensor]:
        """See Kernels; a stable sort, as topk does not promise the first of equals."""
        wide = logits.float()
        routed = wide[:, :-1] if shared and scores.gated else wide
        chosen = _choice(routed, scores).argsort(dim=1, descending=True, stable=True)[:, :per_token]
        weights = (routed.sigmoid() if scores.sigmoid else routed.softmax(1)).gather(1, chosen)
        if normalized:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        weights = weights * scores.factor
        if not shared:
            return chosen, weights
        number = torch.full_like(chosen[:, :1], routed.shape[1])
        weight = wide[:, -1:].sigmoid() if scores.gated else torch.ones_like(weights[:, :1])
        return torch.cat([chosen, number], 1), torch.cat([weights, weight], 1)

    def add(self, x: Tensor, residual: Tensor, factor: float = 1.0) -> Tensor:
        return (x + residual).mul_(factor) if factor != 1.0 else x + residual

    def gated(self, x: Tensor, up: Tensor, gate: Gate) -> Tensor:
        return self.apply_gate(torch.cat([x, up], 1), gate)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return (x.float() / cap).tanh_().mul_(cap).to(x.dtype)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def convolve(
        self,
        x: Tensor,
        gates: tuple[Tensor, Tensor] | None,
        taps: Tensor,
        bias: Tensor | None,
        state: LayerState,
        step: StepGeometry,
    ) -> Tensor:
        """See Kernels; all tokens of a sequence together."""
        seen = x.float() if gates is None else x.float() * gates[0].float()
        out = torch.empty_like(seen)
        before = len(taps) - 1
        for span, keeps in spans_of(step):
            tokens = slice(span.first, span.first + span.tokens)
            known = state.inputs[span.source] if span.source >= 0 else torch.zeros_like(state.inputs[0])
            line = torch.cat([known, seen[tokens]])
            total = sum(line[at : at + span.tokens] * tap for at, tap in enumerate(taps))
            out[tokens] = total if bias is None else total + bias
            state.inputs[span.target] = line[span.tokens :]
            for count, slot in keeps.items():
                state.inputs[slot] = line[count:][:before]
        return (out * out.sigmoid() if gates is None else out * gates[1].float()).to(x.dtype)

    def delta_rule(
        self, mixed: Tensor, gate: Tensor, numbers: Tensor, rule: DeltaRule, state: LayerState, step: StepGeometry
    ) -> Tensor:
        """See Kernels; token after token."""
        matrices = state.matrices
        if matrices is None:
            raise ValueError("a layer whose state has no matrices has no delta rule")
        heads, key_dim, value_dim = matrices.shape[1:]
        sizes = [rule.key_heads * key_dim, rule.key_heads * key_dim, heads * value_dim]
        query, key, value = (
            part.float().unflatten(1, (-1, dim))
            for part, dim in zip(mixed.split(sizes, 1), (key_dim, key_dim, value_dim), strict=True)
        )
        head_of = torch.arange(heads, device=mixed.device)
        head_of = head_of % rule.key_heads if rule.by_turns else head_of * rule.key_heads // heads
        query, key = (
            (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + 1e-6))[:, head_of] for part in (query, key)
        )
        writes, forgets = numbers.float().chunk(2, 1)
        writes, kept = writes.sigmoid(), torch.exp(-rule.rate * F.softplus(forgets + rule.offset))
        out = torch.empty_like(value)
        for span, keeps in spans_of(step):
            matrix = matrices[span.source].clone() if span.source >= 0 else torch.zeros_like(matrices[0])
            for number in range(span.tokens):
                at = span.first + number
                matrix *= kept[at, :, None, None]
                found = (matrix * key[at].unsqueeze(2)).sum(1)
                written = writes[at].unsqueeze(1) * (value[at] - found)
                matrix += key[at].unsqueeze(2) * written.unsqueeze(1)
                out[at] = (matrix * query[at].unsqueeze(2)).sum(1) * key_dim**-0.5
                if number + 1 in keeps:
                    matrices[keeps[number + 1]] = matrix
            matrices[span.target] = matrix
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + rule.eps) * rule.norm
        wide = gate.float()
        return (out.flatten(1) * wide * wide.sigmoid()).to(mixed.dtype)

    def repeat(
        self, key: Hashable, step: StepGeometry, attentions: Sequence[AttentionShape], run: Callable[[], Tensor]
    ) -> Tensor:
        """See Kernels; nothing is kept."""
        return run()

    def chain(self, *_: object) -> list[list[tuple[int, float]]]:
        """See Kernels; there are none."""
        return []


class ReferenceKernels(TorchKernels):
    """Every operation in float32 arithmetic, rounded to the input's dtype at its end."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019)."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), both in x's dtype."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """RoPE in place on query [T, H, D] and key [T, G, D]: dimension i is paired with i + R // 2."""
        positions = positions.clamp(max=len(cos) - 1)
        cos = cos[positions].unsqueeze(1)
        sin = sin[positions].unsqueeze(1)
        half = cos.shape[-1]
        for x in (query, key):
            first, second = x[..., :half].float(), x[..., half : 2 * half].float()
            turned = first * cos - second * sin, second * cos + first * sin  # both before either is overwritten
            x[..., :half], x[..., half : 2 * half] = turned

    def apply_gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """[T, 2 * F] -> [T, F]; see Gate."""
        opens, up = gate_up.float().chunk(2, dim=-1)
        opens, up = opens.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit) + gate.shift
        return (opens * torch.sigmoid(opens * (gate.slope + gate.cubic * opens * opens)) * up).to(gate_up.dtype)

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Write key and value [T, G, D] to slots [T] of the cache."""
        if cache.key_scales is not None:
            raise ValueError(f"the KV cache is int8, which the {self.name} kernels do not support; use --device cpu")
        block_size = cache.keys.shape[2]
        block, offset = slots // block_size, slots % block_size
        if cache.keys.dtype == torch.float8_e4m3fn:  # whose numbers torch cannot index
            keys, values = cache.keys.view(torch.uint8), cache.values.view(torch.uint8)
            keys[block, :, offset], values[block, :, offset] = (_rounded_to_float8(each) for each in (key, value))
            return
        cache.keys[block, :, offset] = key.to(cache.keys.dtype)
        cache.values[block, :, offset] = value.to(cache.values.dtype)

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        step: StepGeometry,
        scale: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        first: SinkQueries | None = None,
    ) -> Tensor:
        """Attention of query [T, H, D], sequence by sequence over its gathered context -> [T, H, D]."""
        out = query.new_empty(*query.shape[:2], cache.values.shape[3])
        start = 0
        for i in range(step.num_sequences):
            end = start + step.query_lens_host[i]
            context_len = step.context_lens_host[i]
            keys = _gather(cache.keys, step.block_tables[i], context_len)
            values = _gather(cache.values, step.block_tables[i], context_len)
            of_first = None if first is None else SinkQueries(first.rows[start:end], first.num_keys)
            out[start:end] = _attend(query[start:end], keys, values, scale, sliding_window, sinks, softcap, of_first)
            start = end
        return out

    def copy_blocks(self, caches: list[LayerCache], sources: list[int], targets: list[int]) -> None:
        """Block sources[i] of every layer is copied to block targets[i]; all reads come before all writes."""
        for blocks in (tensor.view(torch.uint8) for cache in caches for tensor in cache.tensors):
            blocks[targets] = blocks[sources]


def _choice(logits: Tensor, scores: Scores) -> Tensor:
    """The scores by which experts are chosen, [T, E]."""
    choice = logits.sigmoid() if scores.sigmoid else logits
    if scores.bias is not None:
        choice = (choice if scores.sigmoid else logits.softmax(1)) + scores.bias
    if scores.groups > 1:
        grouped = choice.unflatten(1, (scores.groups, -1))
        of_group = grouped.sort(dim=2, descending=True).values[..., : 1 + scores.sigmoid].sum(2)
        order = of_group.argsort(dim=1, descending=True, stable=True)[:, scores.best_groups :]
        choice = grouped.masked_fill(
            torch.zeros_like(of_group, dtype=torch.bool).scatter(1, order, True)[..., None], float("-inf")
        ).flatten(1)
    return choice


def spans_of(step: StepGeometry) -> list[tuple[Span, dict[int, int]]]:
    """The step's sequences as recurrent layers see them, and the slots of copies by the tokens that they are behind.

    Waits for the device.
    """
    if step.spans is None:
        raise ValueError("a step of a model with recurrent layers has no spans")
    (count, *_), *rows = step.spans.tolist()
    spans = [Span(*row) for row in rows]
    found = []
    for at, span in enumerate(spans[:count]):
        keeps, copy = {}, span
        while copy.kept_tokens:
            keeps[copy.kept_tokens] = copy.kept
            at += copy.further
            copy = spans[at] if copy.further else Span(0, 0, 0, 0)
        found.append((span, keeps))
    return found


def _gather(blocks: Tensor, table: Tensor, context_len: int) -> Tensor:
    """The first context_len tokens that table names in blocks [N, G, B, D], as float32 [G, context_len, D]."""
    block_size = blocks.shape[2]
    used = table[: -(-context_len // block_size)].long()
    taken = blocks.view(torch.uint8)[used].view(blocks.dtype)
    return taken.float().transpose(0, 1).flatten(1, 2)[:, :context_len]


def _rounded_to_float8(x: Tensor) -> Tensor:
    """The bytes of numbers in e4m3fn, which has none above 448."""
    return x.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    first: SinkQueries | None,
) -> Tensor:
    """softmax(q k^T scale) v of the last tokens of one context: query [Q, H, D], keys and values [G, C, D]."""
    num_queries, num_heads, _ = query.shape
    num_kv_heads, context_len, _ = keys.shape
    repeats = num_heads // num_kv_heads
    keys = keys.repeat_interleave(repeats, dim=0)
    values = values.repeat_interleave(repeats, dim=0)
    own = torch.arange(context_len - num_queries, context_len, device=query.device).unsqueeze(1)
    other = torch.arange(context_len, device=query.device).unsqueeze(0)
    hidden = other > own
    if sliding_window is not None:
        hidden |= (other <= own - sliding_window) & (other >= (0 if first is None else first.num_keys))
    scores = (query.float().transpose(0, 1) @ keys.transpose(1, 2)) * scale
    if first is not None:
        of_first = first.rows.float().transpose(0, 1) @ keys[:, : first.num_keys].transpose(1, 2)
        scores[..., : first.num_keys] = of_first * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, num_queries, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :context_len]
    return (weights @ values).transpose(0, 1).to(query.dtype)
