# SPDX-License-Identifier: Apache-2.0
"""A linear layer for few rows, which reads the weight once for many of them.

Source: the shape of the tiles is that of TensorRT-LLM's kernel ``tinygemm2``.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._op.validation import check_contiguous
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

COLUMNS, VECTOR = 16, 8
MAX_DEPTH, MAX_TILES = 1 << 24, 1 << 27


def tinygemm_bf16_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`tinygemm_bf16` in plain PyTorch on any device, out of place: float32, one cast.

    Parameters
    ----------
    out : torch.Tensor, optional
        Neither read nor written.

    Returns
    -------
    torch.Tensor
        ``[rows, columns]``, dtype of ``input``.
    """
    result = input.float() @ weight.float().T
    if bias is not None:
        result = result + bias.float()
    return result.to(input.dtype)


def _check(
    export: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    if weight.shape[0] % COLUMNS:
        raise ValueError(
            f"{export}: weight must have a multiple of {COLUMNS} rows, got shape {[*weight.shape]}"
        )
    if input.shape[1] % VECTOR or input.shape[1] > MAX_DEPTH:
        raise ValueError(
            f"{export}: input must have a multiple of {VECTOR} columns up to {MAX_DEPTH}, got "
            f"shape {[*input.shape]}"
        )
    row_tiles = -(-out.shape[0] // 8)
    if max(1, out.shape[1] // COLUMNS) * row_tiles > MAX_TILES:
        raise ValueError(
            f"{export}: out must have at most {MAX_TILES} tiles of 8 rows and {COLUMNS} columns, "
            f"got shape {[*out.shape]}"
        )
    check_contiguous(export, input=input, weight=weight, out=out, bias=bias)


_TINYGEMM = Export(
    "tinygemm",
    "tinygemm_bf16",
    "input:bf16[rows,depth] weight:bf16[columns,depth] out!:bf16[rows,columns] "
    "bias?:bf16[columns] use_pdl:pdl",
    reference=tinygemm_bf16_reference,
    check=_check,
)


def _template(has_bias: bool) -> TraceTemplate:
    inputs = {
        "input": Tensor(["num_rows", "depth"], dtype="bfloat16"),
        "weight": Tensor(["num_columns", "depth"], dtype="bfloat16"),
        "out": Tensor(["num_rows", "num_columns"], dtype="bfloat16", description="Overwritten."),
    }
    if has_bias:
        inputs["bias"] = Tensor(["num_columns"], dtype="bfloat16")
    return TraceTemplate(
        op_type="gemm_bf16",
        name_prefix="tinygemm_bf16" + "_bias" * has_bias,
        description="Multiplies few rows by the transpose of a weight.",
        axes={
            "num_rows": Var("Rows of the input, few."),
            "num_columns": Const("n", "Rows of the weight.", multiple=COLUMNS),
            "depth": Const("k", multiple=64),
        },
        inputs=inputs,
        outputs={
            "result": Tensor(["num_rows", "num_columns"], param="out", dtype="bfloat16"),
        },
        reference=tinygemm_bf16_reference,
    )


_TRACE = by_form(lambda bias=None, **call: bias is not None, _template, [False, True])


@precast_api(trace=_TRACE)
@launches(_TINYGEMM)
def tinygemm_bf16(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    use_pdl: bool | None = False,
) -> None:
    r"""Multiply few rows by the transpose of a weight and add a bias, as ``F.linear`` does.

    .. math::

        out_{m,n} = \mathrm{round}\left(\sum_k input_{m,k} \cdot weight_{n,k} + bias_n\right)

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, depth]``, bfloat16, contiguous, 16-byte aligned, on a CUDA device. ``depth`` is a
        multiple of 8; multiples of 64 are fastest. Any number of rows is right; the kernel is made
        for 1 to 64.
    weight : torch.Tensor
        ``[columns, depth]``, bfloat16, contiguous, 16-byte aligned; ``columns`` is a multiple of
        16.
    out : torch.Tensor
        ``[rows, columns]``, bfloat16, contiguous. Overwritten; shares no memory with the others.
    bias : torch.Tensor, optional
        ``[columns]``, bfloat16, contiguous. Default: none.
    use_pdl : bool
        Programmatic dependent launch. Default: off, as in FlashInfer; without effect below compute
        capability 9.0. It is safe after any kernel, whether that uses it or not.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; an ``out`` that overlaps another argument.

    Notes
    -----
    Products are accumulated in float32 by tensor cores, the bias is added in float32, and the sum
    is rounded once to nearest even. The order of addition depends on ``columns`` and ``depth``
    alone: the same row gives the same bits each time, whatever the other rows are and however many
    there are. One launch; no allocation; safe in CUDA graphs; not differentiable. FlashInfer's
    function needs compute capability 9.0 and a ``depth`` that is a multiple of 64. Source:
    TensorRT-LLM, ``tinygemm2``.

    Examples
    --------
    >>> import torch, precast
    >>> x, weight = torch.ones(1, 8).bfloat16(), torch.ones(16, 8).bfloat16()
    >>> out = torch.empty(1, 16).bfloat16()
    >>> with precast.reference_mode():
    ...     precast.tinygemm_bf16(x, weight, out, weight[:, 0].contiguous())
    >>> out[0, :3].tolist()
    [9.0, 9.0, 9.0]
    """
