# SPDX-License-Identifier: Apache-2.0
"""Trace templates of attention; what ``plan()`` was given is read off the wrapper of ``run()``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from precast._base.torch import torch
from precast._op.mode import reference_mode
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_QO_HEADS = {"num_qo_heads": Const("h", multiple=1, sample=10)}
_KV_HEADS = {"num_kv_heads": Const("kv", multiple=1, sample=5)}
_HEAD_DIM = {"head_dim": Const("d", sample=64)}
_TABLE: dict[str, Var | Const] = {
    "num_pages": Var("Pages of the cache.", sample=6),
    "page_size": Const("ps", multiple=1, sample=4),
    "batch_size": Var("Requests.", sample=3),
    "len_indptr": Var("One more than requests.", sample=4),
    "num_kv_indices": Var("Pages of all requests.", sample=8),
}
_SCORES = {"sm_scale": "float32", "window_left": "int32", "logits_soft_cap": "float32"}
_WORKSPACE = 64 << 20


def _template(
    name: str,
    rows: list[str],
    layout: str,
    lse: bool,
    inputs: Mapping[str, Tensor | Scalar],
    **more: Any,
) -> TraceTemplate:
    """Make a template; ``rows`` are axes before the heads, ``more`` its other fields."""
    q = [*rows, "num_qo_heads", "head_dim"]
    outputs = {"output": Tensor(q, dtype_from="q")}
    if lse:
        outputs["lse"] = Tensor(q[:-1], dtype="float32")
    return TraceTemplate(
        name_prefix=name + ("_hnd" if layout == "HND" else "") + ("_lse" if lse else ""),
        inputs={"q": Tensor(q), **inputs},
        outputs=outputs,
        constraints=["num_qo_heads % num_kv_heads == 0"],
        **more,
    )


def _entries(layout: str, tokens: str) -> list[str]:
    """Return the axes of keys or values in this layout."""
    heads = "num_kv_heads"
    return [heads, tokens, "head_dim"] if layout == "HND" else [tokens, heads, "head_dim"]


# -- one request ----------------------------------------------------------------------------------


def single_trace(
    name: str, description: str, reference: Callable[..., Any], rows: list[str]
) -> Callable[..., TraceTemplate]:
    """Make templates by layout, with log-sum-exp and without, causal or not if there are rows.

    ``rows`` are the axes of queries before the heads.
    """
    templates = {}
    forms = itertools.product(("NHD", "HND"), (False, True), (False, True) if rows else (False,))
    for layout, lse, causal in forms:
        given = {"causal": causal, "kv_layout": "HND" if layout == "HND" else "", "return_lse": lse}
        templates[layout, lse, causal] = _template(
            name + ("_causal" if causal else ""),
            rows,
            layout,
            lse,
            {
                "k": Tensor(_entries(layout, "kv_len")),
                "v": Tensor(_entries(layout, "kv_len")),
                **{option: Scalar(dtype) for option, dtype in _SCORES.items()},
            },
            op_type="gqa_single",
            description=description,
            reference=reference,
            axes={
                **{row: Var("Queries.") for row in rows},
                **_QO_HEADS,
                **_HEAD_DIM,
                "kv_len": Var("Tokens of the request."),
                **_KV_HEADS,
            },
            fixed={option: value for option, value in given.items() if value},
        )

    @dispatch(*templates.values())
    def choose(
        kv_layout: Any = "NHD", return_lse: Any = False, causal: Any = False, **others: Any
    ) -> TraceTemplate:
        layout = "HND" if kv_layout == "HND" else "NHD"
        return templates[layout, bool(return_lse), bool(causal)]

    return choose


# -- a batch --------------------------------------------------------------------------------------


def _batch_template(
    name: str,
    layout: str,
    lse: bool,
    axes: Mapping[str, Var | Const],
    inputs: Mapping[str, Tensor | Scalar],
    **more: Any,
) -> TraceTemplate:
    own = {option: Scalar(d, param=f"self._{option}") for option, d in _SCORES.items()}
    return _template(
        name,
        ["num_queries"],
        layout,
        lse,
        {**inputs, **own},
        axes=axes,
        fixed={"return_lse": True} if lse else {},
        of_reference={"kv_layout": layout, "return_lse": lse},
        **more,
    )


def _table(axis: str, attribute: str) -> Tensor:
    return Tensor([axis], f"self._{attribute}_buf", "int32")


def paged_trace(
    name: str, description: str, reference: Callable[..., Any], cls: Callable[[], Any], decode: bool
) -> Callable[..., TraceTemplate]:
    """Make templates by layout, a pair of caches or one, with log-sum-exp and without."""

    def template(packed: bool, layout: str, lse: bool) -> TraceTemplate:
        axes: dict[str, Var | Const] = {
            "num_queries": Var("Queries of all requests.", sample=3),
            **_QO_HEADS,
            **_KV_HEADS,
            **_HEAD_DIM,
            **_TABLE,
        }
        entries = _entries(layout, "page_size")
        if packed:
            axes["kv"] = Const("", "Keys, values.", value="2")
            caches = {"paged_kv_cache": Tensor(["num_pages", "kv", *entries])}
        else:
            caches = {
                f"{part}_cache": Tensor(["num_pages", *entries], param="paged_kv_cache", item=item)
                for item, part in enumerate("kv")
            }
        rows: dict[str, Tensor | Scalar] = {
            "qo_indptr": _table("len_indptr", "qo_indptr"),
            "causal": Scalar("bool", param="self._causal"),
        }
        if decode:
            rows = {"q_len_per_req": Scalar("int32", param="self._q_len_per_req")}
        prefix = "" if decode else "paged_kv_"
        tables = {
            f"{prefix}indptr": _table("len_indptr", "paged_kv_indptr"),
            f"{prefix}indices": _table("num_kv_indices", "paged_kv_indices"),
            f"{prefix}last_page_len": _table("batch_size", "paged_kv_last_page_len"),
        }
        return _batch_template(
            name + ("_packed" if packed else ""),
            layout,
            lse,
            axes,
            {**caches, **rows, **tables},
            op_type="gqa_paged",
            description=description,
            reference=reference,
            fill=lambda call: _plan_paged(call, layout, cls(), decode, in_graph=lse),
        )

    both = (False, True)
    templates = {form: template(*form) for form in itertools.product(both, ("NHD", "HND"), both)}

    @dispatch(*templates.values())
    def choose(
        self: Any = None, paged_kv_cache: Any = None, return_lse: Any = False, **others: Any
    ) -> TraceTemplate:
        packed = not isinstance(paged_kv_cache, tuple)
        return templates[packed, self._kv_layout, bool(return_lse)]

    return choose


def ragged_trace(
    name: str, description: str, reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates by layout, with the log-sum-exp and without."""

    def template(layout: str, lse: bool) -> TraceTemplate:
        return _batch_template(
            name,
            layout,
            lse,
            {
                "num_queries": Var("Queries of all requests.", sample=7),
                **_QO_HEADS,
                **_KV_HEADS,
                **_HEAD_DIM,
                "num_tokens": Var("Tokens of all requests.", sample=11),
                "len_indptr": Var("One more than requests.", sample=4),
            },
            {
                "k": Tensor(_entries(layout, "num_tokens")),
                "v": Tensor(_entries(layout, "num_tokens")),
                "qo_indptr": _table("len_indptr", "qo_indptr"),
                "kv_indptr": _table("len_indptr", "kv_indptr"),
                "causal": Scalar("bool", param="self._causal"),
            },
            op_type="gqa_ragged",
            description=description,
            reference=reference,
            fill=lambda call: _plan_ragged(call, layout, cls(), in_graph=lse),
        )

    templates = {form: template(*form) for form in itertools.product(("NHD", "HND"), (False, True))}

    @dispatch(*templates.values())
    def choose(self: Any = None, return_lse: Any = False, **others: Any) -> TraceTemplate:
        return templates[self._kv_layout, bool(return_lse)]

    return choose


