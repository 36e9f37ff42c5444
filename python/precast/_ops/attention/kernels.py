# SPDX-License-Identifier: Apache-2.0
"""The exports of the modules ``attention`` and ``attention_plan``, and their references."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.dispatch import Kernel
from precast._op.mode import is_reference
from precast._ops.attention import planning
from precast._ops.attention import validation as refusals
from precast._ops.attention.enums import PosEncodingMode
from precast._ops.attention.reference import (
    CAUSAL,
    DEFAULTS,
    attend,
    paged_requests,
    ragged_requests,
    row_bounds,
)
from precast._ops.paged._cache import entries_of, halves


def _write(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    values, sums, used = results
    out[used] = values[used].to(out.dtype)
    if lse is not None:
        lse[used] = sums[used].to(lse.dtype)


def _run_paged_into(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    hnd: bool,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    int_workspace: torch.Tensor,
    float_workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tile_rows: int,
    plan_causal: bool,
    plan_window_left: int,
    q_len_per_req: int,
    mask_mode: int,
    packed_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    window_left: int,
    pos_encoding: int,
    alibi_slopes: torch.Tensor | None,
    rope_scale: float,
    rope_theta: float,
    logits_soft_cap: float,
    sm_scale: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    prefix_len: torch.Tensor | None,
    token_pos: torch.Tensor | None,
    token_pos_len: int,
    max_item_len: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    cache = k_cache if v_cache is None else (k_cache, v_cache)
    refusals.check_paged(q, cache, hnd, kv_indptr, kv_indices, kv_last_page_len, kv_len)
    keys, values = (entries_of(part, hnd) for part in halves(cache))
    workspaces = {"int_workspace": int_workspace, "float_workspace": float_workspace}
    caches = (
        {"paged_kv_cache": k_cache}
        if v_cache is None
        else {"paged_kv_cache[0]": k_cache, "paged_kv_cache[1]": v_cache}
    )
    refusals.check_outputs(
        "run_paged", q, values.shape[-1], out, lse, sinks, **caches, **workspaces
    )
    refusals.check_plan("run_paged", plan_causal, mask_mode, plan_window_left, window_left)
    refusals.check_rope("run_paged", pos_encoding, rope_scale, rope_theta)
    batch = kv_indptr.numel() - 1
    refusals.check_items("run_paged", mask_mode, prefix_len, token_pos, token_pos_len, batch)
    bounds = row_bounds(qo_indptr, q_len_per_req, batch)
    features = {name: value for name, value in locals().items() if name in DEFAULTS}
    requests = paged_requests(keys, values, bounds, kv_indptr, kv_indices, kv_last_page_len, kv_len)
    _write(out, lse, attend(q, requests, values.shape[-1], features))


def _run_ragged_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    int_workspace: torch.Tensor,
    float_workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tile_rows: int,
    plan_causal: bool,
    plan_window_left: int,
    q_len_per_req: int,
    mask_mode: int,
    packed_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    window_left: int,
    pos_encoding: int,
    alibi_slopes: torch.Tensor | None,
    rope_scale: float,
    rope_theta: float,
    logits_soft_cap: float,
    sm_scale: float,
    out_scale: float,
    qk_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    prefix_len: torch.Tensor | None,
    token_pos: torch.Tensor | None,
    token_pos_len: int,
    max_item_len: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    refusals.check_ragged(q, k, v, kv_indptr)
    workspaces = {"int_workspace": int_workspace, "float_workspace": float_workspace}
    refusals.check_outputs("run_ragged", q, v.shape[-1], out, lse, sinks, k=k, v=v, **workspaces)
    refusals.check_plan("run_ragged", plan_causal, mask_mode, plan_window_left, window_left)
    refusals.check_rope("run_ragged", pos_encoding, rope_scale, rope_theta)
    batch = kv_indptr.numel() - 1
    refusals.check_items("run_ragged", mask_mode, prefix_len, token_pos, token_pos_len, batch)
    bounds = row_bounds(qo_indptr, q_len_per_req, batch)
    features = {name: value for name, value in locals().items() if name in DEFAULTS}
    requests = ragged_requests(k, v, bounds, kv_indptr)
    _write(out, lse, attend(q, requests, v.shape[-1], features))


_SCORES = (
    "int tile_rows, bool plan_causal, int plan_window_left, int q_len_per_req, int mask_mode, "
    "Tensor? packed_mask, Tensor? mask_indptr, int window_left, int pos_encoding, "
    "Tensor? alibi_slopes, float rope_scale, float rope_theta, "
    "float logits_soft_cap, float sm_scale, float out_scale, Tensor? qk_scale, Tensor? v_scale, "
    "Tensor? sinks, Tensor? prefix_len, Tensor? token_pos, int token_pos_len, "
    "Tensor? max_item_len, bool enable_pdl) -> ()"
)
_WRITTEN = "Tensor(a!) int_workspace, Tensor(b!) float_workspace, Tensor(c!) out, Tensor(d!)? lse, "


def _key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, *others: object
) -> tuple[object, ...]:
    head_dim_vo = (k if v is None else v).shape[-1]
    return q.dtype, k.dtype, q.shape[-1], head_dim_vo, q.get_device()


def _as_given(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Keys and values before heads were moved behind tokens, and their layout."""
    if k.dim() == 3 and k.stride(0) < k.stride(1):
        return k.transpose(0, 1), v.transpose(0, 1), "HND"
    return k, v, "NHD"


