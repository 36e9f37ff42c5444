# SPDX-License-Identifier: Apache-2.0
"""The destination of the log: ``PRECAST_LOGDEST``."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast._base import env as _env
from precast._base.errors import EnvironmentVariableError

_FORMAT = "[%(asctime)s.%(msecs)03d] %(message)s"

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:  # The class takes no type argument before Python 3.11.
    _StreamHandler = logging.StreamHandler


class _Standard(_StreamHandler):
    """Writes to the current ``sys.stdout`` or ``sys.stderr``, which applications may replace."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._name = name

    @property
    def stream(self) -> Any:
        return getattr(sys, self._name)


_opening = threading.Lock()
_handler: logging.Handler | None = None


def _open() -> logging.Handler:
    place = _env.LOGDEST()
    handler: logging.Handler
    if place in ("stdout", "stderr"):
        handler = _Standard(place)
    else:
        path = Path(place.replace("%i", str(os.getpid())))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise EnvironmentVariableError(
                f"{_env.LOGDEST.name}={place!r} cannot be written: {error}. Fix: stdout, stderr or "
                f"a file in a folder of yours"
            ) from error
    handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    return handler


def write(text: str) -> None:
    """Write and flush, so that the text survives a crash of the process.

    Raises
    ------
    EnvironmentVariableError
        If the file of ``PRECAST_LOGDEST`` cannot be opened.
    """
    global _handler
    if _handler is None:
        with _opening:
            if _handler is None:
                _handler = _open()
    # No logger is used, because the application could configure it to drop lines.
    _handler.handle(
        logging.LogRecord("precast.api", logging.INFO, "", 0, text, args=None, exc_info=None)
    )


def close() -> None:
    """Close the file; the next line opens it again."""
    global _handler
    handler, _handler = _handler, None
    if handler is not None and not isinstance(handler, _Standard):
        handler.close()


def _after_fork() -> None:
    global _handler, _opening
    # The file of a child has another name; the parent's file stays open for the parent.
    _opening = threading.Lock()
    if not isinstance(_handler, _Standard):
        _handler = None


os.register_at_fork(after_in_child=_after_fork)
