# SPDX-License-Identifier: Apache-2.0
"""Reference mode: run the plain PyTorch references instead of the kernels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from precast._base import env as _env
from precast._base.errors import EnvironmentVariableError

_lock = threading.Lock()
_depth = 0
_known = False  # What followers have been told.
#: Called whenever the mode changes, so that tables of loaded functions are cleared.
_listeners: list[Callable[[], None]] = []


#: Globals of functions that read ``_reference``, which costs less than a call.
_followers: list[dict[str, Any]] = []


def on_change(listener: Callable[[], None]) -> None:
    _listeners.append(listener)


def is_reference() -> bool:
    """Whether ops run their references: ``PRECAST_REFERENCE=1`` or inside ``reference_mode()``."""
    return _depth > 0 or _env.REFERENCE()


def follow(names: dict[str, Any]) -> None:
    """Keep ``names["_reference"]`` up to date."""
    with _lock:
        _followers.append(names)
        names["_reference"] = _known or _is_on()


def tell_followers() -> None:
    """Tell all of the mode, which may have changed with the environment variable."""
    with _lock:
        _tell()


def _tell() -> None:
    global _known
    now = _is_on()
    if now != _known:
        _known = now
        for names in _followers:
            names["_reference"] = now


def _is_on() -> bool:
    try:
        return is_reference()
    except EnvironmentVariableError:  # Raised again by the call that needs to know.
        return False


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
        _tell()
        for listener in _listeners:
            listener()
