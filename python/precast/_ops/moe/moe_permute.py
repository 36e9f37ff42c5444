# SPDX-License-Identifier: Apache-2.0
"""Copies of tokens in the order of their experts, as they are or quantised.

Source of the quantisation: DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_contiguous, check_dtype
from precast._ops.moe._rows import (
    EPS,
    GROUP,
    ROW_BYTES,
    ROWS,
    check_matrix,
    check_scales,
    is_row,
    new_scales,
)
from precast._ops.quantize._reference_8bit import group_quant
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var

#: What both functions say.
_PERMUTED = (
    """
Parameters
----------
permuted_rows : torch.Tensor
    ``[tokens, slots]``, int32, contiguous, as :func:`moe_sort` makes it: the row of ``out`` for
    each slot. A number that is no row of ``out`` says that the slot has none; no two slots name one
    row.

Notes
-----
Rows of ``out`` that no slot names are not written. One launch; allocates only what is missing; safe
in CUDA graphs, which may be replayed with other rows; not differentiable.
"""
    + ROWS
)


def _scatter(out: torch.Tensor, permuted_rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write what each token has to the rows of its slots."""
    named = is_row(permuted_rows, len(out))
    token = torch.arange(len(permuted_rows), device=out.device)[:, None].expand_as(permuted_rows)
    # By bytes: not every device can index every dtype.
    source, target = (
        t.view(torch.uint8) if t.element_size() == 1 else t for t in (tokens.contiguous(), out)
    )
    target[permuted_rows[named].long()] = source[token[named]]


def moe_permute_reference(input: torch.Tensor, permuted_rows: torch.Tensor) -> torch.Tensor:
    """:func:`moe_permute` in plain PyTorch on any device; rows that no slot names are zero."""
    out = input.new_zeros(permuted_rows.numel(), input.shape[1])
    _scatter(out, permuted_rows, input)
    return out


