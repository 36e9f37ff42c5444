# SPDX-License-Identifier: Apache-2.0
"""The traces of a prefill beside a decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from precast._ops.attention import trace as parts
from precast._ops.attention.trace import caches, entries_axes, table
from precast.trace import Scalar, Tensor, TraceTemplate, Var, registry

_HEADS = {**parts.QO_HEADS, **parts.KV_HEADS, **parts.HEAD_DIM}


class _Form(NamedTuple):
    packed: bool = False
    layout: str = "NHD"
    lse_p: bool = False
    lse_d: bool = False
    causal: bool = False
    layout_p: str = "NHD"

    def name(self, prefix: str) -> str:
        words = {
            "_packed": self.packed,
            "_causal": self.causal,
            "_hnd_p": self.layout_p == "HND",
            "_hnd": self.layout == "HND",
            "_lse_p": self.lse_p,
            "_lse_d": self.lse_d,
        }
        return prefix + "".join(word for word, is_so in words.items() if is_so)

    def outputs(self, rows_p: str, rows_d: str) -> dict[str, Tensor]:
        """Return the outputs, each with the dtype of its queries."""
        heads = ["num_qo_heads", "head_dim"]
        outputs = {
            "out_p": Tensor([rows_p, *heads], dtype_from="q_p"),
            "out_d": Tensor([rows_d, *heads], dtype_from="q_d"),
        }
        if self.lse_p:
            outputs["lse_p"] = Tensor([rows_p, heads[0]], dtype="float32")
        if self.lse_d:
            outputs["lse_d"] = Tensor([rows_d, heads[0]], dtype="float32")
        return outputs


def _refuse_masks(name: str, call: dict[str, Any]) -> None:
    if any(call.get(f"{packed}custom_mask_p") is not None for packed in ("", "packed_")):
        raise ValueError(f"{name}.run: only calls without custom masks have a definition")


def pod_trace(
    reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates of one prefill without pages beside a paged decode."""

    def template(form: _Form) -> TraceTemplate:
        axes: dict[str, Any] = {
            "num_queries_p": Var("Queries of the prefill.", sample=5),
            "kv_len_p": Var("Tokens of the prefill.", sample=9),
            **_HEADS,
            **parts.TABLE,
        }
        query, shared = ["num_qo_heads", "head_dim"], entries_axes(form.layout_p, "kv_len_p")
        cache = caches(
            form.packed, entries_axes(form.layout, "page_size"), axes, "paged_kv_cache_d", "_d"
        )
        given = {
            "causal_p": form.causal,
            "kv_layout_p": form.layout_p if form.layout_p == "HND" else "",
            "return_lse_p": form.lse_p,
            "return_lse_d": form.lse_d,
        }
        return parts.grouped_template(
            fixed=given,
            op_type="gqa_pod",
            name_prefix=form.name("pod"),
            description="Attention of one prefill, and of a decode over a paged KV cache.",
            axes=axes,
            inputs={
                "q_p": Tensor(["num_queries_p", *query]),
                **parts.keys_and_values(shared, "_p"),
                "q_d": Tensor(["batch_size", *query]),
                **cache,
                "indptr_d": table("len_indptr", "paged_kv_indptr", "self._decode"),
                "indices_d": table("num_kv_indices", "paged_kv_indices", "self._decode"),
                "last_page_len_d": table("batch_size", "paged_kv_last_page_len", "self._decode"),
                "sm_scale_p": Scalar("float32"),
                "window_left_p": Scalar("int32"),
                **parts.planned_scores("self._decode", "_d", "logits_soft_cap"),
            },
            outputs=form.outputs("num_queries_p", "batch_size"),
            reference=reference,
            of_reference={"kv_layout_d": form.layout},
            fill=lambda call: _plan_decode(call, form.layout, cls()),
        )

    def form_of(
        self: Any = None,
        paged_kv_cache_d: Any = None,
        causal_p: Any = False,
        kv_layout_p: Any = "NHD",
        return_lse_p: Any = False,
        return_lse_d: Any = False,
        **call: Any,
    ) -> _Form:
        _refuse_masks("PODWithPagedKVCacheWrapper", call)
        return _Form(
            not isinstance(paged_kv_cache_d, tuple),
            self._decode._kv_layout,
            bool(return_lse_p),
            bool(return_lse_d),
            bool(causal_p),
            "HND" if kv_layout_p == "HND" else "NHD",
        )

    usual = [_Form(packed, causal=causal) for packed in parts.BOTH for causal in parts.BOTH]
    usual += [_Form(False, "HND", True, True, True, "HND"), _Form(lse_d=True)]
    return registry.by_form(form_of, template, usual)


