"""A second signal ends a process that is too busy to notice the first."""

from __future__ import annotations

import contextlib
import ctypes

_SA_RESETHAND = 0x80000000


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux's C libraries."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_uint32),
        ("restorer", ctypes.c_void_p),
    )


def kill_at_the_next(number: int) -> None:
    """Let the kernel end the process at the signal after the next one, unless a handler is installed in between.

    Python runs its handlers between two instructions of its own. A call that takes for ever lets none run; but the
    kernel forgets the handler with the first signal, and ends the process with the second.
    """
    action = _Action()
    with contextlib.suppress(AttributeError):  # another C library: then both signals wait for Python
        sigaction = ctypes.CDLL(None).sigaction
        if sigaction(int(number), None, ctypes.byref(action)) == 0:
            action.flags |= _SA_RESETHAND
            sigaction(int(number), ctypes.byref(action), None)
