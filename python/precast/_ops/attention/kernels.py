# SPDX-License-Identifier: Apache-2.0
"""The exports of the modules ``attention`` and ``attention_plan``, and the calls of a plan."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.dispatch import Kernel
from precast._op.mode import is_reference
from precast._ops.attention import reference_kernels as references
from precast._ops.attention.buffers import alibi_slopes
from precast._ops.attention.enums import MaskMode
from precast._ops.attention.plan import (
    NO_MASK,
    AttentionPlan,
    PlanShape,
    Tables,
    new_block,
    remember,
)


def _plan_key(tensor: torch.Tensor, *others: object) -> tuple[object, ...]:
    return (tensor.get_device(),)


def _run_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, *others: object
) -> tuple[object, ...]:
    head_dim_vo = (k if v is None else v).shape[-1]
    return q.dtype, k.dtype, q.shape[-1], head_dim_vo, q.get_device()


def _no_public_call(*args: object) -> None:
    """What plan() was given is not among the arguments."""


_OUTPUTS = "Tensor(a!) out, Tensor(b!)? lse, Tensor? sinks, Tensor block, "
_SCALES = "float sm_factor, float out_scale, Tensor? qk_scale, Tensor? v_scale, bool enable_pdl"

run_paged = Kernel(
    "attention",
    "run_paged",
    schema=f"(Tensor q, Tensor k_cache, Tensor? v_cache, {_OUTPUTS}{_SCALES}) -> ()",
    reference=references.run_paged_into,
    key=_run_key,
    public=_no_public_call,
    function="BatchPrefillWithPagedKVCacheWrapper",
)
run_ragged = Kernel(
    "attention",
    "run_ragged",
    schema=f"(Tensor q, Tensor k, Tensor v, {_OUTPUTS}{_SCALES}) -> ()",
    reference=references.run_ragged_into,
    key=_run_key,
    public=_no_public_call,
    function="BatchPrefillWithRaggedKVCacheWrapper",
)
pack_plan = Kernel(
    "attention_plan",
    "pack_plan",
    schema="(Tensor kv_indptr, Tensor? qo_indptr, Tensor? kv_last_page_len, Tensor? kv_len, "
    "Tensor? kv_indices, Tensor int_workspace, Tensor float_workspace, Tensor? packed_mask, "
    "Tensor? mask_indptr, Tensor? alibi_slopes, Tensor? prefix_len, Tensor? token_pos, "
    "Tensor(a!) block) -> ()",
    reference=references.pack_plan_into,
    key=_plan_key,
    public=_no_public_call,
    function="BatchPrefillWithPagedKVCacheWrapper",
)
plan = Kernel(
    "attention_plan",
    "plan",
    schema="(Tensor(a!) int_workspace, Tensor block, Tensor? qo_indptr, Tensor? kv_indptr, "
    "Tensor? kv_last_page_len, Tensor? kv_indices, bool enable_pdl) -> ()",
    reference=references.plan_into,
    key=_plan_key,
    public=_no_public_call,
    function="BatchPrefillWithPagedKVCacheWrapper",
)
workspace_size = Kernel(
    "attention_plan",
    "workspace_size",
    schema="(Tensor? qo_indptr, Tensor kv_indptr, Tensor? kv_last_page_len, Tensor? kv_len, "
    "Tensor(a!) sizes, Tensor block, int sm_count) -> ()",
    reference=references.workspace_size_into,
    key=lambda *args: (0,),
    public=_no_public_call,
    function="BatchPrefillWithPagedKVCacheWrapper",
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

    if is_reference():
        return 0, 0
    tables = lengths.qo_indptr, lengths.kv_indptr, lengths.kv_last_page_len, lengths.kv_len
    on_host = (None if t is None else t.to("cpu", torch.int32) for t in tables)
    sizes = torch.zeros(3, dtype=torch.int64, device="cpu")
    sm_count = get_device_sm_count(device) if device.type == "cuda" else 0
    workspace_size[(device.index or 0,)](*on_host, sizes, new_block(shape), sm_count)
    float_bytes, int_bytes, _ = sizes.tolist()
    return float_bytes, int_bytes
