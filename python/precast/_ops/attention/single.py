# SPDX-License-Identifier: Apache-2.0
"""Plan and run attention of one request in one call.

``torch.compile`` sees one op: nothing outside of it holds the plan or its workspaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from precast._base.torch import torch
from precast._op.export import Export
from precast._op.validation import check_rank
from precast._ops.attention import heuristics as tiles
from precast._ops.attention import kernels, sm90, validation
from precast._ops.attention.buffers import alibi_slopes
from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.head_scales import has_heads, scale_queries
from precast._ops.attention.plan import NO_TABLES, PlanShape, ScoreOptions, Scores, new_block
from precast._ops.attention.reference import attend, features_of, ragged_requests
from precast._ops.attention.run import Scale, scales_of, scales_of_heads

#: Bytes of a plan without those of its tiles.
_PLAN_BYTES = 1 << 16
_FEATURES = (
    *("packed_mask", "window_left", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta"),
    *("out_scale", "qk_scale", "v_scale"),
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
    """Return outputs ``[tokens, heads, head_dim_vo]``, and log-sum-exps if asked for."""
    name = export.name
    if not q.dim() == k.dim() == v.dim() == 3:
        for argument, tensor in (("q", q), ("k", k), ("v", v)):
            check_rank(name, argument, tensor, 3, 3)
    validation.check_rope(name, scores.rope_scale, scores.rope_theta)
    validation.check_flags(name, causal=scores.causal, return_lse=return_lse)
    cap = scores.logits_soft_cap
    positions = validation.pos_encoding(name, scores.pos_encoding_mode)
    if validation.check_kv_layout(name, kv_layout):
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    tokens, heads, head_dim_qk = q.shape
    _, kv_heads, head_dim_vo = v.shape
    validation.check_heads(name, heads, kv_heads)
    validation.check_head_dims(name, head_dim_qk, head_dim_vo)
    computed = validation.computed_dtype(q.dtype, k.dtype, o_dtype)
    validation.check_dtypes(name, computed, k.dtype, o_dtype)
    if scores.sm_scale is not None:
        validation.number(name, "sm_scale", scores.sm_scale)
    scale = validation.softmax_scale(scores.sm_scale, head_dim_qk)
    scaled = None
    if computed is q.dtype:
        scale, qk_factor, out_scale, v_factor = scales_of(name, scale, *scales)
    else:
        scale, qk_factor, out_scale, v_factor = scales_of_heads(
            name, scale, (heads, kv_heads), q.device, *scales, where=": scale_{}"
        )
        dims = head_dim_qk, head_dim_vo
        if sm90.multiplies_fp8(
            (q.dtype, k.dtype, computed), heads, kv_heads, dims, tokens, q.device, positions
        ):
            export = single_prefill_fp8
        else:
            q, qk_factor = scale_queries(q, qk_factor, computed)
            if has_heads(v_factor):
                scaled, v_factor = v_factor, None
    into = q.new_empty((tokens, heads, head_dim_vo), dtype=computed)
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None
    mask_mode = MaskMode.CAUSAL if scores.causal else MaskMode.NON_CAUSAL
    export.launch(
        q,
        k,
        v,
        into,
        lse,
        packed_mask,
        int(mask_mode if packed_mask is None else MaskMode.CUSTOM),
        positions,
        scores.window_left,
        0.0 if cap is None else validation.number(name, "logits_soft_cap", cap),
        scale,
        scores.rope_scale or 1.0,
        scores.rope_theta or 1e4,
        out_scale,
        qk_factor,
        v_factor,
    )
    if scaled is not None:
        into *= scaled[:, None]
    return into if o_dtype is computed else into.to(o_dtype), lse


# -- exports --------------------------------------------------------------------------------------


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
    device, key = q.device, (q.get_device(),)
    block_m = tiles.choose(tokens, tokens, heads, kv_heads, (head_dim_qk, head_dim_vo), device)
    shape = PlanShape(
        batch_size=1,
        rows=tokens,
        q_len_per_req=tokens,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        kv_bytes=k.element_size(),
        block_m=block_m,
        causal=mask_mode == MaskMode.CAUSAL,
        window_left=window_left,
    )
    if q.dtype.itemsize == 1:  # run_single() has asked.
        shape = sm90.with_tile(shape)
    elif sm90.suits((q.dtype, k.dtype), shape, tokens, device):
        shape = sm90.with_tile(shape)
        run = kernels.run_ragged_sm90[q.dtype, k.dtype, head_dim_qk, head_dim_vo, key[0]]
    numbers = (mask_mode, window_left, pos_encoding, 0, logits_soft_cap, sm_scale)
    block = new_block(shape, ScoreOptions(False, *numbers, rope_scale, rope_theta))
    # Enough for any number of tokens: the exact numbers would take a copy of lengths to the host.
    int_bytes = _PLAN_BYTES + 32 * (tokens * (heads // kv_heads) // shape.block_m + 2)
    ints = q.new_empty(int_bytes, dtype=torch.uint8)
    floats = q.new_empty(tiles.partial_bytes(device, shape.block_m, head_dim_vo), dtype=torch.uint8)
    # [0, kv_len] in one launch; a range takes no step of 0.
    i32 = {"dtype": torch.int32, "device": device}
    bounds = torch.arange(0, 2 * kv_len, kv_len, **i32) if kv_len else torch.zeros(2, **i32)
    slopes = alibi_slopes(heads, device) if pos_encoding == PosEncodingMode.ALIBI else None
    mask = packed_mask, None if packed_mask is None else bounds  # The mask starts at byte 0.
    lengths = (bounds, None, None, None, None)
    kernels.pack_plan[key](*lengths, ints, floats, *mask, slopes, None, None, block)
    kernels.plan[key](ints, block, *NO_TABLES, True)
    run(q, k, v, out, lse, None, block, 1.0, out_scale, qk_scale, v_scale, True)


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_mode: int,
    pos_encoding: int,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    features = features_of(
        q,
        causal=mask_mode == MaskMode.CAUSAL,
        pos_encoding_mode=PosEncodingMode(pos_encoding).name,
        mask_indptr=torch.zeros(1, dtype=torch.int32),
        **{name: given[name] for name in _FEATURES},
    )
    requests = ragged_requests(k, v, [0, q.shape[0]], torch.tensor([0, k.shape[0]]))
    return attend(q, requests, v.shape[-1], features)[:2]


def _is_hnd(k: torch.Tensor) -> bool:
    """Whether heads came first before they were moved behind tokens."""
    return k.dim() == 3 and bool(k.stride(0) < k.stride(1))


#: Up to the sizes of the output.
_TENSORS = (
    "q:T=f16|bf16|f32[tokens,heads,head_dim_qk] k:U=e4m3|e5m2|T[kv_len,kv_heads,head_dim_qk] "
    "v:U[kv_len,kv_heads,head_dim_vo] out!:T"
)


def _export(
    name: str,
    export: tuple[str, str] = ("attention", "run_ragged"),
    tensors: str = _TENSORS,
    scales: str = "qk_scale?:f32[.] v_scale?:f32[.]",
    torch_name: str = "",
    derived: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Export:
    """Declare a run whose call makes its plan itself; ``derived`` are more public arguments."""
    return Export(
        *export,
        f"{tensors}[tokens,heads,head_dim_vo] lse!?:f32[tokens,heads] "
        "packed_mask?:u8[bytes] mask_mode:int pos_encoding:int window_left:int "
        "logits_soft_cap:float(finite) sm_scale:float(finite) rope_scale:float(positive) "
        f"rope_theta:float(positive) out_scale:float(finite) {scales}",
        derived={
            "k": lambda k: k.transpose(0, 1) if _is_hnd(k) else k,
            "v": lambda k, v: v.transpose(0, 1) if _is_hnd(k) else v,
            "kv_layout": lambda k: "HND" if _is_hnd(k) else "NHD",
            "pos_encoding_mode": lambda pos_encoding: PosEncodingMode(pos_encoding).name,
            "k_scale": lambda qk_scale: qk_scale,
            # A scale is a number or on the device.
            "v_scale": lambda v_scale, out_scale: out_scale if v_scale is None else v_scale,
            "return_lse": lambda lse: lse is not None,
            **derived,
        },
        key="q.shape[-1], v.shape[-1], q.get_device()",
        around=_plan_and_run,
        reference=_reference,
        function=name,
        torch_name=torch_name or name,
    )


#: A decode has neither a mask nor a choice of one.
single_decode = _export(
    "single_decode_with_kv_cache",
    derived={"q": lambda q, packed_mask, mask_mode: q.squeeze(0)},
)
_PREFILL: dict[str, Callable[..., Any]] = {
    "causal": lambda mask_mode: mask_mode == MaskMode.CAUSAL,
    "packed_custom_mask": lambda packed_mask: packed_mask,
}
single_prefill = _export("single_prefill_with_kv_cache", derived=_PREFILL)
#: Of queries, keys and values in e4m3, on Hopper.
single_prefill_fp8 = _export(
    "single_prefill_with_kv_cache",
    ("attention_sm90_fp8", "run_ragged_sm90_fp8"),
    "q:e4m3[tokens,heads,head_dim_qk] k:e4m3[kv_len,kv_heads,head_dim_qk] "
    "v:e4m3[kv_len,kv_heads,head_dim_vo] out!:T=f16|bf16",
    "qk_scale?:f32[qk_scales] v_scale?:f32[v_scales]",
    "single_prefill_with_kv_cache_fp8",
    _PREFILL,
)
