# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrappers with its default backend, on Hopper a kernel of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

PACKAGE = "flashinfer"

FAMILIES = ("attention", "attention_sm90", "mla")
OPS = (
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "BatchMLAPagedAttentionWrapper",
)


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if family not in FAMILIES or case.op not in OPS:
        return None
    import flashinfer

    return case.bind(functools.partial(getattr(flashinfer, case.op), backend="auto"))
