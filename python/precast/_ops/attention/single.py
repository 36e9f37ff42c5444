# SPDX-License-Identifier: Apache-2.0
"""Attention of one request, planned and run in one call."""

from __future__ import annotations

from typing import Any, TypeAlias

from precast._base.device import get_device_sm_count
from precast._base.torch import torch
from precast._op.dispatch import Kernel
from precast._op.torch_ops import torch_ops
from precast._op.validation import check_rank
from precast._ops.attention import enums as words
from precast._ops.attention import heuristics as tiles
from precast._ops.attention import kernels
from precast._ops.attention.reference import CAUSAL
from precast._ops.attention.run import scales_of

Scale: TypeAlias = "float | torch.Tensor | None"

#: Bytes of a plan without those of its tiles.
_PLAN_BYTES = 1 << 16


def run_single(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    pos_encoding_mode: str,
    mask_mode: int,
    packed_mask: torch.Tensor | None,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    q_scale: Scale,
    k_scale: Scale,
    v_scale: Scale,
    o_dtype: torch.dtype,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs ``[tokens, heads, head_dim_vo]``, and log-sum-exps if asked for."""
    name = kernel.name
    if not q.dim() == k.dim() == v.dim() == 3:
        for argument, tensor in (("q", q), ("k", k), ("v", v)):
            check_rank(name, argument, tensor, 3, 3)
    words.check_rope(name, rope_scale, rope_theta)
    positions = words.pos_encoding(name, pos_encoding_mode)
    if words.check_kv_layout(name, kv_layout):
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    tokens, heads, head_dim_qk = q.shape
    kv_len, kv_heads, head_dim_vo = v.shape
    words.check_heads(name, heads, kv_heads)
    words.check_head_dims(name, head_dim_qk, head_dim_vo)
    words.check_dtypes(name, q.dtype, k.dtype, o_dtype)
    device = q.get_device()
    tile_rows = tiles.choose(tokens, tokens, heads, kv_heads, head_dim_vo, q.device)
    shape = (heads, kv_heads, head_dim_qk, head_dim_vo, k.element_size(), tile_rows)
    causal = mask_mode == CAUSAL
    compiling = torch.compiler.is_compiling()
    key = (q.dtype, k.dtype, head_dim_qk, head_dim_vo, device)
    run: Any = getattr(torch_ops, name) if compiling else kernel[key]
    plan: Any = torch_ops.plan if compiling else kernels.plan[(device,)]
    float_bytes, int_bytes = _workspace_bytes(
        q.device, tokens * (heads // kv_heads), tile_rows, head_dim_vo
    )
    ints = q.new_empty(int_bytes, dtype=torch.uint8)
    floats = q.new_empty(float_bytes, dtype=torch.uint8)
    bounds = _bounds(kv_len, q.device)
    plan(
        None,
        bounds,
        None,
        None,
        ints,
        floats,
        1,
        tokens,
        0,
        *shape,
        causal,
        window_left,
        -1,
        False,
        True,
    )
    scale = words.softmax_scale(sm_scale, head_dim_qk)
    scale, qk_factor, out_scale, v_factor = scales_of(name, scale, q_scale, k_scale, v_scale)
    into = q.new_empty((tokens, heads, head_dim_vo))
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None
    run(
        q,
        k,
        v,
        None,
        bounds,
        ints,
        floats,
        into,
        lse,
        tile_rows,
        causal,
        window_left,
        tokens,
        mask_mode,
        packed_mask,
        None if packed_mask is None else bounds,  # Starts with the 0 that is read.
        window_left,
        positions,
        words.alibi_slopes(heads, q.device) if positions == words.ALIBI else None,
        rope_scale or 1.0,
        rope_theta or 1e4,
        logits_soft_cap or 0.0,
        scale,
        out_scale,
        qk_factor,
        v_factor,
        None,
        None,
        None,
        0,
        None,
        True,
    )
    return into if o_dtype is q.dtype else into.to(o_dtype), lse


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
    kernel is asked for the exact numbers, so that ``torch.compile`` can trace.
    """
    sms = get_device_sm_count(device) if device.type == "cuda" else 0
    ctas = sms * tiles.MAX_CTAS_PER_SM
    slots = 2 * ctas * tile_rows * (head_dim_vo + 2)
    return 4 * slots, _PLAN_BYTES + 32 * (rows // tile_rows + 2)
