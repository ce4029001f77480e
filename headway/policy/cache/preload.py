"""Prompts that are computed before the first request comes, and whose blocks stay in the pool for good."""

from __future__ import annotations

from dataclasses import dataclass

from headway.policy.cache.kv_blocks import KVBlocks


@dataclass(frozen=True, slots=True)
class PreloadedPrompt:
    """A beginning that prompts share."""

    where: str  # what an error calls it, as the line of a file
    token_ids: list[int]
    cache_salt: str = ""  # the salt of the requests that begin so


def room_for(
    prompts: list[PreloadedPrompt], pool: KVBlocks, max_model_len: int
) -> tuple[list[PreloadedPrompt], list[str]]:
    """The prompts that fit in the protected part of a pool, in order, and beside the longest sequence.

    Returns:
        The prompts that fit; for each of the others, the reason why it does not.
    """
    if not pool.enable_prefix_caching:
        return [], [
            f"{each.where}: preloaded prompts need the prefix cache; leave them out, or --no-enable-prefix-caching"
            for each in prompts
        ]
    size, room = pool.block_size, pool.most_protected
    left = pool.num_blocks - pool.most_blocks(max_model_len)
    nodes: dict[tuple[int | str, tuple[int, ...]], int] = {}
    whole, ends = sum(group.window is None for group in pool.groups) if pool.groups else 1, 0
    fitting, refused = list[PreloadedPrompt](), list[str]()
    for prompt in prompts:
        before = len(nodes)
        parent: int | str = prompt.cache_salt
        for at in range(0, len(prompt.token_ids) // size * size, size):
            parent = nodes.setdefault((parent, tuple(prompt.token_ids[at : at + size])), len(nodes) + 1)
        pages = len(prompt.token_ids) // size
        # What windows see at the end of this prompt stays too.
        seen = sum(min(group.sinks + group.known, pages) for group in pool.groups)
        count = len(nodes) * whole + ends + seen
        needed = f"{prompt.where}: with this prompt of {len(prompt.token_ids)} tokens, {count} blocks must stay"
        if count > room:
            refused.append(
                f"{needed}, but only {room} of {pool.num_blocks} may (--protected-kv {pool.protected_share:g}); "
                "raise that or --kv-cache-memory, or shorten the prompts"
            )
        elif count > left:
            refused.append(
                f"{needed}, but beside a sequence of {max_model_len} tokens only {left} of {pool.num_blocks} are left; "
                "lower --max-model-len or raise --kv-cache-memory"
            )
        else:
            fitting.append(prompt)
            ends += seen
            continue
        while len(nodes) > before:
            nodes.popitem()
    return fitting, refused
