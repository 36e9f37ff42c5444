# SPDX-License-Identifier: Apache-2.0
"""Attention of one request, planned and run in one call.

``torch.compile`` sees one op: nothing outside of it holds the plan or its workspaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from precast._base.device import get_device_sm_count
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.export import Export
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
from precast._ops.attention.reference import attend, features_of, ragged_requests
from precast._ops.attention.reference_kernels import check_outputs_apart
from precast._ops.attention.run import scales_of

Scale: TypeAlias = "float | torch.Tensor | None"

#: Bytes of a plan without those of its tiles.
_PLAN_BYTES = 1 << 16

# -- the exports ----------------------------------------------------------------------------------


def _mask_mode(causal: bool, packed_mask: torch.Tensor | None) -> int:
    if packed_mask is not None:
        return int(MaskMode.CUSTOM)
    return int(MaskMode.CAUSAL if causal else MaskMode.NON_CAUSAL)


def _is_hnd(k: torch.Tensor) -> bool:
    """Whether heads came first before they were moved behind tokens."""
    return k.dim() == 3 and bool(k.stride(0) < k.stride(1))


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed_custom_mask: torch.Tensor | None,
    causal: bool,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
    rope_scale: float,
    rope_theta: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    features = features_of(
        q,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        packed_mask=packed_custom_mask,
        mask_indptr=torch.zeros(1, dtype=torch.int32),
        out_scale=out_scale,
        qk_scale=qk_scale,
        v_scale=v_scale,
    )
    requests = ragged_requests(k, v, [0, q.shape[0]], torch.tensor([0, k.shape[0]]))
    out, lse, _ = attend(q, requests, v.shape[-1], features)
    return out, lse


def _check(
    export: str, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    check_outputs_apart(export, out, lse, k=k, v=v)


def _export(
    name: str, masks: Mapping[str, Kind], derived: Mapping[str, Callable[..., Any]]
) -> Export:
    """The run of a plan that the call makes itself; ``masks`` are the kinds of its mask."""
    return Export(
        "attention",
        "run_ragged",
        "q:T=f16|bf16|f32[tokens,heads,head_dim_qk] k:U=e4m3|e5m2|T[kv_len,kv_heads,head_dim_qk] "
        "v:U[kv_len,kv_heads,head_dim_vo] out!:T[tokens,heads,head_dim_vo] lse!?:f32[tokens,heads] "
        "packed_custom_mask causal pos_encoding_mode window_left:int logits_soft_cap "
        "sm_scale:float rope_scale rope_theta out_scale:float qk_scale?:f32[.] v_scale?:f32[.]",
        kinds={
            "pos_encoding_mode": Kind(
                "int pos_encoding",
                f"_number({name!r}, {{name}})",
                decode=lambda number: PosEncodingMode(number).name,
                names={"_number": validation.pos_encoding},
            ),
            "logits_soft_cap": Kind("float {name}", "{name} or 0.0"),
            "rope_scale": Kind("float {name}", "{name} or 1.0"),
            "rope_theta": Kind("float {name}", "{name} or 1e4"),
            **masks,
        },
        derived={
            "k": lambda k: k.transpose(0, 1) if _is_hnd(k) else k,
            "v": lambda k, v: v.transpose(0, 1) if _is_hnd(k) else v,
            "kv_layout": lambda k: "HND" if _is_hnd(k) else "NHD",
            "k_scale": lambda qk_scale: qk_scale,
            # A scale is a number or on the device.
            "v_scale": lambda v_scale, out_scale: out_scale if v_scale is None else v_scale,
            "return_lse": lambda lse: lse is not None,
            **derived,
        },
        key="q.shape[-1], v.shape[-1], q.get_device()",
        around=_plan_and_run,
        reference=_reference,
        check=_check,
        torch_name=name,
    )


def run_single(
    export: Export,
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
    name = export.name
    if not q.dim() == k.dim() == v.dim() == 3:
        for argument, tensor in (("q", q), ("k", k), ("v", v)):
            check_rank(name, argument, tensor, 3, 3)
    validation.check_rope(name, scores.rope_scale, scores.rope_theta)
    validation.pos_encoding(name, scores.pos_encoding_mode)
    if validation.check_kv_layout(name, kv_layout):
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    tokens, heads, head_dim_qk = q.shape
    _, kv_heads, head_dim_vo = v.shape
    validation.check_heads(name, heads, kv_heads)
    validation.check_head_dims(name, head_dim_qk, head_dim_vo)
    validation.check_dtypes(name, q.dtype, k.dtype, o_dtype)
    scale = validation.softmax_scale(scores.sm_scale, head_dim_qk)
    scale, qk_factor, out_scale, v_factor = scales_of(name, scale, *scales)
    into = q.new_empty((tokens, heads, head_dim_vo))
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None
    export.launch(
        q,
        k,
        v,
        into,
        lse,
        *(() if export is single_decode else (packed_mask, scores.causal)),
        scores.pos_encoding_mode,
        scores.window_left,
        scores.logits_soft_cap,
        scale,
        scores.rope_scale,
        scores.rope_theta,
        out_scale,
        qk_factor,
        v_factor,
    )
    return into if o_dtype is q.dtype else into.to(o_dtype), lse


def _plan_and_run(
    run: Callable[..., None],
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
    block_m = tiles.choose(tokens, tokens, heads, kv_heads, (head_dim_qk, head_dim_vo), q.device)
    causal = mask_mode == MaskMode.CAUSAL
    float_bytes, int_bytes = _workspace_bytes(
        q.device, tokens * (heads // kv_heads), block_m, head_dim_vo
    )
    bounds = _bounds(kv_len, q.device)
    plan = AttentionPlan(
        Model(q.dtype, k.dtype, q.dtype, (q.get_device(),)),
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
            block_m,
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
    device: torch.device, rows: int, block_m: int, head_dim_vo: int
) -> tuple[int, int]:
    """Bytes of the float and the int workspace that are enough for any number of tokens.

    With less room for partial results a plan divides less, so the first is a matter of speed. No
    kernel is asked for the exact numbers, which take a copy of lengths to the host.
    """
    sms = get_device_sm_count(device) if device.type == "cuda" else 0
    ctas = sms * tiles.MAX_CTAS_PER_SM
    slots = 2 * ctas * block_m * (head_dim_vo + 2)
    return 4 * slots, _PLAN_BYTES + 32 * (rows // block_m + 2)


_NO_MASK = {
    "packed_custom_mask": Kind("Tensor? packed_mask", "None"),
    "causal": Kind("int mask_mode", "0", decode=bool),
}
_ANY_MASK = {
    "packed_custom_mask": Kind("Tensor? packed_mask"),
    "causal": Kind(
        "int mask_mode",
        "_mask_mode({name}, packed_custom_mask)",
        decode=lambda mode: mode == MaskMode.CAUSAL,
        names={"_mask_mode": _mask_mode},
    ),
}
single_decode = _export("single_decode_with_kv_cache", _NO_MASK, {"q": lambda q: q.squeeze(0)})
single_prefill = _export("single_prefill_with_kv_cache", _ANY_MASK, {})
