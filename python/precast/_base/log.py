# SPDX-License-Identifier: Apache-2.0
"""The logger ``precast``, whose INFO lines are shown even if logging is not configured."""

from __future__ import annotations

import logging
import sys


class _FallbackHandler(logging.Handler):
    """Writes to standard error unless the application has installed a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        own = [h for h in logging.getLogger("precast").handlers if h is not self]
        if own or logging.getLogger().handlers:
            return
        print(f"precast: {record.levelname}: {record.getMessage()}", file=sys.stderr, flush=True)


def get_logger() -> logging.Logger:
    """The logger of precast, with its fallback handler and level INFO if none was set."""
    logger = logging.getLogger("precast")
    if not any(isinstance(handler, _FallbackHandler) for handler in logger.handlers):
        logger.addHandler(_FallbackHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    return logger
