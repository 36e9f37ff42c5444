# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation of weights with one scale for each block of 128 x 128.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.quantize._outputs import DTYPE, quantized_like
from precast._ops.quantize._reference_8bit import dequant_scale, quantize
from precast._ops.quantize._trace_8bit import of_e4m3
from precast._ops.quantize.per_tensor import per_token_quant_fp8
from precast._ops.quantize.per_token_group import (
    CAST_EPS,
    per_token_cast_to_fp8,
    per_token_group_quant_8bit,
)
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate

BLOCK = 128


def per_block_cast_to_fp8_reference(
    x: torch.Tensor,
    use_ue8m0: bool = True,
    eps: float = 1e-4,
    dst_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`per_block_cast_to_fp8` in plain PyTorch on any device, bit for bit."""
    rows, columns = x.shape[-2:]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    quantized, scale = _tile_quant(padded, BLOCK, BLOCK, eps, dst_dtype, use_ue8m0)
    return quantized[..., :rows, :columns].contiguous(), scale


def _tile_quant(
    x: torch.Tensor,
    rows: int,
    columns: int,
    eps: float,
    dtype: torch.dtype | None,
    power_of_two: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 ``x`` by whole tiles, and return their scales, too."""
    tiles = x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # [..., i, r, j, c]
    scale = dequant_scale(tiles.abs().amax(dim=(-3, -1), keepdim=True), eps, dtype, power_of_two)
    quantized = quantize(tiles, scale, dtype).flatten(-4, -3).flatten(-2)
    return quantized, scale.squeeze(-1).squeeze(-2)


def _scale_shape(x: torch.Tensor) -> tuple[int, ...]:
    *batch, rows, columns = x.shape
    return (*batch, (rows + BLOCK - 1) // BLOCK, (columns + BLOCK - 1) // BLOCK)


def _new_scales(x: torch.Tensor) -> torch.Tensor:
    # The check of the arguments raises for a tensor of fewer dimensions.
    shape = _scale_shape(x) if x.dim() > 1 else (0,)
    return x.new_empty(*shape, dtype=torch.float32)


def _check(export: str, x: torch.Tensor, out_scale: torch.Tensor) -> None:
    if out_scale.shape != _scale_shape(x):
        raise ValueError(
            f"{export}: out_scale must hold a scale for each block of {BLOCK} x {BLOCK}, got shape "
            f"{[*out_scale.shape]} for x {[*x.shape]}"
        )


_PER_BLOCK = Export(
    "quantize",
    "per_block_cast_to_fp8",
    "x:T[*batch(0-1),n,k] use_ue8m0:bool eps:float(1e-30-) out!:like(x,U=e4m3|e5m2|i8,apart) "
    "out_scale!:f32 enable_pdl:pdl",
    reference=per_block_cast_to_fp8_reference,
    check=_check,
    new={"out": quantized_like, "out_scale": _new_scales},
    derived=DTYPE,
)
_TRACE = TraceTemplate(
    op_type="quantization",
    name_prefix="per_block_cast_to_fp8",
    description="A quantised weight and a dequantisation scale for each block of 128 x 128.",
    axes={
        "n": Const(sample=200),
        "k": Const(sample=384),
        "row_blocks": Const(abbrev="", value="(n + 127) // 128"),
        "column_blocks": Const(abbrev="", value="(k + 127) // 128"),
    },
    inputs={
        "weight": Tensor(["n", "k"], param="x"),
        "use_ue8m0": Scalar("bool"),
        "eps": Scalar("float32"),
    },
    outputs={
        "x_q": Tensor(["n", "k"], "out", "float8_e4m3fn"),
        "x_s": Tensor(["row_blocks", "column_blocks"], "out_scale", "float32"),
    },
    reference=per_block_cast_to_fp8_reference,
)


@precast_api(trace=of_e4m3(_TRACE))
@launches(_PER_BLOCK)
@documented(per_token_quant_fp8, per_token_cast_to_fp8)
def per_block_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool = True,
    eps: float = 1e-4,
    dst_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Cast weights as DeepGEMM does: to 8 bits with a scale for each block of 128 x 128.

    .. math::

        s_{ij} = \frac{\max(\max_{block\ ij} |x|, eps)}{\max(Q)}, \quad
        x_q = \mathrm{sat}\left(x \cdot \frac{1}{s}\right)

    Parameters
    ----------
    x : torch.Tensor
        ``[n, k]``, or ``[experts, n, k]``; float16, bfloat16 or float32; on a CUDA device. The last
        dimension has stride 1. Blocks at the ends may be partial.
    out_scale : torch.Tensor, optional
        ``[..., ceil(n / 128), ceil(k / 128)]``, float32, contiguous. Default: a new tensor.

    Returns
    -------
    tuple of torch.Tensor
        The quantised values, and the *dequantisation* scales in float32, of shape
        ``[..., ceil(n / 128), ceil(k / 128)]``.

    Notes
    -----
    Arithmetic, rounding, NaN and infinity are those of :func:`per_token_group_quant_8bit`. Safe in
    CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     x_q, x_s = precast.per_block_cast_to_fp8(torch.full((130, 128), 7.0))
    >>> x_s
    tensor([[0.0156],
            [0.0156]])
    """


@precast_api
def quantize_fp8(
    x: torch.Tensor,
    scale_shape: Sequence[int],
    tile_shape: Sequence[int],
    scale_major_mode: str = "K",
    use_ue8m0: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 by tiles, with the arguments of FlashInfer's test helper.

    Parameters
    ----------
    x : torch.Tensor
        ``[m, k]`` or ``[batch, m, k]``, float16, bfloat16 or float32, on a CUDA device; whole
        tiles.
    scale_shape : sequence of int
        The shape of the scales: the numbers of tiles ``([batch,] rows, columns)`` for the mode
        ``"K"``, the last two exchanged for ``"MN"``.
    tile_shape : sequence of int
        ``([1,] 1, group)``, group 16, 32, 64 or 128, or ``([1,] 128, 128)``.
    scale_major_mode : str
        ``"K"``: a row's scales are contiguous. ``"MN"``: a column's are.
    use_ue8m0 : bool
        Scales are rounded up to powers of two, as FlashInfer's helper does.

    Returns
    -------
    tuple of torch.Tensor
        Quantised values in the shape of ``x``, and the *dequantisation* scales ``scale_shape`` in
        float32, contiguous. The least amax is 1e-4.

    Raises
    ------
    ValueError
        Another tile or mode; a ``scale_shape`` that is not that of the tiles; as
        :func:`per_token_group_quant_8bit` and :func:`per_block_cast_to_fp8`.

    Notes
    -----
    Not the helper's ``x / (scale + 1e-8)``, which is off by up to 4 % for the smallest scale, but
    ``x * (1 / scale)``.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.quantize_fp8(torch.full((2, 128), 7.0), (1, 2), (1, 128), "MN")[1]
    tensor([[0.0156, 0.0156]])
    """
    tile = (*tile_shape,)
    legal = (
        len(tile) == x.dim()
        and tile[:-2] in ((), (1,))
        and (tile[-2] == 1 or tile[-2:] == (128, 128))
    )
    if not legal:
        raise ValueError(
            f"quantize_fp8: tile_shape must be ([1,] 1, group) or ([1,] 128, 128) for x "
            f"{[*x.shape]}, got {tile}"
        )
    if scale_major_mode not in ("K", "MN"):
        raise ValueError(
            f"quantize_fp8: scale_major_mode must be K or MN, got {scale_major_mode!r}"
        )
    tiles = [size // step for size, step in zip(x.shape, tile)]
    if any(size % step for size, step in zip(x.shape, tile)):
        raise ValueError(f"quantize_fp8: x must be whole tiles of {tile}, got {[*x.shape]}")
    by_columns = scale_major_mode == "MN"
    wanted = [*tiles[:-2], tiles[-1], tiles[-2]] if by_columns else tiles
    if [*scale_shape] != wanted:
        raise ValueError(
            f"quantize_fp8: scale_shape must be {wanted} for x {[*x.shape]} in tiles of {tile} and "
            f"mode {scale_major_mode}, got {[*scale_shape]}"
        )
    if tile[-2] == 1:
        x_q, x_s = per_token_group_quant_8bit(
            x, tile[-1], CAST_EPS, column_major_scales=by_columns, scale_ue8m0=use_ue8m0
        )
    else:
        x_q, x_s = per_block_cast_to_fp8(x, use_ue8m0)
    return x_q, x_s.transpose(-1, -2).contiguous() if by_columns else x_s


@documented(quantize_fp8)
def quantize_fp8_reference(
    x: torch.Tensor,
    scale_shape: Sequence[int],
    tile_shape: Sequence[int],
    scale_major_mode: str = "K",
    use_ue8m0: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_fp8` in plain PyTorch on any device, bit for bit.

    Parameters
    ----------
    tile_shape : sequence of int
        Any tile of which ``x`` is a multiple, in each matrix alone.
    """
    rows, columns = tile_shape[-2:]
    x_q, scale = _tile_quant(x.float(), rows, columns, CAST_EPS, None, use_ue8m0)
    scale = scale.transpose(-1, -2).contiguous() if scale_major_mode == "MN" else scale
    return x_q, scale.reshape((*scale_shape,))
