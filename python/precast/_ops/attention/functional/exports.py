# SPDX-License-Identifier: Apache-2.0
"""Declare the exports of functions that plan and run in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from precast._op.export import Export
from precast._ops.attention.functional.calls import PagedCall, RaggedCall, Words, given_of
from precast._ops.attention.functional.checks import check_paged, check_ragged
from precast._ops.attention.functional.launch import run_paged, run_ragged
from precast._ops.attention.functional.reference import write_paged, write_ragged
from precast._ops.paged._cache import LAYOUT_KIND, joined

_Q = "T=f16|bf16|f32"
_SCALES = (
    "logits_soft_cap:float(finite) is_alibi:bool sm_scale:float(finite) out_scale:float(finite) "
    "qk_scale?:f32[.] v_scale?:f32[.] enable_pdl:"
)

#: Public arguments of a function over a block table, whose scores have no more options.
DERIVED: dict[str, Callable[..., Any]] = {
    "kv_cache": joined,
    # A scale is a number or on the device.
    "bmm1_scale": lambda sm_scale, qk_scale, causal, logits_soft_cap, is_alibi: (
        sm_scale if qk_scale is None else qk_scale
    ),
    "bmm2_scale": lambda out_scale, v_scale: out_scale if v_scale is None else v_scale,
}


def _pdl(w: Words) -> str:
    return "pdl" if w.has_pdl else "pdl_on"


def _rows(w: Words, is_fp8: bool = False) -> tuple[str, str, str]:
    """Return the declarations of queries and of outputs with a log-sum-exp, and dtypes of keys."""
    query, out, keys = ("e4m3", "T=f16|bf16", "e4m3") if is_fp8 else (_Q, "T", "U=e4m3|e5m2|T")
    return (
        f"{w.query}:{query}[tokens,heads,head_dim_qk]",
        f"{w.out}!:{out}[tokens,heads,head_dim_vo] lse!?:f32[tokens,heads]",
        keys,
    )


def paged_export(
    w: Words,
    derived: Mapping[str, Callable[..., Any]] = DERIVED,
    name: str = "",
    is_fp8: bool = False,
) -> Export:
    """Declare attention over a block table; ``derived`` are public arguments of the function.

    ``name`` is that of the torch op. Default: the function's. ``is_fp8``: queries, keys and values
    are e4m3, on Hopper.
    """
    query, out, keys = _rows(w, is_fp8)
    name = name or w.function
    return Export(
        *(("attention_sm90_fp8", "run_paged_sm90_fp8") if is_fp8 else ("attention", "run_paged")),
        f"{query} k_cache:{keys} v_cache?:{keys.split('=')[0]} {out} {w.workspace}!:u8|i8[bytes] "
        f"{w.tables}:i32[table_rows,table_width] {w.lens}:i32[batch] {w.q_bounds}?:i32[batch+1] "
        f"{w.mask}?:u16[tokens,({w.q_len}+31)//32*2] {w.sinks}?:f32[heads] "
        f"kv_layout {w.q_len}:int causal:bool window_left:int {_SCALES}{_pdl(w)}",
        kinds=LAYOUT_KIND,
        key=f"{w.query}.shape[-1], (k_cache if v_cache is None else v_cache).shape[-1], "
        f"{w.query}.get_device()",
        around=functools.partial(run_paged, w),
        write=lambda **given: write_paged(_paged(w, given)),
        check=lambda **given: check_paged(w, _paged(w, given)),
        function=w.function,
        torch_name=f"{name}_fp8" if is_fp8 else name,
        derived=derived,
    )


def ragged_export(w: Words, derived: Mapping[str, Callable[..., Any]], name: str) -> Export:
    """Declare attention over ragged keys and values."""
    query, out, keys = _rows(w)
    return Export(
        "attention",
        "run_ragged",
        f"{query} k:{keys}[rows,kv_heads,head_dim_qk] v:U[rows,kv_heads,head_dim_vo] {out} "
        f"{w.workspace}!:u8|i8[bytes] {w.q_bounds}:i32[bounds] {w.kv_bounds}:i32[bounds] "
        f"{w.sinks}?:f32[heads] {w.q_len}:int causal:bool window_left:int {_SCALES}{_pdl(w)}",
        key=f"{w.query}.shape[-1], v.shape[-1], {w.query}.get_device()",
        around=functools.partial(run_ragged, w),
        write=lambda **given: write_ragged(given_of(RaggedCall, w, given)),
        check=lambda **given: check_ragged(w, given_of(RaggedCall, w, given)),
        function=w.function,
        torch_name=name,
        derived=derived,
    )


def _paged(w: Words, given: dict[str, Any]) -> PagedCall:
    """Return a call from declared arguments."""
    is_hnd = given["kv_layout"] == "HND"
    call: PagedCall = given_of(PagedCall, w, {**given, "is_hnd": is_hnd})
    return call
