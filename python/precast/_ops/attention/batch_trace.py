# SPDX-License-Identifier: Apache-2.0
"""Trace templates of ``run()``: what its plan was given is read off the wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from precast._base.torch import torch
from precast._op.mode import reference_mode
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_HEADS: dict[str, Var | Const] = {
    "num_qo_heads": Const("h", multiple=1, sample=10),
    "num_kv_heads": Const("kv", multiple=1, sample=5),
    "head_dim": Const("d", sample=64),
}
_TABLE: dict[str, Var | Const] = {
    "num_pages": Var("Pages of the cache.", sample=6),
    "page_size": Const("ps", multiple=1, sample=4),
    "batch_size": Var("Requests.", sample=3),
    "len_indptr": Var("One more than requests.", sample=4),
    "num_kv_indices": Var("Pages of all requests.", sample=8),
}
_SCORES = {
    "sm_scale": Scalar("float32", param="self._sm_scale"),
    "window_left": Scalar("int32", param="self._window_left"),
    "logits_soft_cap": Scalar("float32", param="self._logits_soft_cap"),
}
_CAUSAL = {"causal": Scalar("bool", param="self._causal")}
_WORKSPACE = 64 << 20


def _template(
    name: str,
    description: str,
    reference: Callable[..., Any],
    axes: Mapping[str, Var | Const],
    inputs: Mapping[str, Tensor | Scalar],
    kv_layout: str,
    return_lse: bool,
    fill: Callable[[dict[str, Any]], None],
) -> TraceTemplate:
    outputs = {"output": Tensor(["num_queries", "num_qo_heads", "head_dim"], dtype_from="q")}
    if return_lse:
        outputs["lse"] = Tensor(["num_queries", "num_qo_heads"], dtype="float32")
    return TraceTemplate(
        op_type="gqa_paged" if "page_size" in axes else "gqa_ragged",
        name_prefix=name + ("_hnd" if kv_layout == "HND" else "") + ("_lse" if return_lse else ""),
        description=description,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=reference,
        constraints=["num_qo_heads % num_kv_heads == 0"],
        fixed={"return_lse": True} if return_lse else {},
        of_reference={"kv_layout": kv_layout, "return_lse": return_lse},
        fill=fill,
    )


def _wrapper(
    call: dict[str, Any],
    kv_layout: str,
    cls: Any,
    lengths: Mapping[str, torch.Tensor],
    sizes: tuple[int, ...],
    in_graph: bool,
) -> None:
    """A planned wrapper in the place of its attributes; those alone where there is no memory.

    One for CUDA graphs copies ``lengths`` into buffers, which are arguments of those names.
    """
    state, q = call["self"], call["q"]
    state._kv_layout = kv_layout
    if q.is_meta:
        return
    options = {
        name.removeprefix("_"): value
        for name, value in vars(state).items()
        if name in ("_sm_scale", "_window_left", "_logits_soft_cap", "_causal")
    }
    size = _WORKSPACE if q.is_cuda else 64
    buffers = {name: torch.zeros_like(table) for name, table in lengths.items()}
    held: dict[str, Any] = {"use_cuda_graph": True, **buffers} if in_graph else {}
    wrapper = cls(torch.empty(size, dtype=torch.uint8, device=q.device), kv_layout, **held)
    with contextlib.nullcontext() if q.is_cuda else reference_mode():
        wrapper.plan(*lengths.values(), *sizes, **options, q_data_type=q.dtype)
    call["self"] = wrapper


def _indptr(total: int, like: torch.Tensor) -> torch.Tensor:
    """Some of ``total`` for each request."""
    parts = like.numel() - 1
    bounds = [total * i // parts for i in range(parts + 1)]
    return torch.tensor(bounds, dtype=torch.int32, device=like.device)


def paged_trace(
    name: str, description: str, reference: Callable[..., Any], cls: Callable[[], Any], decode: bool
) -> Callable[..., TraceTemplate]:
    """Templates by layout, a pair of caches or one, with the log-sum-exp and without."""
    templates: dict[tuple[bool, str, bool], TraceTemplate] = {}
    prefix = "" if decode else "paged_kv_"
    for packed in (False, True):
        for layout in ("NHD", "HND"):
            templates.update(
                {
                    (packed, layout, lse): _paged(
                        name, description, reference, cls, decode, prefix, packed, layout, lse
                    )
                    for lse in (False, True)
                }
            )

    @dispatch(*templates.values())
    def choose(
        self: Any = None, paged_kv_cache: Any = None, return_lse: Any = False, **others: Any
    ) -> TraceTemplate:
        packed = not isinstance(paged_kv_cache, tuple)
        return templates[packed, self._kv_layout, bool(return_lse)]

    return choose


def _paged(
    name: str,
    description: str,
    reference: Callable[..., Any],
    cls: Callable[[], Any],
    decode: bool,
    prefix: str,
    packed: bool,
    layout: str,
    lse: bool,
) -> TraceTemplate:
    entries = ["page_size", "num_kv_heads"]
    if layout == "HND":
        entries.reverse()
    axes = {"num_queries": Var("Queries of all requests.", sample=3), **_HEADS, **_TABLE}
    if packed:
        axes["kv"] = Const("", "Keys, values.", value="2")
        shape = ["num_pages", "kv", *entries, "head_dim"]
        caches = {"paged_kv_cache": Tensor(shape)}
    else:
        caches = {
            f"{part}_cache": Tensor(
                ["num_pages", *entries, "head_dim"], param="paged_kv_cache", item=item
            )
            for item, part in enumerate("kv")
        }
    rows: dict[str, Tensor | Scalar] = (
        {"q_len_per_req": Scalar("int32", param="self._q_len_per_req")}
        if decode
        else {
            "qo_indptr": Tensor(["len_indptr"], "self._qo_indptr_buf", "int32"),
            **_CAUSAL,
        }
    )

    def fill(call: dict[str, Any]) -> None:
        state, q = call["self"], call["q"]
        cache = call["paged_kv_cache"]
        part = cache[0] if isinstance(cache, tuple) else cache[:, 0]
        page_size = part.shape[2 if layout == "HND" else 1]
        indices = state._paged_kv_indices_buf
        suffix = "buffer" if decode else "buf"
        lengths = {} if decode else {"qo_indptr_buf": _indptr(q.shape[0], state._qo_indptr_buf)}
        lengths[f"paged_kv_indptr_{suffix}"] = _indptr(indices.numel(), state._paged_kv_indptr_buf)
        pages = torch.arange(indices.numel(), device=q.device) % part.shape[0]
        lengths[f"paged_kv_indices_{suffix}"] = pages.int()
        lengths[f"paged_kv_last_page_len_{suffix}"] = torch.full_like(
            state._paged_kv_last_page_len_buf, page_size
        )
        sizes = q.shape[1], part.shape[1 if layout == "HND" else 2], q.shape[2], page_size
        _wrapper(call, layout, cls(), lengths, sizes, in_graph=lse)

    return _template(
        name + ("_packed" if packed else ""),
        description,
        reference,
        axes,
        {
            "q": Tensor(["num_queries", "num_qo_heads", "head_dim"]),
            **caches,
            **rows,
            f"{prefix}indptr": Tensor(["len_indptr"], "self._paged_kv_indptr_buf", "int32"),
            f"{prefix}indices": Tensor(["num_kv_indices"], "self._paged_kv_indices_buf", "int32"),
            f"{prefix}last_page_len": Tensor(
                ["batch_size"], "self._paged_kv_last_page_len_buf", "int32"
            ),
            **_SCORES,
        },
        layout,
        lse,
        fill,
    )


def ragged_trace(
    name: str, description: str, reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Templates by layout, with the log-sum-exp and without."""
    templates = {
        (layout, lse): _ragged(name, description, reference, cls, layout, lse)
        for layout in ("NHD", "HND")
        for lse in (False, True)
    }

    @dispatch(*templates.values())
    def choose(self: Any = None, return_lse: Any = False, **others: Any) -> TraceTemplate:
        return templates[self._kv_layout, bool(return_lse)]

    return choose


