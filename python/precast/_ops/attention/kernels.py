# SPDX-License-Identifier: Apache-2.0
"""The modules ``attention`` and ``attention_plan`` export what is declared and called here."""

from __future__ import annotations

import functools
from typing import Any

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.export import Export
from precast._op.scalars import RAW_KINDS
from precast._ops.attention import reference_kernels as references
from precast._ops.attention.buffers import alibi_slopes
from precast._ops.attention.enums import MaskMode
from precast._ops.attention.plan import (
    AttentionPlan,
    PlanShape,
    Tables,
    new_block,
    plan_of,
    read_block,
)
from precast._ops.attention.validation import number, pos_encoding

_BATCH, _BOUNDS = "i32[block.shape.batch_size]", "i32[block.shape.batch_size+1]"
_HEADS = "block.shape.num_qo_heads"
_Q = f"q:T=f16|bf16|f32[rows,{_HEADS},block.shape.head_dim_qk]"
_RUN = (
    f"out!:T[rows,{_HEADS},block.shape.head_dim_vo] lse!?:f32[rows,{_HEADS}] sinks?:f32[{_HEADS}] "
    f"block sm_factor:float out_scale:float(finite) qk_scale?:f32[.] v_scale?:f32[.] "
    f"enable_pdl:pdl"
)


#: The ops of runs.
_OPS = {
    "run_paged": "attention",
    "run_ragged": "attention",
    "run_paged_sm90": "attention_sm90",
    "run_ragged_sm90": "attention_sm90",
    "run_paged_sm90_fp8": "attention_sm90_fp8",
    "run_ragged_sm90_fp8": "attention_sm90_fp8",
    "run_paged_nvfp4": "attention_nvfp4",
}


def _export(
    name: str,
    declaration: str,
    function: str = "BatchPrefillWithPagedKVCacheWrapper",
    is_packed: bool = True,
    **more: Any,
) -> Export:
    """Declare an export whose ``block`` stands for a plan, or before packing for its numbers."""
    decode = functools.partial(plan_of, name) if is_packed else read_block
    return Export(
        _OPS.get(name, "attention_plan"),
        name,
        declaration,
        kinds={"block": Kind("Tensor{w} {name}", decode=decode)},
        function=function,
        error_name=name,
        traced=False,  # What plan() was given is not among the arguments.
        reads_host=True,  # The params block.
        **more,
    )


run_paged = _export(
    "run_paged",
    f"{_Q} k_cache:U=e4m3|e5m2|T v_cache?:U {_RUN}",
    key="q.shape[-1], (k_cache if v_cache is None else v_cache).shape[-1], q.get_device()",
    write=references.run,
    check=references.check_run,
)
run_ragged = _export(
    "run_ragged",
    f"{_Q} k:U=e4m3|e5m2|T[tokens,block.shape.num_kv_heads,block.shape.head_dim_qk] "
    f"v:U[tokens,block.shape.num_kv_heads,block.shape.head_dim_vo] {_RUN}",
    "BatchPrefillWithRaggedKVCacheWrapper",
    key="q.shape[-1], v.shape[-1], q.get_device()",
    write=references.run,
    check=references.check_run,
)
run_paged_sm90 = _export(
    "run_paged_sm90",
    f"{_Q.replace('|f32', '')} k_cache:U=e4m3|T v_cache?:U {_RUN}",
    key="q.shape[-1], out.shape[-1], q.get_device()",
    write=references.run,
    check=references.check_run,
)
run_ragged_sm90 = _export(
    "run_ragged_sm90",
    f"{_Q.replace('|f32', '')} k:U=e4m3|T[tokens,block.shape.num_kv_heads,block.shape.head_dim_qk] "
    f"v:U[tokens,block.shape.num_kv_heads,block.shape.head_dim_vo] {_RUN}",
    "BatchPrefillWithRaggedKVCacheWrapper",
    key="q.shape[-1], out.shape[-1], q.get_device()",
    write=references.run,
    check=references.check_run,
)
# Of queries, keys and values in e4m3. A scale is one number, or one for each query head.
_Q_FP8 = _Q.replace("T=f16|bf16|f32", "e4m3")
_RUN_FP8 = (
    _RUN.replace("out!:T", "out!:T=f16|bf16")
    .replace("qk_scale?:f32[.]", "qk_scale?:f32")
    .replace("v_scale?:f32[.]", "v_scale?:f32")
)
run_paged_sm90_fp8 = _export(
    "run_paged_sm90_fp8",
    f"{_Q_FP8} k_cache:e4m3 v_cache?:e4m3 {_RUN_FP8}",
    key="q.shape[-1], out.shape[-1], q.get_device()",
    write=references.run,
    check=references.check_fp8_run,
)
run_ragged_sm90_fp8 = _export(
    "run_ragged_sm90_fp8",
    f"{_Q_FP8} k:e4m3[tokens,block.shape.num_kv_heads,block.shape.head_dim_qk] "
    f"v:e4m3[tokens,block.shape.num_kv_heads,block.shape.head_dim_vo] {_RUN_FP8}",
    "BatchPrefillWithRaggedKVCacheWrapper",
    key="q.shape[-1], out.shape[-1], q.get_device()",
    write=references.run,
    check=references.check_fp8_run,
)
run_paged_nvfp4 = _export(
    "run_paged_nvfp4",
    f"{_Q.replace('|f32', '')} k_cache:u8 v_cache?:u8 k_sf:e4m3|u8 v_sf?:e4m3|u8 {_RUN}",
    key="q.shape[-1], out.shape[-1], q.get_device()",
    write=references.run_packed,
    check=references.check_packed_run,
)
pack_plan = _export(
    "pack_plan",
    f"kv_indptr:{_BOUNDS} qo_indptr?:{_BOUNDS} kv_last_page_len?:{_BATCH} kv_len?:{_BATCH} "
    f"kv_indices?:i32[pages] int_workspace:u8|i8 float_workspace:u8|i8 packed_mask?:u8 "
    f"mask_indptr?:{_BOUNDS} alibi_slopes?:f32[{_HEADS}] prefix_len?:tensor "
    f"token_pos?:tensor block!",
    is_packed=False,
    write=references.pack_plan,
    check=references.check_plan,
)
plan = _export(
    "plan",
    "int_workspace!:u8|i8[bytes] block qo_indptr?:i32 kv_indptr?:i32 kv_last_page_len?:i32 "
    "kv_indices?:i32 kv_len?:i32 enable_pdl:pdl_on",
    write=references.copy_tables,
)
workspace_size = _export(
    "workspace_size",
    f"qo_indptr?:{_BOUNDS} kv_indptr:{_BOUNDS} kv_last_page_len?:{_BATCH} kv_len?:{_BATCH} "
    f"sizes!:i64[3] block sm_count:int",
    is_packed=False,
    key="0",  # All tensors are on the host.
    write=references.workspace_size,
)


