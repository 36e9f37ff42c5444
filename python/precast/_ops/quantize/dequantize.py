# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of 8-bit values with one scale for each tile."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._ops.quantize._outputs import check_output_dtype
from precast._ops.quantize._reference_8bit import unpack_exponents
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch


def dequantize_fp8_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    scale_major_mode: str = "K",
    tile_rows: int | None = None,
    tile_columns: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`dequantize_fp8` in plain PyTorch on any device, bit for bit."""
    dtype = torch.float32 if out_dtype is None else out_dtype
    if scale_major_mode == "MN":
        x_scale = x_scale.transpose(-1, -2)
    rows, columns = _tile(x, x_scale, tile_rows, tile_columns)
    scales = unpack_exponents(x_scale) if x_scale.dtype == torch.int32 else x_scale
    scales = scales.repeat_interleave(rows, dim=-2)[..., : x.shape[-2], :]
    scales = scales.repeat_interleave(columns, dim=-1)[..., : x.shape[-1]]
    return (x.float() * scales).to(dtype)


def _tile(
    x: torch.Tensor, scale: torch.Tensor, tile_rows: int | None, tile_columns: int | None
) -> tuple[int, int]:
    """Return the tile, where a size that is left out follows from the number of scales.

    Shapes without tiles give a tile of one element; the check of the arguments raises.
    """
    sizes, counts = x.shape, scale.shape
    if len(sizes) < 2 or len(counts) < 2:
        return 1, 1
    if tile_columns is None and scale.dtype == torch.int32:
        tile_columns = 128  # DeepGEMM's
    return (
        _step("tile_rows", sizes[-2], counts[-2], tile_rows),
        _step("tile_columns", sizes[-1], counts[-1], tile_columns),
    )


def _step(name: str, size: int, count: int, step: int | None) -> int:
    if step is not None:
        return step
    if count == 0 or size == 0:
        return 1
    if size % count:
        raise ValueError(
            f"dequantize_fp8: {size} elements are no whole number of elements for each of {count} "
            f"scales; give {name}"
        )
    return size // count


def _check(
    export: str, x: torch.Tensor, x_scale: torch.Tensor, tile_rows: int, tile_columns: int
) -> None:
    packed = x_scale.dtype == torch.int32
    rows = (x.shape[-2] + tile_rows - 1) // tile_rows
    columns = (x.shape[-1] + tile_columns - 1) // tile_columns
    if packed:
        columns = (columns + 3) // 4
    if x_scale.shape != (*x.shape[:-2], rows, columns):
        raise ValueError(
            f"{export}: x_scale must hold [{rows}, {columns}] "
            f"{'words of exponents' if packed else 'scales'} a matrix for tiles of {tile_rows} x "
            f"{tile_columns}, got shape {[*x_scale.shape]} for x {[*x.shape]}"
        )


_DEQUANTIZE = Export(
    "dequantize",
    "dequantize_fp8",
    "x:T=e4m3|e5m2|i8[*batch(0-1),m,k] x_scale:f32|i32 tile_rows:size(1-) tile_columns:size(1-) "
    "out!:like(x,U=f32|f16|bf16,apart) enable_pdl:pdl",
    reference=dequantize_fp8_reference,
    check=_check,
    derived={"out_dtype": lambda out: out.dtype},
)

_SCALES = "Multiplies the values of a tile."
_BY_TOKEN = TraceTemplate(
    op_type="quantization",
    name_prefix="dequantize_fp8",
    description="Quantised rows times a dequantisation scale for each row, or each group of a row.",
    axes={
        "num_tokens": Var(),
        "hidden_size": Const(abbrev="h", sample=256),
        "num_scales": Const(abbrev="s", sample=2),
    },
    inputs={
        "x": Tensor(["num_tokens", "hidden_size"], dtype="float8_e4m3fn"),
        "x_scale": Tensor(["num_tokens", "num_scales"], dtype="float32", description=_SCALES),
    },
    outputs={"output": Tensor(["num_tokens", "hidden_size"], "out", "float32")},
    reference=dequantize_fp8_reference,
)
_BY_BLOCK = TraceTemplate(
    op_type="quantization",
    name_prefix="dequantize_fp8_blocks",
    description="A quantised weight times a dequantisation scale for each of its blocks.",
    axes={
        "n": Const(sample=300),
        "k": Const(sample=384),
        "row_blocks": Const(abbrev="", sample=3),
        "column_blocks": Const(abbrev="", sample=3),
    },
    inputs={
        "x": Tensor(["n", "k"], dtype="float8_e4m3fn"),
        "x_scale": Tensor(["row_blocks", "column_blocks"], dtype="float32", description=_SCALES),
        "tile_rows": Scalar("int32", sample=128),
        "tile_columns": Scalar("int32", sample=128),
    },
    outputs={"output": Tensor(["n", "k"], "out", "float32")},
    reference=dequantize_fp8_reference,
)


@dispatch(_BY_TOKEN, _BY_BLOCK)
def _trace(x: Any, x_scale: Any, out: Any = None, **call: Any) -> TraceTemplate:
    dtype = call.get("out_dtype") if out is None else out.dtype
    if (
        x.dtype != torch.float8_e4m3fn
        or x_scale.dtype != torch.float32
        or dtype not in (None, torch.float32)
        or call.get("scale_major_mode", "K") != "K"
    ):
        raise ValueError(
            f"{_BY_TOKEN!r}: only calls from float8_e4m3fn to float32 with float32 scales in the "
            f"mode K have a definition"
        )
    return _BY_TOKEN if x_scale.shape[0] == x.shape[0] else _BY_BLOCK


@precast_api(trace=_trace)
@op("dequantize")
def dequantize_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    scale_major_mode: str = "K",
    tile_rows: int | None = None,
    tile_columns: int | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Dequantise 8-bit values with one scale for each tile: a tensor, token, group or block.

    .. math:: out_{rc} = \mathrm{round}(x_{rc} \cdot s_{ij}), \quad
        i = \lfloor r / t_r \rfloor,\ j = \lfloor c / t_c \rfloor

    Parameters
    ----------
    x : torch.Tensor
        Quantised values ``[m, k]`` or ``[batch, m, k]``, float8_e4m3fn, float8_e5m2 or int8, on a
        CUDA device. The last dimension has stride 1. 16-byte aligned rows are fastest.
    x_scale : torch.Tensor
        *Dequantisation* scales ``[..., row tiles, column tiles]`` in float32, at any strides: what
        the quantisations of this module return. ``[1, 1]`` for a whole matrix. Or int32: four
        exponents a word along the columns.
    scale_major_mode : str
        ``"K"``, or ``"MN"`` for scales ``[..., column tiles, row tiles]``.
    tile_rows, tile_columns : int, optional
        The size of a tile; 128 x 128 for :func:`per_block_cast_to_fp8`. Tiles at the ends may be
        partial. Default: the size that gives as many tiles as there are scales; 128 columns for
        packed exponents.
    out_dtype : torch.dtype, optional
        float32, float16 or bfloat16; that of ``out`` if both are given. Default: that of ``out``,
        else float32.
    out : torch.Tensor, optional
        Where to write: shape and device of ``x``, strides likewise. Default: a new tensor.

    Returns
    -------
    torch.Tensor
        The shape of ``x``; ``out`` if it is given.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        scales that are not those of the tiles; a tile that has to be given; an ``out`` that
        overlaps ``x``.

    Notes
    -----
    The product is float32, rounded once to nearest even. An exponent of 255 is NaN. Allocates only
    a missing ``out``; safe in CUDA graphs; not differentiable. FlashInfer's test helper has the
    first three arguments.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([[2.0, -448.0], [0.0, 1.0]]).to(torch.float8_e4m3fn)
    >>> with precast.reference_mode():
    ...     precast.dequantize_fp8(x, torch.tensor([[0.5], [3.0]]))
    tensor([[   1., -224.],
            [   0.,    3.]])
    """
    if scale_major_mode not in ("K", "MN"):
        raise ValueError(
            f"dequantize_fp8: scale_major_mode must be K or MN, got {scale_major_mode!r}"
        )
    if scale_major_mode == "MN":
        x_scale = x_scale.transpose(-1, -2)
    rows, columns = _tile(x, x_scale, tile_rows, tile_columns)
    if out is None:
        dtype = torch.float32 if out_dtype is None else out_dtype
        out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    elif out_dtype is not None:
        check_output_dtype("dequantize_fp8", "out_dtype", out_dtype, out)
    _DEQUANTIZE.launch(x, x_scale, rows, columns, out, enable_pdl)
    return out