def _ragged(
    name: str,
    description: str,
    reference: Callable[..., Any],
    cls: Callable[[], Any],
    layout: str,
    lse: bool,
) -> TraceTemplate:
    tokens = ["num_tokens", "num_kv_heads"]
    if layout == "HND":
        tokens.reverse()

    def fill(call: dict[str, Any]) -> None:
        state, q, k = call["self"], call["q"], call["k"]
        count, heads = (k.shape[1], k.shape[0]) if layout == "HND" else k.shape[:2]
        lengths = {
            "qo_indptr_buf": _indptr(q.shape[0], state._qo_indptr_buf),
            "kv_indptr_buf": _indptr(count, state._kv_indptr_buf),
        }
        sizes = q.shape[1], heads, q.shape[2]
        _wrapper(call, layout, cls(), lengths, sizes, in_graph=lse)

    return _template(
        name,
        description,
        reference,
        {
            "num_queries": Var("Queries of all requests.", sample=7),
            **_HEADS,
            "num_tokens": Var("Tokens of all requests.", sample=11),
            "len_indptr": Var("One more than requests.", sample=4),
        },
        {
            "q": Tensor(["num_queries", "num_qo_heads", "head_dim"]),
            "k": Tensor([*tokens, "head_dim"]),
            "v": Tensor([*tokens, "head_dim"]),
            "qo_indptr": Tensor(["len_indptr"], "self._qo_indptr_buf", "int32"),
            "kv_indptr": Tensor(["len_indptr"], "self._kv_indptr_buf", "int32"),
            **_CAUSAL,
            **_SCORES,
        },
        layout,
        lse,
        fill,
    )
