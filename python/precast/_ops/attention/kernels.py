# SPDX-License-Identifier: Apache-2.0
"""The exports of the modules ``attention`` and ``attention_plan``, and the calls of a plan."""

from __future__ import annotations

import functools
from typing import Any

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.export import Export
from precast._ops.attention import reference_kernels as references
from precast._ops.attention.buffers import alibi_slopes
from precast._ops.attention.enums import MaskMode
from precast._ops.attention.plan import (
    NO_MASK,
    AttentionPlan,
    PlanShape,
    Tables,
    new_block,
    plan_of,
    read_block,
    remember,
)

_BATCH, _BOUNDS = "i32[block.shape.batch_size]", "i32[block.shape.batch_size+1]"
_HEADS = "block.shape.num_qo_heads"
_Q = f"q:T=f16|bf16|f32[rows,{_HEADS},block.shape.head_dim_qk]"
_RUN = (
    f"out!:T[rows,{_HEADS},block.shape.head_dim_vo] lse!?:f32[rows,{_HEADS}] sinks?:f32[{_HEADS}] "
    f"block sm_factor:float out_scale:float qk_scale?:f32[.] v_scale?:f32[.] enable_pdl:pdl"
)


def _export(
    name: str,
    declaration: str,
    function: str = "BatchPrefillWithPagedKVCacheWrapper",
    is_packed: bool = True,
    **more: Any,
) -> Export:
    """An export whose ``block`` stands for a plan, or for its numbers if it is not packed yet."""
    decode = functools.partial(plan_of, name) if is_packed else read_block
    return Export(
        "attention" if name.startswith("run_") else "attention_plan",
        name,
        declaration,
        kinds={"block": Kind("Tensor{w} {name}", decode=decode)},
        function=function,
        error_name=name,
        traced=False,  # What plan() was given is not among the arguments.
        **more,
    )


run_paged = _export(
    "run_paged",
    f"{_Q} k_cache:U=e4m3|e5m2|T v_cache?:U {_RUN}",
    key="q.shape[-1], (k_cache if v_cache is None else v_cache).shape[-1], q.get_device()",
    write=references.run_paged,
    check=references.check_paged,
)
run_ragged = _export(
    "run_ragged",
    f"{_Q} k:U=e4m3|e5m2|T[tokens,block.shape.num_kv_heads,block.shape.head_dim_qk] "
    f"v:U[tokens,block.shape.num_kv_heads,block.shape.head_dim_vo] {_RUN}",
    "BatchPrefillWithRaggedKVCacheWrapper",
    key="q.shape[-1], v.shape[-1], q.get_device()",
    write=references.run_ragged,
    check=references.check_ragged,
)
pack_plan = _export(
    "pack_plan",
    f"kv_indptr:{_BOUNDS} qo_indptr?:{_BOUNDS} kv_last_page_len?:{_BATCH} kv_len?:{_BATCH} "
    f"kv_indices?:i32[pages] int_workspace:u8|i8 float_workspace:u8|i8 packed_mask?:u8[bytes] "
    f"mask_indptr?:{_BOUNDS} alibi_slopes?:f32[{_HEADS}] prefix_len?:tensor "
    f"token_pos?:tensor block!",
    is_packed=False,
    write=references.pack_plan,
    check=references.check_plan,
)
plan = _export(
    "plan",
    "int_workspace!:u8|i8[bytes] block qo_indptr?:i32 kv_indptr?:i32 kv_last_page_len?:i32 "
    "kv_indices?:i32 enable_pdl:pdl_on",
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
    """The plan with its params block; nothing is launched and no other memory is written.

    ``lengths`` are divided in the place of those of the plan's tables.
    """
    mask_mode = given.mask_mode
    block = new_block(given.shape, given.score_options(mask_mode))
    tables, items, shape = lengths or given.tables, given.items, given.shape
    mask = given.mask if mask_mode is MaskMode.CUSTOM else NO_MASK
    slopes = None
    if given.scores.pos_encoding_mode == "ALIBI":
        assert given.int_workspace is not None
        slopes = alibi_slopes(shape.num_qo_heads, given.int_workspace.device)
    pack_plan[given.model.key[-1:]](
        tables.kv_indptr,
        None if shape.q_len_per_req else tables.qo_indptr,
        tables.kv_last_page_len if tables.kv_len is None else None,
        tables.kv_len,
        tables.kv_indices,
        given.int_workspace,
        given.float_workspace,
        mask.bits,
        mask.indptr,
        slopes,
        items.prefix_len,
        items.token_pos,
        block,
    )
    remember(block, given)
    return AttentionPlan(*given[:10], True, slopes, block)


def launch(packed: AttentionPlan, sources: Tables) -> None:
    """Divide the work; of tables that are not in the buffers of the plan yet, copy ``sources``."""
    plan[packed.model.key[-1:]](packed.int_workspace, packed.block, *sources[:4], True)


def workspace_bytes(device: torch.device, shape: PlanShape, lengths: Tables) -> tuple[int, int]:
    """Bytes of the float and the int workspace that a plan needs; waits for lengths on the GPU."""
    from precast._base.device import get_device_sm_count

    tables = lengths.qo_indptr, lengths.kv_indptr, lengths.kv_last_page_len, lengths.kv_len
    on_host = (None if t is None else t.to("cpu", torch.int32) for t in tables)
    sizes = torch.zeros(3, dtype=torch.int64, device="cpu")
    sm_count = get_device_sm_count(device) if device.type == "cuda" else 0
    workspace_size[(device.index or 0,)](*on_host, sizes, new_block(shape), sm_count)
    float_bytes, int_bytes, _ = sizes.tolist()
    return float_bytes, int_bytes