# -- wrappers of generated calls ------------------------------------------------------------------


def _plan_paged(call: dict[str, Any], layout: str, cls: Any, decode: bool, in_graph: bool) -> None:
    state, q, cache = call["self"], call["q"], call["paged_kv_cache"]
    part = cache[0] if isinstance(cache, tuple) else cache[:, 0]
    heads, page_size = part.shape[1:3] if layout == "HND" else (part.shape[2], part.shape[1])
    indices, last = state._paged_kv_indices_buf, state._paged_kv_last_page_len_buf
    suffix = "buffer" if decode else "buf"
    lengths = {} if decode else {"qo_indptr_buf": _indptr(q.shape[0], state._qo_indptr_buf)}
    lengths[f"paged_kv_indptr_{suffix}"] = _indptr(indices.numel(), state._paged_kv_indptr_buf)
    pages = torch.arange(indices.numel(), device=q.device) % part.shape[0]
    lengths[f"paged_kv_indices_{suffix}"] = pages.int()
    lengths[f"paged_kv_last_page_len_{suffix}"] = torch.full_like(last, page_size)
    _plan(call, layout, cls, lengths, (q.shape[1], heads, q.shape[2], page_size), in_graph)


def _plan_ragged(call: dict[str, Any], layout: str, cls: Any, in_graph: bool) -> None:
    state, q, k = call["self"], call["q"], call["k"]
    count, heads = (k.shape[1], k.shape[0]) if layout == "HND" else k.shape[:2]
    lengths = {
        "qo_indptr_buf": _indptr(q.shape[0], state._qo_indptr_buf),
        "kv_indptr_buf": _indptr(count, state._kv_indptr_buf),
    }
    _plan(call, layout, cls, lengths, (q.shape[1], heads, q.shape[2]), in_graph)


def _indptr(total: int, like: torch.Tensor) -> torch.Tensor:
    """Divide ``total`` among the requests."""
    parts = like.numel() - 1
    bounds = [total * i // parts for i in range(parts + 1)]
    return torch.tensor(bounds, dtype=torch.int32, device=like.device)


def _plan(
    call: dict[str, Any],
    layout: str,
    cls: Any,
    lengths: Mapping[str, torch.Tensor],
    sizes: tuple[int, ...],
    in_graph: bool,
) -> None:
    """Put a planned wrapper in the place of its attributes; where there is no memory, they stay.

    One for CUDA graphs copies ``lengths`` into buffers, which are arguments of those names.
    """
    state, q = call["self"], call["q"]
    state._kv_layout = layout
    if q.is_meta:
        return
    known = (*_SCORES, "causal")
    options = {name: getattr(state, f"_{name}") for name in known if hasattr(state, f"_{name}")}
    size = _WORKSPACE if q.is_cuda else 64
    buffers = {name: torch.zeros_like(table) for name, table in lengths.items()}
    held: dict[str, Any] = {"use_cuda_graph": True, **buffers} if in_graph else {}
    wrapper = cls(torch.empty(size, dtype=torch.uint8, device=q.device), layout, **held)
    with contextlib.nullcontext() if q.is_cuda else reference_mode():
        wrapper.plan(*lengths.values(), *sizes, **options, q_data_type=q.dtype)
    call["self"] = wrapper
