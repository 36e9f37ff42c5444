# SPDX-License-Identifier: Apache-2.0
"""Numbers from a paged key-value cache in NVFP4, gathered by a page table.

Sources: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149; Kwon et al.,
Efficient Memory Management for Large Language Model Serving with PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel
from precast._op.torch_ops import torch_ops
from precast._ops.paged._cache import (
    IS_HND,
    Cache,
    check_cache,
    check_call,
    check_layout,
    halves,
    split,
)
from precast._ops.quantize._paged import check_paged_call, dequantized_pages, paged_trace
from precast.api_logging import precast_api

_NAME = "nvfp4_kv_dequantize_paged"


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
    """:func:`nvfp4_kv_dequantize_paged` in plain PyTorch, out of place.

    Parameters
    ----------
    paged_kv_cache, kv_cache_sf : torch.Tensor or tuple of torch.Tensor
        The cache and its scales, any device.
    block_tables, seq_lens : torch.Tensor
        The pages and tokens of each request.
    k_scale, v_scale : torch.Tensor
        One number each.
    output_k, output_v : torch.Tensor
        What stands where a token is left as it is; not changed.
    kv_layout : str
        ``NHD`` or ``HND``.

    Returns
    -------
    tuple of torch.Tensor
        Keys and values, with shape and dtype of the outputs.

    Examples
    --------
    >>> import torch
    >>> packed = torch.full((1, 2, 1, 8), 0x72, dtype=torch.uint8)
    >>> scales = torch.full((1, 2, 1, 1), 1.5).to(torch.float8_e4m3fn)
    >>> out = torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16)
    >>> table, g = torch.tensor([[0]]), torch.tensor(0.5)
    >>> keys, _ = nvfp4_kv_dequantize_paged_reference(
    ...     (packed, packed), (scales, scales), table, torch.tensor([1]), g, g, out, out
    ... )
    >>> keys[0, :, 0, :2]
    tensor([[0.7500, 4.5000],
            [0.0000, 0.0000]], dtype=torch.bfloat16)
    """
    hnd = kv_layout == "HND"
    codes, factors = halves(paged_kv_cache), halves(kv_cache_sf)
    pages = block_tables, seq_lens, hnd
    keys = dequantized_pages(codes[0], factors[0], k_scale, output_k, *pages)
    return keys, dequantized_pages(codes[1], factors[1], v_scale, output_v, *pages)


def _paged_into(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    k_sf: torch.Tensor,
    v_sf: torch.Tensor | None,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    hnd: bool,
    enable_pdl: bool,
) -> None:
    cache: Cache = k_cache if v_cache is None else (k_cache, v_cache)
    factors: Cache = k_sf if v_sf is None else (k_sf, v_sf)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    outputs = {"output_k": output_k, "output_v": output_v}
    check_paged_call(_NAME, cache, factors, hnd, block_tables, seq_lens, scales, outputs)
    layout = "HND" if hnd else "NHD"
    tables = block_tables, seq_lens, k_scale, v_scale, output_k, output_v
    keys, values = nvfp4_kv_dequantize_paged_reference(cache, factors, *tables, layout)
    output_k.copy_(keys)
    output_v.copy_(values)


def _public(
    k_cache: object,
    v_cache: object,
    k_sf: object,
    v_sf: object,
    block_tables: object,
    seq_lens: object,
    k_scale: object,
    v_scale: object,
    output_k: object,
    output_v: object,
    hnd: bool,
    enable_pdl: bool,
) -> tuple[object, ...]:
    cache = k_cache if v_cache is None else (k_cache, v_cache)
    factors = k_sf if v_sf is None else (k_sf, v_sf)
    tables = block_tables, seq_lens, k_scale, v_scale
    return (cache, factors, *tables, output_k, output_v, "HND" if hnd else "NHD", enable_pdl)


_paged = Kernel(
    "paged_dequantize",
    _NAME,
    schema="(Tensor k_cache, Tensor? v_cache, Tensor k_sf, Tensor? v_sf, Tensor block_tables, "
    "Tensor seq_lens, Tensor k_scale, Tensor v_scale, Tensor(a!) output_k, Tensor(b!) output_v, "
    "bool hnd, bool enable_pdl) -> ()",
    reference=_paged_into,
    axes=("output_k",),
    public=_public,
)

_TRACE = paged_trace(
    _NAME,
    "Keys and values of requests as numbers, from the pages of an NVFP4 cache.",
    nvfp4_kv_dequantize_paged_reference,
)


@precast_api(trace=_TRACE)
@backend_requirement({}, common_check=served_by("paged_dequantize"))
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
    r"""Numbers of whole requests from a paged key-value cache in NVFP4, into given outputs.

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
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

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
    try:
        hnd = IS_HND.get(kv_layout)
        if hnd is None:
            check_layout(_NAME, kv_layout)
        run = (
            torch_ops.nvfp4_kv_dequantize_paged
            if torch.compiler.is_compiling()
            else _paged[output_k.dtype, output_k.get_device()]
        )
        run(
            *split(paged_kv_cache),
            *split(kv_cache_sf),
            block_tables,
            seq_lens,
            k_scale,
            v_scale,
            output_k,
            output_v,
            hnd,
            enable_pdl is not False,
        )
    except (AttributeError, TypeError):
        check_call(
            _NAME,
            paged_kv_cache,
            kv_layout,
            block_tables=block_tables,
            seq_lens=seq_lens,
            k_scale=k_scale,
            v_scale=v_scale,
            output_k=output_k,
            output_v=output_v,
        )
        check_cache(_NAME, "kv_cache_sf", kv_cache_sf)
        raise
