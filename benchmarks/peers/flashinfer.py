# SPDX-License-Identifier: Apache-2.0
"""FlashInfer: the function of the same name, called the same way."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

PACKAGE = "flashinfer"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    for place in ("flashinfer", f"flashinfer.{family}"):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:  # FlashInfer itself is broken: say so
                raise
            continue
        function = getattr(module, case.op, None)
        if callable(function):
            return case.bind(function)
    return None
