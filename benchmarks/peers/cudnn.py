# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention as torch calls it: prefills whose requests are all of one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "torch"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if case.op != "BatchPrefillWithRaggedKVCacheWrapper" or case.eager is None:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(*args: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return case.eager(*args)

    return run
