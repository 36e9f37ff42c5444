# SPDX-License-Identifier: Apache-2.0
"""Reference mode: run the plain PyTorch references instead of the kernels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from precast._base import env as _env

_lock = threading.Lock()
_depth = 0
#: Called whenever the mode changes, so that tables of loaded functions are cleared.
_listeners: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    _listeners.append(listener)


def is_reference() -> bool:
    """Whether ops run their references: ``PRECAST_REFERENCE=1`` or inside ``reference_mode()``."""
    return _depth > 0 or _env.REFERENCE()


@contextlib.contextmanager
def reference_mode() -> Iterator[None]:
    """Run the plain PyTorch reference of every op inside this block, on CPU tensors, too.

    The mode applies to all threads of the process. ``PRECAST_REFERENCE=1``, set before the first
    call, has the same effect for the whole run.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.scale(torch.ones(2), 3.0)
    tensor([3., 3.])
    """
    _shift(+1)
    try:
        yield
    finally:
        _shift(-1)


def _shift(by: int) -> None:
    global _depth
    with _lock:
        _depth += by
        for listener in _listeners:
            listener()