def moe_permute_quant_reference(
    input: torch.Tensor, permuted_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`moe_permute_quant` in plain PyTorch; rows that no slot names are zero."""
    rows, columns = permuted_rows.numel(), input.shape[1]
    out = input.new_zeros(rows, columns, dtype=torch.float8_e4m3fn)
    scale = input.new_zeros(rows, columns // GROUP, dtype=torch.float32)
    _write_quant(input, permuted_rows, out, scale)
    return out, scale


def _write(input: torch.Tensor, permuted_rows: torch.Tensor, out: torch.Tensor) -> None:
    _scatter(out, permuted_rows, input)


def _write_quant(
    input: torch.Tensor, permuted_rows: torch.Tensor, out: torch.Tensor, out_scale: torch.Tensor
) -> None:
    codes, scales = group_quant(input.float(), GROUP, EPS, torch.float8_e4m3fn)
    _scatter(out, permuted_rows, codes)
    _scatter(out_scale, permuted_rows, scales)


def _check(
    export: str, input: torch.Tensor, permuted_rows: torch.Tensor, out: torch.Tensor
) -> None:
    vector = max(ROW_BYTES // input.element_size(), 1)
    check_matrix(export, "input", input, vector)
    check_dtype(export, "out", out, input.dtype)
    check_matrix(export, "out", out, vector)
    check_contiguous(export, permuted_rows=permuted_rows)


def _check_quant(
    export: str,
    input: torch.Tensor,
    permuted_rows: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    check_matrix(export, "input", input, GROUP)
    check_matrix(export, "out", out, GROUP)
    check_scales(export, out_scale, *out.shape)
    check_contiguous(export, permuted_rows=permuted_rows)


PERMUTE = Export(
    "moe_permute",
    "moe_permute",
    "input:any[tokens,columns] permuted_rows:i32[tokens,slots] out!:any[rows,columns] "
    "enable_pdl:pdl",
    check=_check,
    write=_write,
)
PERMUTE_QUANT = Export(
    "moe_permute_quant",
    "moe_permute_quant",
    "input:T=bf16|f16[tokens,columns] permuted_rows:i32[tokens,slots] out!:e4m3[rows,columns] "
    "out_scale!:f32[rows,groups] enable_pdl:pdl",
    check=_check_quant,
    write=_write_quant,
)


def fill_rows(made: dict[str, Any]) -> None:
    """Name each row of the experts once, for a generated call of a trace."""
    rows = made["permuted_rows"]
    rows.copy_(torch.arange(rows.numel(), device=rows.device).flip(0).view(rows.shape))


def _template(function: str, description: str, reference: Any, quantises: bool) -> TraceTemplate:
    axes: dict[str, Var | Const] = {
        "num_tokens": Var(sample=5),
        "topk": Const("k", sample=4),
        "hidden_size": Const("h", multiple=GROUP),
        "num_rows": Var("Rows of all slots.", value="num_tokens * topk", in_data=True),
    }
    of_row = ["num_rows", "hidden_size"]
    if not quantises:
        outputs = {"output": Tensor(of_row, param="out", dtype_from="input")}
    else:
        axes["num_groups"] = Const("", value=f"hidden_size // {GROUP}")
        outputs = {
            "output": Tensor(of_row, param="out", dtype="float8_e4m3fn"),
            "scale": Tensor(["num_rows", "num_groups"], param="out_scale", dtype="float32"),
        }
    return TraceTemplate(
        op_type="moe_permute",
        name_prefix=function,
        description=description,
        axes=axes,
        inputs={
            "input": Tensor(["num_tokens", "hidden_size"]),
            "permuted_rows": Tensor(["num_tokens", "topk"], dtype="int32"),
        },
        outputs=outputs,
        reference=reference,
        tags=["moe"],
        fill=fill_rows,
    )


@precast_api(
    trace=_template(
        "moe_permute",
        "Copies tokens in the order of their experts.",
        moe_permute_reference,
        quantises=False,
    )
)
@op("moe_permute")
@documented(_PERMUTED)
def moe_permute(
    input: torch.Tensor,
    permuted_rows: torch.Tensor,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Copy tokens in the order of their experts.

    .. math:: out_{r,c} = input_{t,c}, \quad r = permuted\_rows_{t,s}

    Parameters
    ----------
    input : torch.Tensor
        ``[tokens, columns]``, any dtype, on a CUDA device; stride 1 in the last dimension, rows of
        a multiple of 16 bytes that start at multiples of 16 bytes.
    out : torch.Tensor, optional
        ``[rows, columns]`` of the dtype of ``input``; strides the same. Default: a new tensor with
        a row for each slot.

    Returns
    -------
    torch.Tensor
        ``[rows, columns]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([1.0, 2.0])[:, None].expand(2, 4).contiguous()
    >>> rows = torch.tensor([[2, 0], [-1, 1]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.fused_moe.moe_permute(x, rows)[:3, 0]
    tensor([1., 2., 1.])
    """
    if out is None:
        out = input.new_empty(permuted_rows.numel(), input.shape[1])
    PERMUTE.launch(input, permuted_rows, out, enable_pdl)
    return out


@precast_api(
    trace=_template(
        "moe_permute_quant",
        "Quantises tokens to e4m3, with a scale for 128 columns, in the order of their experts.",
        moe_permute_quant_reference,
        quantises=True,
    )
)
@op("moe_permute_quant")
@documented(_PERMUTED)
def moe_permute_quant(
    input: torch.Tensor,
    permuted_rows: torch.Tensor,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise tokens to e4m3, with a scale for 128 columns, in the order of their experts.

    .. math::

        scale_{r,g} = \frac{\max(\max_{c \in g} |input_{t,c}|, 10^{-10})}{448}, \quad
        out_{r,c} = \mathrm{sat}\left(input_{t,c} \cdot \frac{1}{scale_{r,g}}\right), \quad
        r = permuted\_rows_{t,s}

    Parameters
    ----------
    input : torch.Tensor
        ``[tokens, columns]``, bfloat16 or float16, on a CUDA device; ``columns`` is a multiple of
        128, the last dimension has stride 1, rows start at multiples of 16 bytes.
    out : torch.Tensor, optional
        ``[rows, columns]``, float8_e4m3fn; strides the same. Default: a new tensor with a row for
        each slot.
    out_scale : torch.Tensor, optional
        ``[rows, columns / 128]``, float32, at any strides: *dequantisation* scales. Default: a new
        tensor with stride 1 along the rows, as grouped products read it best.

    Returns
    -------
    tuple of torch.Tensor
        ``out`` and ``out_scale``.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([1.0, 2.0])[:, None].expand(2, 128).half()
    >>> rows = torch.tensor([[1], [0]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     codes, scale = precast.fused_moe.moe_permute_quant(x, rows)
    >>> (codes.float() * scale)[:, 0]
    tensor([2., 1.])
    """
    if out is None:
        rows = permuted_rows.numel()
        out = input.new_empty(rows, input.shape[1], dtype=torch.float8_e4m3fn)
    if out_scale is None:
        out_scale = new_scales(input, *out.shape)
    PERMUTE_QUANT.launch(input, permuted_rows, out, out_scale, enable_pdl)
    return out, out_scale