def _plan_decode(call: dict[str, Any], layout: str, cls: Any) -> None:
    """Put a planned wrapper in the place of its attributes."""
    state, q, cache = call["self"]._decode, call["q_d"], call["paged_kv_cache_d"]
    state._kv_layout = layout
    if q.is_meta:
        return
    heads, page_size = parts.heads_and_tokens(parts.keys_of(cache), layout)
    indptr, indices = state._paged_kv_indptr_buf, state._paged_kv_indices_buf
    wrapper = cls(parts.workspace(q), layout)
    sizes = q.shape[1], heads, q.shape[2], page_size
    with parts.planning(q):
        wrapper.plan(
            *parts.page_table(cache, layout, indptr, indices),
            *sizes,
            **parts.scores_of(state),
            q_data_type=q.dtype,
        )
    call["self"] = wrapper


# -- two batches ----------------------------------------------------------------------------------

#: Tables of a part by their inputs, and the axis of each.
_TABLES = {
    "qo_indptr": ("qo_indptr", "len_indptr"),
    "kv_indptr": ("paged_kv_indptr", "len_indptr"),
    "kv_indices": ("paged_kv_indices", "num_kv_indices"),
    "last_page_len": ("paged_kv_last_page_len", "batch_size"),
}


def batch_pod_trace(
    reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates of a batch of prefills beside one of decodes, both over pages."""

    def template(form: _Form) -> TraceTemplate:
        axes: dict[str, Any] = {
            "num_queries_p": Var("Queries of the prefills.", sample=7),
            "num_queries_d": Var("Queries of the decodes.", sample=3),
            **_HEADS,
            "num_pages": parts.TABLE["num_pages"],
            "page_size": parts.TABLE["page_size"],
        }
        entries = entries_axes(form.layout, "page_size")
        inputs: dict[str, Tensor | Scalar] = {}
        for ending, size, owner in (("_p", 2, "self._prefill"), ("_d", 3, "self._decode")):
            axes |= {
                f"batch_size{ending}": Var("Requests.", sample=size),
                f"len_indptr{ending}": Var("One more than requests.", sample=size + 1),
                f"num_kv_indices{ending}": Var("Pages of all requests.", sample=size + 5),
            }
            query = [f"num_queries{ending}", "num_qo_heads", "head_dim"]
            inputs[f"q{ending}"] = Tensor(query)
            inputs |= caches(form.packed, entries, axes, f"paged_kv_cache{ending}", ending)
            inputs |= {
                f"{name}{ending}": table(f"{axis}{ending}", attribute, owner)
                for name, (attribute, axis) in _TABLES.items()
            }
        return parts.grouped_template(
            fixed={"return_lse": form.lse_p},
            op_type="gqa_pod",
            name_prefix=form.name("batch_pod"),
            description="Attention of a batch of prefills, and of one of decodes, over pages.",
            axes=axes,
            inputs={
                **inputs,
                "causal_p": Scalar("bool", sample=True),
                **parts.planned_scores("self._decode", "", "logits_soft_cap"),
            },
            outputs=form.outputs("num_queries_p", "num_queries_d"),
            reference=reference,
            of_reference={"kv_layout": form.layout},
            fill=lambda call: _plan_parts(call, form.layout, cls()),
        )

    def form_of(
        self: Any = None, paged_kv_cache_p: Any = None, return_lse: Any = False, **call: Any
    ) -> _Form:
        _refuse_masks("BatchPODWithPagedKVCacheWrapper", call)
        packed = not isinstance(paged_kv_cache_p, tuple)
        if packed == isinstance(call["paged_kv_cache_d"], tuple):
            raise ValueError(
                "BatchPODWithPagedKVCacheWrapper.run: only calls with both caches in one form "
                "have a definition"
            )
        lse = bool(return_lse)
        return _Form(packed, self._decode._kv_layout, lse, lse)

    usual = [_Form(packed, layout) for packed in parts.BOTH for layout in parts.LAYOUTS]
    return registry.by_form(form_of, template, [*usual, _Form(lse_p=True, lse_d=True)])


def _plan_parts(call: dict[str, Any], layout: str, cls: Any) -> None:
    """Put a planned wrapper in the place of its attributes."""
    owner, q = call["self"], call["q_p"]
    owner._decode._kv_layout = layout
    if q.is_meta:
        return
    lengths = []
    for ending, state in (("_p", owner._prefill), ("_d", owner._decode)):
        cache, queries = call[f"paged_kv_cache{ending}"], call[f"q{ending}"].shape[0]
        indptr, indices = state._paged_kv_indptr_buf, state._paged_kv_indices_buf
        lengths += [parts.divided(queries, state._qo_indptr_buf)]
        lengths += parts.page_table(cache, layout, indptr, indices)
    heads, page_size = parts.heads_and_tokens(parts.keys_of(call["paged_kv_cache_p"]), layout)
    wrapper = cls(parts.workspace(q), layout)
    sizes = q.shape[1], heads, q.shape[2], page_size
    with parts.planning(q):
        wrapper.plan(*lengths, *sizes, **parts.scores_of(owner._decode), q_data_type=q.dtype)
    call["self"] = wrapper
