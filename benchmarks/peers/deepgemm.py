# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM (PyPI ``sgl-deep-gemm``), which compiles a kernel at the first call of a shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "deep_gemm"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    multiply = FUNCTIONS.get(case.op)
    if multiply is None:
        return None
    import deep_gemm

    return lambda *args: multiply(deep_gemm, *args)


def _dense(library: Any, a: Any, b: Any, a_scale: Any, b_scale: Any, out: Any) -> Any:
    library.fp8_gemm_nt((a, a_scale), (b, b_scale), out)
    return out


def _indexed(
    library: Any, a: Any, b: Any, a_scale: Any, b_scale: Any, indices: Any, out: Any
) -> Any:
    library.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, indices)
    return out


def _counted(
    library: Any, a: Any, b: Any, a_scale: Any, b_scale: Any, counts: Any, out: Any
) -> Any:
    library.fp8_m_grouped_gemm_nt_masked((a, a_scale), (b, b_scale), out, counts, a.shape[1])
    return out


#: By our function; `group_gemm_fp8_nt_groupwise` has no counterpart.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gemm_fp8_nt_groupwise": _dense,
    "group_deepgemm_fp8_nt_groupwise": _indexed,
    "batch_deepgemm_fp8_nt_groupwise": _counted,
}
