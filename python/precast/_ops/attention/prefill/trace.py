# SPDX-License-Identifier: Apache-2.0
"""Trace templates of the wrappers of mixed batches, and of sinks by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._ops.attention import trace as parts
from precast._ops.attention.trace import attention_template, caches, entries_axes, table
from precast.trace import Scalar, Tensor, TraceTemplate, Var, registry

_FORMS = [(False, "NHD"), (True, "NHD"), (False, "HND"), (True, "HND")]


def mixed_trace(
    reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates by layout, for a pair of caches or one; a log-sum-exp is always there."""

    def template(form: tuple[bool, str]) -> TraceTemplate:
        packed, layout = form
        axes: dict[str, Any] = {
            "num_queries": Var("Queries of all requests.", sample=7),
            **parts.QO_HEADS,
            **parts.KV_HEADS,
            **parts.HEAD_DIM,
            **parts.TABLE,
        }
        return attention_template(
            "batch_attention" + ("_packed" if packed else ""),
            ["num_queries"],
            layout,
            True,
            {
                **caches(packed, entries_axes(layout, "page_size"), axes, "kv_cache"),
                "qo_indptr": table("len_indptr", "qo_indptr"),
                "kv_indptr": table("len_indptr", "kv_indptr"),
                "kv_indices": Tensor(["num_kv_indices"], "self._kv_indices", "int32"),
                "kv_len_arr": Tensor(["batch_size"], "self._kv_len_arr", "int32"),
                "causal": Scalar("bool", param="self._causal"),
                **parts.planned_scores("self", "", "window_left"),
            },
            axes=axes,
            of_reference={"kv_layout": layout},
            op_type="gqa_paged",
            description="Attention of a batch of prefills and decodes over a paged KV cache.",
            reference=reference,
            fill=lambda call: _plan_mixed(call, layout, cls()),
        )

    def form_of(self: Any = None, kv_cache: Any = None, **others: Any) -> tuple[bool, str]:
        return not isinstance(kv_cache, tuple), self._kv_layout

    return registry.by_form(form_of, template, _FORMS)


def _plan_mixed(call: dict[str, Any], layout: str, cls: Any) -> None:
    """Put a planned wrapper in the place of its attributes."""
    state, q, cache = call["self"], call["q"], call["kv_cache"]
    state._kv_layout = layout
    if q.is_meta:
        return
    heads, page_size = parts.heads_and_tokens(parts.keys_of(cache), layout)
    starts, pages, _ = parts.page_table(cache, layout, state._kv_indptr_buf, state._kv_indices)
    wrapper = cls(layout, str(q.device))
    with parts.planning(q):
        wrapper.plan(
            parts.divided(q.shape[0], state._qo_indptr_buf),
            starts,
            pages,
            starts.diff() * page_size - 1,  # The last token of a page may be missing.
            q.shape[1],
            heads,
            *(2 * [q.shape[2]]),
            page_size,
            **parts.scores_of(state),
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
    call["self"] = wrapper


def sink_trace(
    reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates by layout and log-sum-exp, for a pair of caches or one."""

    def template(form: tuple[bool, str, bool]) -> TraceTemplate:
        packed, layout, lse = form
        axes: dict[str, Any] = {
            "num_queries": Var("Queries of all requests.", sample=7),
            **parts.QO_HEADS,
            **parts.KV_HEADS,
            **parts.HEAD_DIM,
            **parts.TABLE,
        }
        return attention_template(
            "batch_attention_with_sinks" + ("_packed" if packed else ""),
            ["num_queries"],
            layout,
            lse,
            {
                **caches(packed, entries_axes(layout, "page_size"), axes),
                "sink": Tensor(["num_qo_heads"], dtype="float32"),
                "sm_scale": Scalar("float32"),
                "qo_indptr": table("len_indptr", "qo_indptr"),
                "paged_kv_indptr": table("len_indptr", "paged_kv_indptr"),
                "paged_kv_indices": table("num_kv_indices", "paged_kv_indices"),
                "paged_kv_last_page_len": table("batch_size", "paged_kv_last_page_len"),
                "causal": Scalar("bool", param="self._causal"),
                **parts.planned_scores("self", "", "sm_scale"),
            },
            axes=axes,
            fixed={"return_lse": lse},
            of_reference={"kv_layout": layout, "return_lse": lse},
            op_type="gqa_paged",
            description="Attention with sinks of a ragged batch of queries over a paged KV cache.",
            reference=reference,
            fill=lambda call: parts.plan_pages(call, layout, cls(), decode=False, in_graph=lse),
        )

    def form_of(
        self: Any = None,
        paged_kv_cache: Any = None,
        sink: Any = None,
        sm_scale: Any = None,
        options: Any = None,
        **others: Any,
    ) -> tuple[bool, str, bool]:
        if sink is None or sm_scale is None:
            raise ValueError(
                "BatchAttentionWithAttentionSinkWrapper.run: only calls with sink and sm_scale "
                "have a definition"
            )
        lse = (options or others).get("return_lse", False)
        return not isinstance(paged_kv_cache, tuple), self._kv_layout, bool(lse)

    usual = [(*form, False) for form in _FORMS] + [(False, "NHD", True)]
    return registry.by_form(form_of, template, usual)
