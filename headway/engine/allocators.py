"""What the allocators of this process hold: memory in use, and free memory that they keep for what comes next."""

from __future__ import annotations

import ctypes
import sys


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and newer; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def held() -> dict[str, int]:
    """Bytes by allocator and state, such as `malloc used` and `cuda free`; without an allocator that does not tell."""
    found: dict[str, int] = {}
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Mallinfo2
        told = libc.mallinfo2()
        found |= {"malloc used": told.uordblks + told.hblkhd, "malloc free": told.fordblks}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        used, whole = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        found |= {"cuda used": used, "cuda free": whole - used}
    return found
