# SPDX-License-Identifier: Apache-2.0
"""cuBLAS's products of 8 bits as torch calls them, with one scale for each matrix.

They have no scales of blocks: the results differ, and the time is that of less work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "torch"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if case.op != "gemm_fp8_nt_groupwise":
        return None
    import torch

    one = torch.ones((), device="cuda")

    def multiply(a: Any, b: Any, a_scale: Any, b_scale: Any, out: Any) -> Any:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=out.dtype, out=out)

    return multiply
