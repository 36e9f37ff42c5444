# SPDX-License-Identifier: Apache-2.0
"""The traces of block-sparse attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from precast._base.torch import torch
from precast._ops.attention import trace as parts
from precast._ops.attention.trace import table
from precast.trace import Scalar, Tensor, TraceTemplate, Var, registry
from precast.trace.fields import Dtype

_HEADS = {**parts.QO_HEADS, **parts.KV_HEADS, **parts.HEAD_DIM}
_SCORES = {
    "causal": Scalar("bool", param="self._rows._causal"),
    **parts.planned_scores("self._rows", "", "window_left"),
}


class _Form(NamedTuple):
    masked: bool = False
    lse: bool = False
    #: The dtype of outputs, if it is not that of queries.
    o_dtype: str = ""

    def name(self, prefix: str) -> str:
        words = "_masked" * self.masked + "_lse" * self.lse
        return prefix + words + (f"_to_{self.o_dtype}" if self.o_dtype else "")

    def outputs(self, q: list[str]) -> dict[str, Tensor]:
        """Return the outputs; ``q`` are the axes of queries."""
        is_own = bool(self.o_dtype)
        dtypes = (self.o_dtype, None) if is_own else (None, "q")
        outputs = {"output": Tensor(q, None, *dtypes)}
        if self.lse:
            outputs["lse"] = Tensor(q[:-1], dtype="float32")
        return outputs

    def of_reference(self) -> dict[str, object]:
        options: dict[str, object] = {"return_lse": self.lse}
        return {**options, "o_dtype": Dtype(self.o_dtype)} if self.o_dtype else options


def _o_dtype(rows: Any) -> str:
    """Return the dtype of outputs in a plan, or nothing where it is that of queries."""
    dtypes = [getattr(rows, f"_cached_{part}_data_type", None) for part in "oq"]
    return "" if dtypes[0] == dtypes[1] else str(dtypes[0]).removeprefix("torch.")


def blocks_trace(
    reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates with a mask of elements and without, and with a log-sum-exp and without."""

    def template(form: _Form) -> TraceTemplate:
        q, rows = ["num_queries", "num_qo_heads", "head_dim"], "self._rows"
        axes: dict[str, Any] = {
            "num_queries": Var("Rows of the matrix.", sample=7),
            "kv_len": Var("Columns of the matrix.", sample=12),
            **_HEADS,
            "len_indptr": Var("One more than block rows.", sample=5),
            "num_blocks": Var("Blocks that are not zero.", sample=6),
        }
        mask = {}
        if form.masked:
            axes["mask_bytes"] = Var("Bytes of the mask's bits.", sample=9)
            mask = {
                "packed_mask": Tensor(["mask_bytes"], f"{rows}._custom_mask_buf", "uint8"),
                "mask_indptr": Tensor(["len_indptr"], f"{rows}._mask_indptr_buf", "int32"),
            }
        tokens = ["kv_len", "num_kv_heads", "head_dim"]
        return parts.grouped_template(
            fixed={"return_lse": form.lse},
            op_type="block_sparse_attention",
            name_prefix=form.name("block_sparse_attention"),
            description="Attention in the blocks of a block-sparse matrix that are not zero.",
            axes=axes,
            inputs={
                "q": Tensor(q),
                **parts.keys_and_values(tokens),
                "indptr": table("len_indptr", "paged_kv_indptr", rows),
                "indices": table("num_blocks", "paged_kv_indices", rows),
                **mask,
                "R": Scalar("int32", "self.R", "Rows of a block."),
                "C": Scalar("int32", "self.C", "Columns of a block."),
                **_SCORES,
            },
            outputs=form.outputs(q),
            reference=reference,
            of_reference=form.of_reference(),
            fill=lambda call: _plan_blocks(call, form, cls()),
        )

    def form_of(self: Any = None, return_lse: Any = False, **others: Any) -> _Form:
        masked = getattr(self._rows, "_custom_mask_buf", None) is not None
        return _Form(masked, bool(return_lse), _o_dtype(self._rows))

    usual = [_Form(), _Form(lse=True), _Form(masked=True), _Form(o_dtype="float32")]
    return registry.by_form(form_of, template, usual)


