# SPDX-License-Identifier: Apache-2.0
"""The traces of attention over shared prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from precast._ops.attention import trace as parts
from precast._ops.attention.trace import attention_template, caches, entries_axes, table
from precast.trace import Scalar, Tensor, TraceTemplate, Var, registry

_FORMS = [*itertools.product(parts.BOTH, parts.LAYOUTS)]


def levels_trace(
    reference: Callable[..., Any], cls: Callable[..., Any]
) -> Callable[..., TraceTemplate]:
    """Make templates by number of levels and layout, for a pair of caches or one."""

    def template(form: tuple[int, bool, str]) -> TraceTemplate:
        count, packed, layout = form
        axes: dict[str, Any] = {
            "num_queries": Var("Queries of all levels.", sample=9),
            **parts.QO_HEADS,
            **parts.KV_HEADS,
            **parts.HEAD_DIM,
            "num_pages": parts.TABLE["num_pages"],
            "page_size": parts.TABLE["page_size"],
        }
        inputs = caches(packed, entries_axes(layout, "page_size"), axes)
        for level in range(count):
            axes |= {
                f"num_groups_{level}": Var("Groups of queries of the level.", sample=level + 1),
                f"len_indptr_{level}": Var("One more than groups.", sample=level + 2),
                f"num_kv_indices_{level}": Var("Pages of the level.", sample=11 + 2 * level),
            }
            inputs |= {
                f"{name}_{level}": Tensor([f"{axis}_{level}"], f"self.{array}", "int32", item=level)
                for name, axis, array in (
                    ("qo_indptr", "len_indptr", "_qo_indptr_arr"),
                    ("paged_kv_indptr", "len_indptr", "_paged_kv_indptr_arr"),
                    ("paged_kv_indices", "num_kv_indices", "_paged_kv_indices_arr"),
                    ("last_page_len", "num_groups", "_paged_kv_last_page_len"),
                )
            }
        return attention_template(
            f"cascade_{count}_levels" + ("_packed" if packed else ""),
            ["num_queries"],
            layout,
            False,
            {
                **inputs,
                "causal": Scalar("bool", param="self._last._causal"),
                **parts.planned_scores("self._last"),
            },
            axes=axes,
            of_reference={"kv_layout": layout},
            op_type="gqa_paged",
            description="Attention over pages in levels that groups of queries have in common.",
            reference=reference,
            fill=lambda call: _plan_levels(call, count, layout, cls()),
        )

    def form_of(
        self: Any = None, paged_kv_cache: Any = None, **others: Any
    ) -> tuple[int, bool, str]:
        packed = not isinstance(paged_kv_cache, tuple)
        return len(self._qo_indptr_arr), packed, self._kv_layout

    usual = [(2, *form) for form in _FORMS] + [(3, False, "NHD")]
    return registry.by_form(form_of, template, usual)


def _plan_levels(call: dict[str, Any], count: int, layout: str, cls: Any) -> None:
    """Put a planned wrapper in the place of its attributes."""
    state, q, cache = call["self"], call["q"], call["paged_kv_cache"]
    state._kv_layout = layout
    if q.is_meta:
        return
    heads, page_size = parts.heads_and_tokens(parts.keys_of(cache), layout)
    queries = [parts.divided(q.shape[0], like) for like in state._qo_indptr_arr]
    of_levels = zip(state._paged_kv_indptr_arr, state._paged_kv_indices_arr)
    tables = zip(*(parts.page_table(cache, layout, *level) for level in of_levels))
    wrapper = cls(count, parts.workspace(q), layout)
    sizes = q.shape[1], heads, q.shape[2], page_size
    with parts.planning(q):
        options = parts.scores_of(state._last)
        wrapper.plan(queries, *map(list, tables), *sizes, **options, q_data_type=q.dtype)
    call["self"] = wrapper


# -- one prefix -----------------------------------------------------------------------------------


def shared_prefix_trace(
    name: str, reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates by layout, for a pair of caches or one; the name says if it is a decode."""
    decode = "decode" in name
    part = f"self._batch_{'decode' if decode else 'prefill'}_wrapper"

    def template(form: tuple[bool, str]) -> TraceTemplate:
        packed, layout = form
        axes: dict[str, Any] = {
            "num_queries": Var("Queries of all requests.", sample=3 if decode else 7),
            **parts.QO_HEADS,
            **parts.KV_HEADS,
            **parts.HEAD_DIM,
            "prefix_len": Var("Tokens of the prefix.", sample=13),
            **parts.TABLE,
        }
        shared = entries_axes(layout, "prefix_len")
        inputs = {"k_shared": Tensor(shared), "v_shared": Tensor(shared)}
        entries = entries_axes(layout, "page_size")
        more: dict[str, Tensor | Scalar] = {
            "paged_kv_indptr": table("len_indptr", "paged_kv_indptr", part),
            "paged_kv_indices": table("num_kv_indices", "paged_kv_indices", part),
            "paged_kv_last_page_len": table("batch_size", "paged_kv_last_page_len", part),
        }
        if not decode:
            more["qo_indptr"] = table("len_indptr", "qo_indptr", part)
            more |= {"causal": Scalar("bool", sample=True), "sm_scale": Scalar("float32")}
        return attention_template(
            name + ("_packed" if packed else ""),
            ["num_queries"],
            layout,
            False,
            {**inputs, **caches(packed, entries, axes, "unique_kv_cache"), **more},
            axes=axes,
            of_reference={"kv_layout": layout},
            op_type="gqa_paged",
            description="Attention over a shared prefix and over pages of each request.",
            reference=reference,
            fill=lambda call: _plan_prefix(call, layout, cls(), decode),
        )

    def form_of(self: Any = None, unique_kv_cache: Any = None, **others: Any) -> tuple[bool, str]:
        return not isinstance(unique_kv_cache, tuple), self._kv_layout

    return registry.by_form(form_of, template, _FORMS)


def _plan_prefix(call: dict[str, Any], layout: str, cls: Any, decode: bool) -> None:
    """Put a planned wrapper in the place of its attributes."""
    owner, q, cache = call["self"], call["q"], call["unique_kv_cache"]
    owner._kv_layout = layout
    if q.is_meta:
        return
    state = owner._batch_decode_wrapper if decode else owner._batch_prefill_wrapper
    heads, page_size = parts.heads_and_tokens(parts.keys_of(cache), layout)
    indptr, indices = state._paged_kv_indptr_buf, state._paged_kv_indices_buf
    lengths = [*parts.page_table(cache, layout, indptr, indices)]
    if not decode:
        lengths.insert(0, parts.divided(q.shape[0], state._qo_indptr_buf))
    wrapper = cls(parts.workspace(q), layout)
    with parts.planning(q):
        wrapper.begin_forward(*lengths, q.shape[1], heads, q.shape[2], page_size, q.dtype)
    call["self"] = wrapper
