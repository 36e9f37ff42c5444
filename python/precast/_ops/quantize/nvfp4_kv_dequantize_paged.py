# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of a paged key-value cache in NVFP4, gathered by a page table.

Sources: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149; Kwon et al.,
Efficient Memory Management for Large Language Model Serving with PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._op.validation import (
    check_dtype,
    check_elements_apart,
    check_memory_apart,
    check_one_number,
    check_rank,
)
from precast._ops.paged._cache import (
    DERIVED,
    Cache,
    check_cache,
    check_call,
    entries_of,
    halves,
    is_hnd,
    joined,
    split,
)
from precast._ops.paged._checks import pages_of
from precast._ops.paged._trace import by_layout
from precast._ops.quantize._reference_blocks import dequantize, e2m1_unpack
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var


def nvfp4_kv_dequantize_paged_reference(
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: str = "NHD",
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`nvfp4_kv_dequantize_paged` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    output_k, output_v : torch.Tensor
        The values of tokens that are left as they are; not changed.

    Returns
    -------
    tuple of torch.Tensor
        Keys and values, with shape and dtype of the outputs.
    """
    hnd, tables = kv_layout == "HND", block_tables.long()
    results = []
    for cache, factors, scale, out in zip(
        halves(paged_kv_cache), halves(kv_cache_sf), (k_scale, v_scale), (output_k, output_v)
    ):
        packed = entries_of(cache, hnd)  # [pages, page_size, heads, head_dim / 2]
        bytes_of_factors = entries_of(factors, hnd).view(torch.uint8)
        pages, page_size = packed.shape[:2]
        position = torch.arange(out.shape[1], device=out.device)
        page = tables[:, position // max(page_size, 1)]  # [batch, length]
        kept = (position < seq_lens[:, None]) & (page >= 0) & (page < pages)
        at = page[kept], (position % max(page_size, 1)).expand_as(page)[kept]
        values = bytes_of_factors[at].view(torch.float8_e4m3fn).float()
        elements = e2m1_unpack(packed[at])  # [tokens, heads, head_dim]
        rows = dequantize(elements.flatten(0, 1), values.flatten(0, 1), scale, 16)
        result = out.clone()
        result[kept] = rows.view(elements.shape).to(out.dtype)
        results.append(result)
    return results[0], results[1]


def _check(
    export: str,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    hnd: bool,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
) -> None:
    """Check that caches and page table fit the outputs, which lie apart from all that is read."""
    caches = _named("paged_kv_cache", paged_kv_cache)
    factors = _named("kv_cache_sf", kv_cache_sf)
    scales = [("k_scale", k_scale), ("v_scale", v_scale)]
    outputs = [("output_k", output_k), ("output_v", output_v)]
    for name, cache in caches:
        check_dtype(export, name, cache, torch.uint8)
    for name, factor in factors:
        check_dtype(export, name, factor, torch.float8_e4m3fn, torch.uint8)
    for name, out in outputs:
        check_rank(export, name, out, 4, 4)
        if out.shape[3] % 16:
            raise ValueError(
                f"{export}: {name}'s last dimension must be a multiple of 16, got {out.shape[3]}"
            )
    if output_v.shape[:3] != output_k.shape[:3]:
        raise ValueError(
            f"{export}: output_v must have the requests, tokens and heads of output_k, got "
            f"{[*output_v.shape]} for {[*output_k.shape]}"
        )
    first_name, first = caches[0]
    pages: tuple[int, int] | None = None
    for i, (word, out) in enumerate(outputs):
        for parts, public, per_byte in ((caches, paged_kv_cache, 2), (factors, kv_cache_sf, 16)):
            both, size = not isinstance(public, tuple), out.shape[3] // per_byte
            got = pages_of(export, *parts[i], word, out, hnd, both, size)
            pages = pages or got
            if got != pages:
                raise ValueError(
                    f"{export}: {parts[i][0]} must have {pages[0]} pages of {pages[1]} as "
                    f"{first_name}, got {got[0]} of {got[1]}"
                )
        check_one_number(export, *scales[i], first, first_name)
    assert pages is not None
    batch, length = output_k.shape[:2]
    if block_tables.dim() != 2 or block_tables.shape[0] != batch:
        raise ValueError(
            f"{export}: block_tables must have shape [{batch}, pages of a request], got "
            f"{[*block_tables.shape]}"
        )
    if block_tables.shape[1] * pages[1] < length:
        raise ValueError(
            f"{export}: block_tables must have pages of {pages[1]} entries for the {length} "
            f"tokens of output_k, got {block_tables.shape[1]} pages a request"
        )
    if seq_lens.shape != (batch,):
        raise ValueError(f"{export}: seq_lens must have shape [{batch}], got {[*seq_lens.shape]}")
    read = [*caches, *factors, *scales, ("block_tables", block_tables), ("seq_lens", seq_lens)]
    for word, out in outputs:
        check_elements_apart(export, word, out)
        for name, tensor in read:
            check_memory_apart(export, word, out, tensor, name)
    check_memory_apart(export, "output_v", output_v, output_k, "output_k")


def _named(name: str, cache: Cache) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of keys and of values with their names in errors; one may be both."""
    if isinstance(cache, tuple):
        return [(f"{name}[{i}]", part) for i, part in enumerate(cache)]
    return [(name, cache)] * 2


def _explain(export: str, paged_kv_cache: object, kv_cache_sf: object, kv_layout: object) -> None:
    check_call(export, paged_kv_cache, kv_layout)
    check_cache(export, "kv_cache_sf", kv_cache_sf)


_PAGED = Export(
    "paged_dequantize",
    "nvfp4_kv_dequantize_paged",
    "k_cache:tensor v_cache?:tensor k_sf:tensor v_sf?:tensor block_tables:i32|i64 seq_lens:i32 "
    "k_scale:f32 v_scale:f32 output_k!:T=f16|bf16 output_v!:T hnd:bool enable_pdl:pdl",
    reference=nvfp4_kv_dequantize_paged_reference,
    check=_check,
    derived={**DERIVED, "kv_cache_sf": lambda k_sf, v_sf: joined(k_sf, v_sf)},
)


def _fill_pages(call: dict[str, Any]) -> None:
    """Fill in pages in descending order, one that is missing, and one request that is shorter."""
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


def _template(packed: bool, layout: str) -> TraceTemplate:
    """Make the template for one tensor of keys and values or a pair, in a layout or ``page1``."""
    suffix, inner = {
        "NHD": ("", ["page_size", "num_heads"]),
        "HND": ("_hnd", ["num_heads", "page_size"]),
        "page1": ("_page1", ["num_heads"]),
    }[layout]
    axes: dict[str, Var | Const] = {
        "batch_size": Var("Requests."),
        "max_seq_len": Var("Tokens of the longest request."),
        "pages_per_request": Var("Columns of the page table.", sample=9),
        "num_pages": Var("Pages of the cache."),
        "num_heads": Const("h"),
        "*one": Var("Dimensions of a single number.", sample=1),
    }
    if layout != "page1":
        axes["page_size"] = Const("ps", sample=16)
    if packed:
        axes["kv"] = Const("", "Keys, values.", value="2")
    pages, parts = ["num_pages", *(["kv"] if packed else []), *inner], "k" if packed else "kv"
    inputs: dict[str, Tensor | Scalar] = {}
    for param, what, word, dtype in (
        ("paged_kv_cache", "cache", "packed", "uint8"),
        ("kv_cache_sf", "scales", "scale", "float8_e4m3fn"),
    ):
        for item, part in enumerate(parts):
            inputs[param if packed else f"{part}_{what}"] = Tensor(
                [*pages, f"{part}_{word}_dim"], param, dtype, item=None if packed else item
            )
    inputs["block_tables"] = Tensor(["batch_size", "pages_per_request"], dtype="int32")
    inputs["seq_lens"] = Tensor(["batch_size"], dtype="int32")
    inputs["k_scale"] = inputs["v_scale"] = Tensor(["*one"], dtype="float32")
    outputs: dict[str, Tensor] = {}
    for part, name in (("k", "output_k"), (parts[-1], "output_v")):
        axes[f"{part}_packed_dim"] = Const("", multiple=8)
        axes[f"{part}_scale_dim"] = Const("", value=f"{part}_packed_dim // 8")
        axes[f"{part}_head_dim"] = Const(f"d{part}", value=f"{part}_packed_dim * 2")
        rows = ["batch_size", "max_seq_len", "num_heads", f"{part}_head_dim"]
        inputs[name] = Tensor(rows)
        outputs[f"{name}_out"] = Tensor(rows, name, dtype_from=name)
    return TraceTemplate(
        op_type="quantization",
        name_prefix=_PAGED.function + ("_packed" if packed else "") + suffix,
        description="Dequantised keys and values of requests, from the pages of an NVFP4 cache.",
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=nvfp4_kv_dequantize_paged_reference,
        fixed={"kv_layout": "HND"} if layout == "HND" else None,
        fill=_fill_pages,
    )


_TRACE = by_layout(
    {
        (packed, layout): _template(packed, layout)
        for packed in (False, True)
        for layout in ("NHD", "HND", "page1")
    }
)


@precast_api(trace=_TRACE)
@op("paged_dequantize", explain=_explain)
def nvfp4_kv_dequantize_paged(
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
) -> None:
    r"""Dequantise whole requests from a paged key-value cache in NVFP4 into given outputs.

    .. math::

        out_{b, t, h} = \mathrm{round}((q_{page, entry, h} \cdot s_{page, entry, h}) \cdot g), \quad
        page = block\_tables_{b, \lfloor t / page\_size \rfloor}, \quad
        entry = t \bmod page\_size

    for each token :math:`t < seq\_lens_b`, of keys and of values.

    Parameters
    ----------
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        ``[pages, 2, page_size, heads, head_dim // 2]`` in layout ``NHD``,
        ``[pages, 2, heads, page_size, head_dim // 2]`` in ``HND``; uint8, keys first, on a CUDA
        device. Or a tuple of a tensor of keys and one of values, without the dimension of 2, whose
        ``head_dim`` may differ. Page size 1 may be left out of the shape. The first number of a
        byte is in the lower 4 bits. Stride 1 in the last dimension, any in the others; addresses
        and strides that are multiples of 4 are fastest.
    kv_cache_sf : torch.Tensor or tuple of torch.Tensor
        ``s``, a scale for each 16 numbers: the same with ``head_dim // 16`` as the last dimension,
        float8_e4m3fn or its bytes as uint8.
    block_tables : torch.Tensor
        ``[batch_size, pages of a request]``, int32 or int64, stride 1 in the last dimension: the
        pages of each request, enough for the outputs' tokens. Those past its tokens are not used.
    seq_lens : torch.Tensor
        ``[batch_size]``, int32, contiguous: tokens of each request.
    k_scale, v_scale : torch.Tensor
        ``g``, one float32 each: the reciprocal of what :func:`nvfp4_quantize` was given.
    output_k, output_v : torch.Tensor
        ``[batch_size, max_seq_len, heads, head_dim]``, float16 or bfloat16, contiguous, 16-byte
        aligned; ``head_dim`` is a multiple of 16.
    kv_layout : str
        ``NHD`` or ``HND``.

    Raises
    ------
    precast.errors.CacheLayoutError
        Another layout, or a cache that is neither a tensor nor a tuple of two (a ``KeyError`` and a
        ``ValueError``).
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        an output that overlaps another tensor.

    Notes
    -----
    The first product is exact, the second one float32, rounded once to nearest even. What indices
    hold is not known without waiting for the GPU, so it raises nothing: outputs stay as they are
    where a token is past its request's tokens, or its page is not in the cache. Tokens of a
    request past ``max_seq_len`` have no place. No allocation; safe in CUDA graphs; not
    differentiable. Source: arXiv:2509.25149, arXiv:2309.06180.

    Examples
    --------
    >>> import torch, precast
    >>> packed = torch.full((1, 2, 1, 8), 0x72, dtype=torch.uint8)
    >>> scales = torch.full((1, 2, 1, 1), 1.5).to(torch.float8_e4m3fn)
    >>> keys, values = torch.zeros(2, 1, 2, 1, 16, dtype=torch.bfloat16)
    >>> table, lens, g = torch.tensor([[0]]), torch.tensor([1]).int(), torch.tensor([0.5])
    >>> with precast.reference_mode():
    ...     precast.nvfp4_kv_dequantize_paged(
    ...         (packed, packed), (scales, scales), table, lens, g, g, keys, values
    ...     )
    >>> values[0, :, 0, :2]
    tensor([[0.7500, 4.5000],
            [0.0000, 0.0000]], dtype=torch.bfloat16)
    """
    _PAGED.launch(
        *split(paged_kv_cache),
        *split(kv_cache_sf),
        block_tables,
        seq_lens,
        k_scale,
        v_scale,
        output_k,
        output_v,
        is_hnd(kv_layout),
        enable_pdl,
    )
