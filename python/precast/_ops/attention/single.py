# SPDX-License-Identifier: Apache-2.0
"""Attention of one request, planned and run in one call.

``torch.compile`` sees one op: nothing outside of it holds the plan, or the workspaces that it lies
in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from precast._base.device import get_device_sm_count
from precast._base.torch import torch
from precast._op.dispatch import Kernel
from precast._op.mode import is_reference
from precast._op.torch_ops import torch_ops
from precast._op.validation import check_rank
from precast._ops.attention import heuristics as tiles
from precast._ops.attention import kernels, validation
from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.plan import (
    NO_ITEMS,
    NO_TABLES,
    AttentionPlan,
    Hints,
    Mask,
    Model,
    PlanShape,
    Scores,
    Tables,
)
from precast._ops.attention.reference_kernels import run_single_into
from precast._ops.attention.run import scales_of

Scale: TypeAlias = "float | torch.Tensor | None"

#: Bytes of a plan without those of its tiles.
_PLAN_BYTES = 1 << 16


class SingleKernel(Kernel):
    """The plan and the run of one request as one function, with the look-up of a kernel."""

    def __missing__(self, key: tuple[Any, ...]) -> Callable[..., None]:
        if is_reference():
            return self._run_reference
        function = functools.partial(_plan_and_run, kernels.run_ragged[key], key)
        self[key] = function
        if is_reference():  # Another thread entered reference mode meanwhile.
            self.clear()
        return function


def _as_given(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Keys and values before heads were moved behind tokens, and their layout."""
    if k.dim() == 3 and k.stride(0) < k.stride(1):
        return k.transpose(0, 1), v.transpose(0, 1), "HND"
    return k, v, "NHD"


def _public_decode(*args: Any) -> tuple[object, ...]:
    call = dict(zip(single_decode.parameters, args))
    positions = PosEncodingMode(int(call["pos_encoding"])).name
    return (
        *(call["q"].squeeze(0), *_as_given(call["k"], call["v"]), positions, False),
        *(None, call["qk_scale"], call["v_scale"], call["window_left"]),
        *(call["logits_soft_cap"], call["sm_scale"], call["rope_scale"], call["rope_theta"]),
        call["lse"] is not None,
    )


def _public_prefill(*args: Any) -> tuple[object, ...]:
    call = dict(zip(single_prefill.parameters, args))
    positions = PosEncodingMode(int(call["pos_encoding"])).name
    k, v, kv_layout = _as_given(call["k"], call["v"])
    return (
        *(call["q"], k, v, None, None, None, None, None, call["packed_mask"]),
        *(call["mask_mode"] == MaskMode.CAUSAL, kv_layout, positions, False, call["sm_scale"]),
        *(call["window_left"], call["logits_soft_cap"], call["rope_scale"], call["rope_theta"]),
        *("auto", call["lse"] is not None, None, call["qk_scale"], call["v_scale"]),
    )


def _single(name: str, public: Callable[..., tuple[object, ...]]) -> SingleKernel:
    return SingleKernel(
        "attention",
        "run_ragged",
        schema="(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, "
        "Tensor? packed_mask, int mask_mode, int pos_encoding, int window_left, "
        "float logits_soft_cap, float sm_scale, float rope_scale, float rope_theta, "
        "float out_scale, Tensor? qk_scale, Tensor? v_scale) -> ()",
        reference=run_single_into,
        key=lambda q, k, v, *others: (
            *(q.dtype, k.dtype, q.shape[-1], v.shape[-1], q.get_device()),
        ),
        public=public,
        name=name,
    )


single_decode = _single("single_decode_with_kv_cache", _public_decode)
single_prefill = _single("single_prefill_with_kv_cache", _public_prefill)


