"""The tensors of a checkpoint by name and shape. No torch: what they will take is asked before it is imported."""

from __future__ import annotations

from headway.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor that a checkpoint of this config holds, in the order of use."""
    c = config
    query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for i in range(c.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (c.hidden_size,)
        for part, rows in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
            linear(f"{layer}.self_attn.{part}", rows, c.hidden_size, c.qkv_bias)
        if c.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (c.head_dim,)
        linear(f"{layer}.self_attn.o_proj", c.hidden_size, query, c.o_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (c.hidden_size,)
        linear(f"{layer}.mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
        linear(f"{layer}.mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
        linear(f"{layer}.mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes
