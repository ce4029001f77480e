"""What names the keys and values of a prompt that one engine has computed, and another one goes on with."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

# The environment variable with the key that servers sign handles with.
KEY_VARIABLE = "HEADWAY_KV_TRANSFER_KEY"


class Handle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where they are, and what they are of. Names are those of vLLM, as far as it has them."""

    # remote_host, remote_port: where the engine that has them gives them away.
    remote_host: str
    remote_port: int
    # Names them there. It is drawn for each prompt, so that no blocks that are used again for another prompt are found
    # by it.
    remote_request_id: str
    num_tokens: int  # tokens that are computed: all of the prompt but its last
    content: str  # hash of the tokens and of their salt
    layout: str  # hash of the model, and of how its blocks lie in memory
    signature: str = ""  # of all this, by those who know the key


def content_of(tokens: Sequence[int], salt: str) -> str:
    """The hash of tokens and their salt, as 32 hexadecimal digits."""
    found = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16)
    found.update(salt.encode())
    return found.hexdigest()
