# SPDX-License-Identifier: Apache-2.0
"""What the exports of the module ``attention_plan`` are by reference.

A plan divides the work of a batch among the SMs. References divide nothing, so the reference of a
plan writes nothing that is read.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.validation import check_memory_apart
from precast._ops.attention import validation as refusals


def plan_into(
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    int_workspace: torch.Tensor,
    float_workspace: torch.Tensor,
    batch_size: int,
    q_len_per_req: int,
    page_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    kv_bytes: int,
    tile_rows: int,
    causal: bool,
    window_left: int,
    fixed_split_size: int,
    disable_split_kv: bool,
    enable_pdl: bool,
) -> None:
    """Nothing but refusals."""
    refusals.check_lengths("plan", qo_indptr, kv_indptr, kv_last_page_len, kv_len, batch_size)
    check_memory_apart("plan", "float_workspace", float_workspace, int_workspace, "int_workspace")


def fill_and_plan_into(
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    qo_indptr_buffer: torch.Tensor | None,
    kv_indptr_buffer: torch.Tensor | None,
    kv_last_page_len_buffer: torch.Tensor | None,
    kv_indices_buffer: torch.Tensor | None,
    int_workspace: torch.Tensor,
    float_workspace: torch.Tensor,
    batch_size: int,
    q_len_per_req: int,
    page_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    kv_bytes: int,
    tile_rows: int,
    causal: bool,
    window_left: int,
    fixed_split_size: int,
    disable_split_kv: bool,
    enable_pdl: bool,
) -> None:
    """Copies of the tables."""
    export = "fill_and_plan"
    refusals.check_lengths(export, qo_indptr, kv_indptr, kv_last_page_len, None, batch_size)
    check_memory_apart(export, "float_workspace", float_workspace, int_workspace, "int_workspace")
    for name, table, buffer in (
        ("qo_indptr", qo_indptr, qo_indptr_buffer),
        ("kv_indptr", kv_indptr, kv_indptr_buffer),
        ("kv_last_page_len", kv_last_page_len, kv_last_page_len_buffer),
        ("kv_indices", kv_indices, kv_indices_buffer),
    ):
        if table is None or buffer is None:
            continue
        if buffer.numel() < table.numel():
            raise ValueError(
                f"{export}: {name}_buffer must have at least the {table.numel()} elements of "
                f"{name}, got shape {[*buffer.shape]}"
            )
        buffer[: table.numel()].copy_(table)


def workspace_size_into(
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    sizes: torch.Tensor,
    batch_size: int,
    q_len_per_req: int,
    page_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    kv_bytes: int,
    tile_rows: int,
    causal: bool,
    window_left: int,
    fixed_split_size: int,
    disable_split_kv: bool,
    sm_count: int,
) -> None:
    """Zeros: a reference needs no workspace."""
    sizes.zero_()