def _plan_blocks(call: dict[str, Any], form: _Form, cls: Any) -> None:
    """Put a planned wrapper in the place of its attributes: blocks of two rows and four columns."""
    q, k, state = call["q"], call["k"], call["self"]._rows
    if form.o_dtype:
        state._cached_o_data_type = f"torch.{form.o_dtype}"
    if q.is_meta:
        return
    per_row, per_column = -(-q.shape[0] // (state._paged_kv_indptr_buf.numel() - 1)), 4
    nnz, rows = state._paged_kv_indices_buf.numel(), state._paged_kv_indptr_buf
    indices = (torch.arange(nnz, device=q.device) % (k.shape[0] // per_column)).int()
    options = {**parts.scores_of(state), "o_data_type": form.o_dtype or None}
    if form.masked:
        options["mask"] = (torch.arange(nnz * per_row * per_column, device=q.device) % 3 > 0).view(
            nnz, per_row, per_column
        )
    wrapper = cls(parts.workspace(q))
    with parts.planning(q):
        wrapper.plan(
            parts.divided(nnz, rows),
            indices,
            *(q.shape[0], k.shape[0], per_row, per_column, q.shape[1], k.shape[1], q.shape[2]),
            **options,
            q_data_type=q.dtype,
        )
    call["self"] = wrapper


# -- blocks of any sizes --------------------------------------------------------------------------


def variable_blocks_trace(
    reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates with a log-sum-exp and without."""

    def template(form: _Form) -> TraceTemplate:
        q = ["num_qo_heads", "num_queries", "head_dim"]
        tokens = ["num_kv_heads", "kv_len", "head_dim"]
        axes: dict[str, Any] = {
            "num_queries": Var("Queries of a head.", sample=6),
            "kv_len": Var("Keys of a head.", sample=12),
            **_HEADS,
            "block_rows": Var("Block rows.", sample=3),
            "block_columns": Var("Block columns.", sample=4),
        }
        return parts.grouped_template(
            fixed={"return_lse": form.lse},
            op_type="block_sparse_attention",
            name_prefix=form.name("variable_block_sparse_attention"),
            description="Attention in blocks of any sizes, which each KV head chooses.",
            axes=axes,
            inputs={
                "q": Tensor(q),
                **parts.keys_and_values(tokens),
                "block_mask_map": Tensor(
                    ["num_kv_heads", "block_rows", "block_columns"], "self._block_mask_map", "bool"
                ),
                "block_row_sz": Tensor(
                    ["num_kv_heads", "block_rows"], "self._block_row_sz", "int32"
                ),
                "block_col_sz": Tensor(
                    ["num_kv_heads", "block_columns"], "self._block_col_sz", "int32"
                ),
                **_SCORES,
            },
            outputs=form.outputs(q),
            reference=reference,
            of_reference=form.of_reference(),
            fill=lambda call: _plan_variable(call, cls()),
        )

    def form_of(self: Any = None, return_lse: Any = False, **others: Any) -> _Form:
        return _Form(lse=bool(return_lse))

    return registry.by_form(form_of, template, [_Form(), _Form(lse=True)])


def _plan_variable(call: dict[str, Any], cls: Any) -> None:
    """Put a planned wrapper in the place of its attributes: sizes that grow along the matrix."""
    state, q, k = call["self"], call["q"], call["k"]
    if q.is_meta:
        return
    mask, sizes = state._block_mask_map, []
    for tokens, like in ((q, state._block_row_sz), (k, state._block_col_sz)):
        bounds = [tokens.shape[1] * i * i // like.shape[1] ** 2 for i in range(like.shape[1] + 1)]
        each = [end - start for start, end in itertools.pairwise(bounds)]
        sizes.append(like.new_tensor([each] * like.shape[0]))
    chosen = torch.arange(mask.numel(), device=q.device).view(mask.shape) % 3 > 0
    wrapper = cls(parts.workspace(q))
    with parts.planning(q):
        options = parts.scores_of(state._rows)
        wrapper.plan(
            chosen, *sizes, q.shape[0], k.shape[0], q.shape[2], **options, q_data_type=q.dtype
        )
    call["self"] = wrapper
