# SPDX-License-Identifier: Apache-2.0
"""The traces of ops that append to a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

OP_TYPE = "page_append"
_PAGES: dict[str, Var | Const] = {"num_pages": Var("Pages of the cache."), "page_size": Const("ps")}
_TABLE_AXES: dict[str, Var | Const] = {
    "batch_size": Var("Requests."),
    "batch_size_plus_1": Var("One more than requests."),
    "num_kv_indices": Var("Pages of all requests."),
}

#: What says where tokens go: a page table, or slots.
TABLE: dict[str, Tensor | Scalar] = {
    "batch_indices": Tensor(["nnz_kv"], dtype="int32", description="Request of each token."),
    "positions": Tensor(["nnz_kv"], dtype="int32", description="Place in its request."),
    "kv_indices": Tensor(["num_kv_indices"], dtype="int32"),
    "kv_indptr": Tensor(["batch_size_plus_1"], dtype="int32"),
    "kv_last_page_len": Tensor(["batch_size"], dtype="int32"),
}
SLOTS: dict[str, Tensor | Scalar] = {
    "slot_mapping": Tensor(["nnz_kv"], dtype="int64", description="page * page_size + entry."),
}


def fill_indices(call: dict[str, Any]) -> None:
    """Different places for all tokens but the last, which has none."""
    import torch

    if "slot_mapping" in call:
        slots = call["slot_mapping"]
        slots.copy_(torch.arange(slots.numel()))
        slots[-1] = -1
        return
    call["positions"].copy_(torch.arange(call["positions"].numel()))
    call["batch_indices"][-1] = -1
    batch = call["kv_last_page_len"].numel()
    call["kv_indptr"] = call["kv_indptr"].new_ones(batch + 1)
    call["kv_indptr"][0] = 0  # The first request has the first page.


def _template(
    name: str,
    description: str,
    reference: Callable[..., Any],
    axes: Mapping[str, Var | Const],
    rows: Mapping[str, Tensor],
    caches: Mapping[str, Tensor],
    places: Mapping[str, Tensor | Scalar],
    scales: tuple[str, ...],
    fixed: Mapping[str, object] | None = None,
) -> TraceTemplate:
    table = _TABLE_AXES if "kv_indptr" in places else {}
    return TraceTemplate(
        op_type=OP_TYPE,
        name_prefix=name,
        description=description,
        axes={"nnz_kv": Var("Tokens that are appended."), **axes, **table},
        inputs={
            **rows,
            **places,
            **caches,
            **{scale: Scalar("float32") for scale in scales},
        },
        outputs={
            f"{cache}_out": Tensor(
                spec.axes, param=spec.param or cache, dtype_from=cache, item=spec.item
            )
            for cache, spec in caches.items()
        },
        reference=reference,
        constraints=["batch_size_plus_1 == batch_size + 1"] if table else [],
        fixed=fixed,
        fill=fill_indices,
    )


def by_layout(
    templates: Mapping[tuple[bool, str], TraceTemplate],
) -> Callable[..., TraceTemplate]:
    """A dispatch function by whether one tensor holds keys and values, and by layout or page1."""

    @dispatch(*templates.values())
    def choose(paged_kv_cache: Any = None, kv_layout: Any = "NHD", **others: Any) -> TraceTemplate:
        packed = not isinstance(paged_kv_cache, tuple)
        rank = getattr(paged_kv_cache if packed else paged_kv_cache[0], "ndim", 4 + packed)
        layout = "page1" if rank == 3 + packed else kv_layout
        return templates.get((packed, layout), templates[packed, "NHD"])

    return choose


def kv_trace(
    name: str,
    description: str,
    reference: Callable[..., Any],
    places: Mapping[str, Tensor | Scalar],
    cache_dtype: str | None = None,
    scales: tuple[str, ...] = (),
) -> Callable[..., TraceTemplate]:
    """Templates for keys and values: each layout, a pair of caches or one, and page size 1."""
    templates: dict[tuple[bool, str], TraceTemplate] = {}
    for packed in (False, True):
        for layout in ("NHD", "HND", "page1"):
            pages = ["page_size"] if layout != "page1" else []
            heads = ["num_kv_heads"]
            inner = heads + pages if layout == "HND" else pages + heads
            axes: dict[str, Var | Const] = {"num_kv_heads": Const("kv"), "head_dim": Const("d")}
            dims = ("head_dim", "head_dim") if packed else ("head_dim", "head_dim_vo")
            if packed:
                axes["kv"] = Const("", "Keys, values.", value="2")
                shape = ["num_pages", "kv", *inner, "head_dim"]
                caches = {"paged_kv_cache": Tensor(shape, dtype=cache_dtype)}
            else:
                axes["head_dim_vo"] = Const("dv")
                caches = {
                    f"{part}_cache": Tensor(
                        ["num_pages", *inner, dim],
                        param="paged_kv_cache",
                        dtype=cache_dtype,
                        item=item,
                    )
                    for item, (part, dim) in enumerate(zip("kv", dims))
                }
            axes["num_pages"] = _PAGES["num_pages"]
            if pages:
                axes["page_size"] = _PAGES["page_size"]
            suffix = ("_packed" if packed else "") + {"HND": "_hnd", "page1": "_page1"}.get(
                layout, ""
            )
            templates[packed, layout] = _template(
                name + suffix,
                description,
                reference,
                axes,
                {
                    "append_key": Tensor(["nnz_kv", "num_kv_heads", dims[0]]),
                    "append_value": Tensor(["nnz_kv", "num_kv_heads", dims[1]]),
                },
                caches,
                places,
                scales,
                {"kv_layout": "HND"} if layout == "HND" else None,
            )

    return by_layout(templates)


def mla_trace(
    name: str,
    description: str,
    reference: Callable[..., Any],
    places: Mapping[str, Tensor | Scalar],
    cache_dtype: str | None = None,
    scales: tuple[str, ...] = (),
) -> TraceTemplate:
    """The template for the two parts of an MLA entry."""
    parts = {"ckv": "head_dim_ckv", "kpe": "head_dim_kpe"}
    return _template(
        name,
        description,
        reference,
        {"head_dim_ckv": Const("ckv"), "head_dim_kpe": Const("kpe"), **_PAGES},
        {f"append_{part}": Tensor(["nnz_kv", dim]) for part, dim in parts.items()},
        {
            f"{part}_cache": Tensor(["num_pages", "page_size", dim], dtype=cache_dtype)
            for part, dim in parts.items()
        },
        places,
        scales,
    )
