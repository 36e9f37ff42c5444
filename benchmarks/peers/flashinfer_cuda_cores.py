# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's decode without tensor cores, which is its default."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

PACKAGE = "flashinfer"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if (family, case.op) != ("attention", "BatchDecodeWithPagedKVCacheWrapper"):
        return None
    import flashinfer

    return case.bind(functools.partial(getattr(flashinfer, case.op), use_tensor_cores=False))
