# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM (PyPI ``sgl-deep-gemm``), which compiles a kernel at the first call of a shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "deep_gemm"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if case.op != "gemm_fp8_nt_groupwise":
        return None
    import deep_gemm

    def multiply(a: Any, b: Any, a_scale: Any, b_scale: Any, out: Any) -> Any:
        deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out)
        return out

    return multiply