def run_single(
    kernel: SingleKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    scores: Scores,
    packed_mask: torch.Tensor | None,
    scales: tuple[Scale, Scale, Scale],
    o_dtype: torch.dtype,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs ``[tokens, heads, head_dim_vo]``, and log-sum-exps if asked for."""
    name = kernel.name
    if not q.dim() == k.dim() == v.dim() == 3:
        for argument, tensor in (("q", q), ("k", k), ("v", v)):
            check_rank(name, argument, tensor, 3, 3)
    validation.check_rope(name, scores.rope_scale, scores.rope_theta)
    positions = validation.pos_encoding(name, scores.pos_encoding_mode)
    if validation.check_kv_layout(name, kv_layout):
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    tokens, heads, head_dim_qk = q.shape
    _, kv_heads, head_dim_vo = v.shape
    validation.check_heads(name, heads, kv_heads)
    validation.check_head_dims(name, head_dim_qk, head_dim_vo)
    validation.check_dtypes(name, q.dtype, k.dtype, o_dtype)
    mask_mode = MaskMode.CAUSAL if scores.causal else MaskMode.NON_CAUSAL
    scale = validation.softmax_scale(scores.sm_scale, head_dim_qk)
    scale, qk_factor, out_scale, v_factor = scales_of(name, scale, *scales)
    into = q.new_empty((tokens, heads, head_dim_vo))
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None
    key = q.dtype, k.dtype, head_dim_qk, head_dim_vo, q.get_device()
    run: Any = getattr(torch_ops, name) if torch.compiler.is_compiling() else kernel[key]
    run(
        q,
        k,
        v,
        into,
        lse,
        packed_mask,
        int(mask_mode if packed_mask is None else MaskMode.CUSTOM),
        int(positions),
        scores.window_left,
        scores.logits_soft_cap or 0.0,
        scale,
        scores.rope_scale or 1.0,
        scores.rope_theta or 1e4,
        out_scale,
        qk_factor,
        v_factor,
    )
    return into if o_dtype is q.dtype else into.to(o_dtype), lse


def _plan_and_run(
    run: Callable[..., None],
    key: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
    mask_mode: int,
    pos_encoding: int,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
    rope_scale: float,
    rope_theta: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    tokens, heads, head_dim_qk = q.shape
    kv_len, kv_heads, head_dim_vo = v.shape
    tile_rows = tiles.choose(tokens, tokens, heads, kv_heads, head_dim_vo, q.device)
    causal = mask_mode == MaskMode.CAUSAL
    float_bytes, int_bytes = _workspace_bytes(
        q.device, tokens * (heads // kv_heads), tile_rows, head_dim_vo
    )
    bounds = _bounds(kv_len, q.device)
    plan = AttentionPlan(
        Model(q.dtype, k.dtype, q.dtype, key),
        PlanShape(
            1,
            tokens,
            tokens,
            0,
            heads,
            kv_heads,
            head_dim_qk,
            head_dim_vo,
            k.element_size(),
            tile_rows,
            causal,
            window_left,
        ),
        Scores(
            causal,
            window_left,
            logits_soft_cap,
            sm_scale,
            PosEncodingMode(pos_encoding).name,
            rope_scale,
            rope_theta,
        ),
        Tables(None, bounds),
        Mask(packed_mask, bounds, packed_mask is not None),  # Starts with the 0 that is read.
        NO_ITEMS,
        Hints(),
        False,
        q.new_empty(int_bytes, dtype=torch.uint8),
        q.new_empty(float_bytes, dtype=torch.uint8),
    )
    packed = kernels.pack(plan)
    kernels.launch(packed, NO_TABLES)
    run(q, k, v, out, lse, None, packed.block, 1.0, out_scale, qk_scale, v_scale, True)


def _bounds(tokens: int, device: torch.device) -> torch.Tensor:
    """``[0, tokens]``, made on the device."""
    if tokens == 0:
        return torch.zeros(2, dtype=torch.int32, device=device)
    return torch.arange(0, 2 * tokens, tokens, dtype=torch.int32, device=device)


def _workspace_bytes(
    device: torch.device, rows: int, tile_rows: int, head_dim_vo: int
) -> tuple[int, int]:
    """Bytes of the float and the int workspace that are enough for any number of tokens.

    With less room for partial results a plan divides less, so the first is a matter of speed. No
    kernel is asked for the exact numbers, which take a copy of lengths to the host.
    """
    sms = get_device_sm_count(device) if device.type == "cuda" else 0
    ctas = sms * tiles.MAX_CTAS_PER_SM
    slots = 2 * ctas * tile_rows * (head_dim_vo + 2)
    return 4 * slots, _PLAN_BYTES + 32 * (rows // tile_rows + 2)
