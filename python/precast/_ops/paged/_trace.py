# SPDX-License-Identifier: Apache-2.0
"""Make the traces of ops that append to a paged KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_PAGES: dict[str, Var | Const] = {"num_pages": Var("Pages of the cache."), "page_size": Const("ps")}
_TABLE: dict[str, Var | Const] = {
    "batch_size": Var("Requests."),
    "batch_size_plus_1": Var("One more than requests."),
    "num_kv_indices": Var("Pages of all requests."),
}

#: What says where tokens go: slots, or a page table.
_PLACES = {
    "slot_mapping": Tensor(["nnz_kv"], dtype="int64", description="page * page_size + entry."),
    "batch_indices": Tensor(["nnz_kv"], dtype="int32", description="Request of each token."),
    "positions": Tensor(["nnz_kv"], dtype="int32", description="Place in its request."),
    "kv_indices": Tensor(["num_kv_indices"], dtype="int32"),
    "kv_indptr": Tensor(["batch_size_plus_1"], dtype="int32"),
    "kv_last_page_len": Tensor(["batch_size"], dtype="int32"),
}


def fill_indices(call: dict[str, Any]) -> None:
    """Give all tokens different places but the last, which has none."""
    import torch

    if "slot_mapping" in call:
        slots = call["slot_mapping"]
        slots.copy_(torch.arange(slots.numel()))
        slots[-1] = -1
        return
    call["positions"].copy_(torch.arange(call["positions"].numel()))
    call["batch_indices"][-1] = -1
    if "kv_last_page_len" in call:
        call["kv_indptr"] = call["kv_indptr"].new_zeros(call["kv_last_page_len"].numel() + 1)
    call["kv_indptr"][1:] = 1  # The first request has the first page.


def append_trace(
    name: str, description: str, reference: Callable[..., Any]
) -> TraceTemplate | Callable[..., TraceTemplate]:
    """Make a template for MLA, or templates for every form of a cache with heads."""
    taken = inspect.signature(reference).parameters
    places = {key: spec for key, spec in _PLACES.items() if key in taken}
    scales = {key: Scalar("float32") for key in taken if key.endswith("scale")}
    table = _TABLE if "kv_indptr" in places else {}
    packs = "kv_cache_sf" in taken

    def template(
        suffix: str,
        axes: Mapping[str, Var | Const],
        rows: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        fixed: Mapping[str, object] | None = None,
    ) -> TraceTemplate:
        dtype = "uint8" if packs else "float8_e4m3fn" if scales else None
        return TraceTemplate(
            op_type="page_append",
            name_prefix=name + suffix,
            description=description,
            axes={"nnz_kv": Var("Tokens that are appended."), **axes, **table},
            inputs={
                **rows,
                **places,
                **{
                    cache: spec if spec.dtype else spec._replace(dtype=dtype)
                    for cache, spec in caches.items()
                },
                **scales,
            },
            outputs={
                f"{cache}_out": spec._replace(
                    param=spec.param or cache, dtype=None, dtype_from=cache
                )
                for cache, spec in caches.items()
            },
            reference=reference,
            constraints=["batch_size_plus_1 == batch_size + 1"] if table else [],
            fixed=fixed,
            fill=fill_indices,
        )

    if "paged_kv_cache" not in taken:
        parts = {"ckv": "head_dim_ckv", "kpe": "head_dim_kpe"}
        return template(
            "",
            {**{dim: Const(part) for part, dim in parts.items()}, **_PAGES},
            {f"append_{part}": Tensor(["nnz_kv", dim]) for part, dim in parts.items()},
            {
                f"{part}_cache": Tensor(["num_pages", "page_size", dim])
                for part, dim in parts.items()
            },
        )
    templates: dict[tuple[bool, str], TraceTemplate] = {}
    for packed in (False, True):
        for layout, suffix, inner in (
            ("NHD", "", ["page_size", "num_kv_heads"]),
            ("HND", "_hnd", ["num_kv_heads", "page_size"]),
            ("page1", "_page1", ["num_kv_heads"]),
        ):
            block = 16 if packs else 1
            axes: dict[str, Var | Const] = {
                "num_kv_heads": Const("kv"),
                "head_dim": Const("d", multiple=block),
            }
            v_dim = "head_dim" if packed else "head_dim_vo"
            pages = ["num_pages", *(["kv"] if packed else []), *inner]
            if packed:
                axes["kv"] = Const("", "Keys, values.", value="2")
            else:
                axes["head_dim_vo"] = Const("dv", multiple=block)
            dims = ("head_dim",) if packed else ("head_dim", "head_dim_vo")
            caches = {}
            for param, one, pair, dtype, numbers in (
                ("paged_kv_cache", "paged_kv_cache", ("k_cache", "v_cache"), None, 2),
                ("kv_cache_sf", "kv_cache_sf", ("k_scales", "v_scales"), "float8_e4m3fn", 16),
            ):
                if param not in taken:
                    continue
                for item, (name_of, dim) in enumerate(zip((one,) if packed else pair, dims)):
                    columns = dim
                    if packs:
                        columns = f"{dim}_{'packed' if numbers == 2 else 'blocks'}"
                        axes[columns] = Const("", value=f"{dim} // {numbers}")
                    caches[name_of] = Tensor([*pages, columns], dtype=dtype)
                    if not packed:
                        caches[name_of] = caches[name_of]._replace(param=param, item=item)
            templates[packed, layout] = template(
                ("_packed" if packed else "") + suffix,
                axes
                | {axis: spec for axis, spec in _PAGES.items() if axis in ("num_pages", *inner)},
                {
                    "append_key": Tensor(["nnz_kv", "num_kv_heads", "head_dim"]),
                    "append_value": Tensor(["nnz_kv", "num_kv_heads", v_dim]),
                },
                caches,
                {"kv_layout": "HND"} if layout == "HND" else None,
            )
    return by_layout(templates)


def by_layout(
    templates: Mapping[tuple[bool, str], TraceTemplate],
) -> Callable[..., TraceTemplate]:
    """Choose by whether one tensor holds keys and values, and by layout or page1."""

    @dispatch(*templates.values())
    def choose(paged_kv_cache: Any = None, kv_layout: Any = "NHD", **others: Any) -> TraceTemplate:
        packed = not isinstance(paged_kv_cache, tuple)
        rank = getattr(paged_kv_cache if packed else paged_kv_cache[0], "ndim", 4 + packed)
        layout = "page1" if rank == 3 + packed else kv_layout
        return templates.get((packed, layout), templates[packed, "NHD"])

    return choose