# -- plans ----------------------------------------------------------------------------------------


def pack(given: AttentionPlan, lengths: Tables | None = None) -> AttentionPlan:
    """Return the plan with its params block; nothing is launched, no other memory is written.

    ``lengths`` stand in for those of the plan's tables.
    """
    options = given[:10]
    model, shape, scores, tables, mask, items, _, hnd, ints, floats = options
    mask_mode, positions = given.mask_mode, scores.pos_encoding_mode
    cap, scale = scores.logits_soft_cap, scores.sm_scale
    block = new_block(
        shape,
        (
            hnd,
            mask_mode,
            scores.window_left,
            pos_encoding("plan", positions),
            items.token_pos_len,
            cap if type(cap) is float else _number("logits_soft_cap", cap, 0.0),
            scale if type(scale) is float else _number("sm_scale", scale, shape.head_dim_qk**-0.5),
            1.0 if scores.rope_scale is None else _number("rope_scale", scores.rope_scale),
            1e4 if scores.rope_theta is None else _number("rope_theta", scores.rope_theta),
        ),
    )
    slopes = None
    if positions == "ALIBI":
        assert ints is not None
        slopes = alibi_slopes(shape.num_qo_heads, ints.device)
    is_masked = mask_mode is MaskMode.CUSTOM
    qo_indptr, kv_indptr, kv_last_page_len, kv_indices, kv_len = lengths or tables
    pack_plan[model.key[-1:]](
        kv_indptr,
        None if shape.q_len_per_req else qo_indptr,
        kv_last_page_len if kv_len is None else None,
        kv_len,
        kv_indices,
        ints,
        floats,
        mask.bits if is_masked else None,
        mask.indptr if is_masked else None,
        slopes,
        items.prefix_len,
        items.token_pos,
        block,
    )
    # Without the block of a plan before, which would keep all of them alive.
    block.attention_plan = given if given.block is None else given._replace(block=None)
    return AttentionPlan(*options, True, slopes, block)


def pack_again(packed: AttentionPlan, tables: Tables) -> AttentionPlan:
    """Return a packed plan with other tables of as many requests, which has no mask and no items.

    Its block is packed once more. Why not another block: making one takes longer than packing it,
    and the plans of one workspace end with the next one in it. Tables that do not fit raise, and
    leave the block as it was.
    """
    block = packed.block
    assert block is not None
    try:
        _pack_tables(packed, tables)
    except RAW_KINDS:
        _pack_tables(packed, packed.tables)
        raise
    # Why not _replace: it takes three times as long.
    model, shape, scores, _, mask, items, hints, hnd, ints, floats = packed[:10]
    options = model, shape, scores, tables, mask, items, hints, hnd, ints, floats
    block.attention_plan = AttentionPlan(*options)
    return AttentionPlan(*options, True, packed.alibi_slopes, block)


def _pack_tables(packed: AttentionPlan, tables: Tables) -> None:
    pack_plan[packed.model.key[-1:]](
        *(tables.kv_indptr, tables.qo_indptr, tables.kv_last_page_len, tables.kv_len),
        *(tables.kv_indices, packed.int_workspace, packed.float_workspace),
        *(None, None, packed.alibi_slopes, None, None, packed.block),
    )


def _number(option: str, value: float | None, default: float = 1.0) -> float:
    """Return what a block holds of a number that is no float; exports look at floats themselves."""
    return default if value is None else number("plan", option, value)


def launch(packed: AttentionPlan, sources: Tables) -> None:
    """Divide the work; ``sources`` are copied to the plan's buffers, None where they are there."""
    plan[packed.model.key[-1:]](packed.int_workspace, packed.block, *sources, True)


def workspace_bytes(device: torch.device, shape: PlanShape, lengths: Tables) -> tuple[int, int]:
    """Return the bytes of both workspaces that a plan needs; lengths on the GPU are waited for."""
    from precast._base.device import get_device_sm_count

    tables = lengths.qo_indptr, lengths.kv_indptr, lengths.kv_last_page_len, lengths.kv_len
    on_host = (None if t is None else t.to("cpu", torch.int32) for t in tables)
    sizes = torch.zeros(3, dtype=torch.int64, device="cpu")
    sm_count = get_device_sm_count(device) if device.type == "cuda" else 0
    workspace_size[(device.index or 0,)](*on_host, sizes, new_block(shape), sm_count)
    float_bytes, int_bytes, _ = sizes.tolist()
    return float_bytes, int_bytes
