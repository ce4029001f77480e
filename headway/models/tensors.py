"""The tensors of a checkpoint by name and shape. No torch: what they will take is asked before it is imported."""

from __future__ import annotations

from headway.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor that a checkpoint of this config holds, in the order of use.

    A matrix that is packed has a scale for each row beside it, under its own name with "_scale" at the end.
    """
    c = config.shape
    shapes: Shapes = {"model.embed_tokens.weight": (c.vocab, c.hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if config.packed is not None and config.packed.covers(name):
            shapes[f"{name}.weight_scale"] = (rows, 1)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for i, cache in enumerate(config.caches):
        layer = f"model.layers.{i}"
        query, key, value = c.heads * cache.key_dim, cache.heads * cache.key_dim, cache.heads * cache.value_dim
        shapes[f"{layer}.input_layernorm.weight"] = (c.hidden,)
        for part, rows in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
            linear(f"{layer}.self_attn.{part}", rows, c.hidden, c.qkv_bias)
        if c.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (cache.key_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (cache.key_dim,)
        linear(f"{layer}.self_attn.o_proj", c.hidden, c.heads * cache.value_dim, c.o_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (c.hidden,)
        linear(f"{layer}.mlp.gate_proj", c.ffn, c.hidden, c.mlp_bias)
        linear(f"{layer}.mlp.up_proj", c.ffn, c.hidden, c.mlp_bias)
        linear(f"{layer}.mlp.down_proj", c.hidden, c.ffn, c.mlp_bias)
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tied_embeddings:
        linear("lm_head", c.vocab, c.hidden, bias=False)
    return shapes
