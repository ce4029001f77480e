"""Prompts that are computed before the first request comes, and whose blocks stay in the pool for good."""

from __future__ import annotations

from dataclasses import dataclass

from headway.policy.kv_blocks import KVBlocks


@dataclass(frozen=True, slots=True)
class PreloadedPrompt:
    """What prompts begin with.

    Args:
        where: what an error calls it, as the line of a file.
        cache_salt: of the requests that begin so.
    """

    where: str
    token_ids: list[int]
    cache_salt: str = ""


def check_room(prompts: list[PreloadedPrompt], pool: KVBlocks, max_model_len: int) -> None:
    """Refuse prompts that do not fit in the protected part of a pool, or leave no room for the longest sequence.

    Raises:
        ValueError: naming the first prompt that does not fit.
    """
    if prompts and not pool.enable_prefix_caching:
        raise ValueError(
            f"{prompts[0].where}: without the prefix cache nothing is kept; leave out the prompts, or have it"
        )
    size, room = pool.block_size, pool.most_protected
    left = pool.num_blocks - pool.blocks_for(max_model_len)
    nodes: dict[tuple[int | str, tuple[int, ...]], int] = {}
    for prompt in prompts:
        parent: int | str = prompt.cache_salt
        for at in range(0, len(prompt.token_ids) // size * size, size):
            parent = nodes.setdefault((parent, tuple(prompt.token_ids[at : at + size])), len(nodes) + 1)
        needed = (
            f"{prompt.where}: with this prompt of {len(prompt.token_ids)} tokens {len(nodes)} blocks are to be kept"
        )
        if len(nodes) > room:
            raise ValueError(
                f"{needed}, and {room} of {pool.num_blocks} may be (--protected-kv {pool.protected_share:g}); "
                "raise that or --kv-cache-memory, or shorten the prompts"
            )
        if len(nodes) > left:
            raise ValueError(
                f"{needed}, and beside a sequence of {max_model_len} tokens there are {left} of {pool.num_blocks}; "
                "lower --max-model-len or raise --kv-cache-memory"
            )
