# SPDX-License-Identifier: Apache-2.0
"""The trace templates of the dequantisation of a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._ops.paged._trace import by_layout
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var


def fill_pages(call: dict[str, Any]) -> None:
    """Fill in pages in descending order, one that is missing, and one request that is shorter."""
    import torch

    cache = call["paged_kv_cache"]
    caches = cache if isinstance(cache, tuple) else (cache,)
    for tensor in caches:
        tensor.copy_(torch.arange(tensor.numel()).mul(37).remainder(256).view(tensor.shape))
    table, lens = call["block_tables"], call["seq_lens"]
    pages = caches[0].shape[0]
    table.copy_((-torch.arange(table.numel()) - 1).remainder(pages).view(table.shape))
    table[-1, 0] = -1
    lens.fill_(call["output_k"].shape[1])
    lens[0] = 1


def paged_trace(
    name: str, description: str, reference: Callable[..., Any]
) -> Callable[..., TraceTemplate]:
    """Make templates for each layout, for a pair of caches or one, and for page size 1."""
    templates: dict[tuple[bool, str], TraceTemplate] = {}
    for packed in (False, True):
        for layout in ("NHD", "HND", "page1"):
            entries = ["page_size"] if layout != "page1" else []
            heads = ["num_heads"]
            inner = heads + entries if layout == "HND" else entries + heads
            parts = ("k",) if packed else ("k", "v")
            axes: dict[str, Var | Const] = {
                "batch_size": Var("Requests."),
                "max_seq_len": Var("Tokens of the longest request."),
                "pages_per_request": Var("Columns of the page table.", sample=9),
                "num_pages": Var("Pages of the cache."),
                "num_heads": Const("h"),
                "*one": Var("Dimensions of a single number.", sample=1),
            }
            if entries:
                axes["page_size"] = Const("ps", sample=16)
            if packed:
                axes["kv"] = Const("", "Keys, values.", value="2")
            inputs: dict[str, Tensor | Scalar] = {}
            for param, what, word, dtype in (
                ("paged_kv_cache", "cache", "packed", "uint8"),
                ("kv_cache_sf", "scales", "scale", "float8_e4m3fn"),
            ):
                for item, part in enumerate(parts):
                    shape = ["num_pages", *(["kv"] if packed else []), *inner]
                    inputs[param if packed else f"{part}_{what}"] = Tensor(
                        [*shape, f"{part}_{word}_dim"],
                        param=param,
                        dtype=dtype,
                        item=None if packed else item,
                    )
            for part in parts:
                axes[f"{part}_packed_dim"] = Const("", multiple=8)
                axes[f"{part}_scale_dim"] = Const("", value=f"{part}_packed_dim // 8")
                axes[f"{part}_head_dim"] = Const(f"d{part}", value=f"{part}_packed_dim * 2")
            inputs["block_tables"] = Tensor(["batch_size", "pages_per_request"], dtype="int32")
            inputs["seq_lens"] = Tensor(["batch_size"], dtype="int32")
            outputs: dict[str, Tensor] = {}
            for part in "kv":
                inputs[f"{part}_scale"] = Tensor(["*one"], dtype="float32")
            for part in "kv":
                dim = f"{'k' if packed else part}_head_dim"
                of = ["batch_size", "max_seq_len", "num_heads", dim]
                inputs[f"output_{part}"] = Tensor(of)
                outputs[f"output_{part}_out"] = Tensor(
                    of, param=f"output_{part}", dtype_from=f"output_{part}"
                )
            suffix = {"HND": "_hnd", "page1": "_page1"}.get(layout, "")
            templates[packed, layout] = TraceTemplate(
                op_type="quantization",
                name_prefix=name + ("_packed" if packed else "") + suffix,
                description=description,
                axes=axes,
                inputs=inputs,
                outputs=outputs,
                reference=reference,
                fixed={"kv_layout": "HND"} if layout == "HND" else None,
                fill=fill_pages,
            )

    return by_layout(templates)