def _single_decode_call(*args: Any) -> tuple[object, ...]:
    call = dict(zip(single_decode.parameters, args))
    positions = PosEncodingMode(int(call["pos_encoding"])).name
    return (
        *(call["q"].squeeze(0), *_as_given(call["k"], call["v"]), positions, False),
        *(None, call["qk_scale"], call["v_scale"], call["window_left"]),
        *(call["logits_soft_cap"], call["sm_scale"], call["rope_scale"], call["rope_theta"]),
        call["lse"] is not None,
    )


def _single_prefill_call(*args: Any) -> tuple[object, ...]:
    call = dict(zip(single_prefill.parameters, args))
    positions = PosEncodingMode(int(call["pos_encoding"])).name
    k, v, kv_layout = _as_given(call["k"], call["v"])
    return (
        *(call["q"], k, v, None, None, None, None, None, call["packed_mask"]),
        *(call["mask_mode"] == CAUSAL, kv_layout, positions, False, call["sm_scale"]),
        *(call["window_left"], call["logits_soft_cap"], call["rope_scale"], call["rope_theta"]),
        *("auto", call["lse"] is not None, None, call["qk_scale"], call["v_scale"]),
    )


_RAGGED = (
    "(Tensor q, Tensor k, Tensor v, Tensor? qo_indptr, Tensor kv_indptr, " + _WRITTEN + _SCORES
)

run_paged = Kernel(
    "attention",
    "run_paged",
    schema="(Tensor q, Tensor k_cache, Tensor? v_cache, bool hnd, Tensor? qo_indptr, "
    "Tensor kv_indptr, Tensor kv_indices, Tensor? kv_last_page_len, Tensor? kv_len, "
    f"{_WRITTEN}{_SCORES}",
    reference=_run_paged_into,
    key=_key,
    public=lambda *args: None,  # What plan() was given is not among them.
    function="BatchPrefillWithPagedKVCacheWrapper",
)
run_ragged = Kernel(
    "attention",
    "run_ragged",
    schema=_RAGGED,
    reference=_run_ragged_into,
    key=_key,
    public=lambda *args: None,
    function="BatchPrefillWithRaggedKVCacheWrapper",
)
single_decode = Kernel(
    "attention",
    "run_ragged",
    schema=_RAGGED,
    reference=_run_ragged_into,
    key=_key,
    public=_single_decode_call,
    name="single_decode_with_kv_cache",
)
single_prefill = Kernel(
    "attention",
    "run_ragged",
    schema=_RAGGED,
    reference=_run_ragged_into,
    key=_key,
    public=_single_prefill_call,
    name="single_prefill_with_kv_cache",
)
_PLANNED = (
    "int batch_size, int q_len_per_req, int page_size, int num_qo_heads, int num_kv_heads, "
    "int head_dim_qk, int head_dim_vo, int kv_bytes, int tile_rows, bool causal, int window_left, "
    "int fixed_split_size, bool disable_split_kv, "
)
plan = Kernel(
    "attention_plan",
    "plan",
    schema="(Tensor? qo_indptr, Tensor kv_indptr, Tensor? kv_last_page_len, Tensor? kv_len, "
    f"Tensor(a!) int_workspace, Tensor(b!) float_workspace, {_PLANNED}bool enable_pdl) -> ()",
    reference=planning.plan_into,
    key=lambda qo_indptr, kv_indptr, *others: (kv_indptr.get_device(),),
    public=lambda *args: None,
    function="BatchPrefillWithPagedKVCacheWrapper",
)
fill_and_plan = Kernel(
    "attention_plan",
    "fill_and_plan",
    schema="(Tensor? qo_indptr, Tensor kv_indptr, Tensor? kv_last_page_len, Tensor? kv_indices, "
    "Tensor(a!)? qo_indptr_buffer, Tensor(b!)? kv_indptr_buffer, "
    "Tensor(c!)? kv_last_page_len_buffer, Tensor(d!)? kv_indices_buffer, "
    f"Tensor(e!) int_workspace, Tensor(f!) float_workspace, {_PLANNED}bool enable_pdl) -> ()",
    reference=planning.fill_and_plan_into,
    key=lambda qo_indptr, kv_indptr, *others: (kv_indptr.get_device(),),
    public=lambda *args: None,
    function="BatchPrefillWithPagedKVCacheWrapper",
)
workspace_size = Kernel(
    "attention_plan",
    "workspace_size",
    schema="(Tensor? qo_indptr, Tensor kv_indptr, Tensor? kv_last_page_len, Tensor? kv_len, "
    f"Tensor(a!) sizes, {_PLANNED}int sm_count) -> ()",
    reference=planning.workspace_size_into,
    key=lambda *args: (0,),
    public=lambda *args: None,
    function="BatchPrefillWithPagedKVCacheWrapper",
)


def workspace_bytes(
    device: torch.device,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    *options: Any,
) -> tuple[int, int]:
    """Bytes of the float and the int workspace; the options as of the export, behind ``sizes``."""
    from precast._base.device import get_device_sm_count

    if is_reference():
        return 0, 0
    lengths = qo_indptr, kv_indptr, kv_last_page_len
    on_host = (None if t is None else t.to("cpu", torch.int32) for t in lengths)
    sizes = torch.zeros(3, dtype=torch.int64)
    sm_count = get_device_sm_count(device) if device.type == "cuda" else 0
    workspace_size[(device.index or 0,)](*on_host, None, sizes, *options, sm_count)
    float_bytes, int_bytes, _ = sizes.tolist()
    return float_bytes, int_bytes
