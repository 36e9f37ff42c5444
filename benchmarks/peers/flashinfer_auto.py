# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrappers with its default backend, on Hopper a kernel of its own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

PACKAGE = "flashinfer"

#: Wrappers, and the module of each.
OPS = {
    "BlockSparseAttentionWrapper": "sparse",
    "VariableBlockSparseAttentionWrapper": "sparse",
    "BatchMLAPagedAttentionWrapper": "mla",
}


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if family not in ("attention", "mla") or case.op not in OPS:
        return None
    module = importlib.import_module(f"{PACKAGE}.{OPS[case.op]}")
    return case.bind(functools.partial(getattr(module, case.op), backend="auto"))
