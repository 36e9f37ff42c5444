# SPDX-License-Identifier: Apache-2.0
"""SwiGLU between the two grouped products of an FP8 mixture of experts, requantised to e4m3.

Sources: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; scales of groups: DeepSeek-AI,
DeepSeek-V3 Technical Report, arXiv:2412.19437.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.validation import check_contiguous, check_elements_apart
from precast._ops.moe._backends import BACKEND, Both, backends
from precast._ops.quantize._reference_8bit import group_quant, silu_and_mul
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

#: Columns that share a scale, and the most columns of a half.
GROUP, MAX_COLUMNS = 128, 1 << 24


def moe_activation_reference(
    input: torch.Tensor, m_indices: torch.Tensor | None = None, eps: float = 1e-10
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`moe_activation` in plain PyTorch on any device; rows of no expert are zero."""
    codes, scales = group_quant(silu_and_mul(input), GROUP, eps, None)
    if m_indices is not None:
        valid = (m_indices >= 0)[:, None]
        codes = codes.view(torch.uint8).where(valid, 0).view(codes.dtype)
        scales = scales.where(valid, 0.0)
    return codes, scales.mT.contiguous()


def _write(
    input: torch.Tensor,
    m_indices: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    codes, scales = moe_activation_reference(input, m_indices, eps)
    if m_indices is None:
        out.copy_(codes)
        out_scale.copy_(scales)
        return
    rows = m_indices >= 0
    out.view(torch.uint8)[rows] = codes.view(torch.uint8)[rows]
    out_scale[:, rows] = scales[:, rows]


def _check(
    export: str,
    input: torch.Tensor,
    m_indices: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    columns = input.shape[1]
    if columns % (2 * GROUP) or columns > 2 * MAX_COLUMNS:
        raise ValueError(
            f"{export}: input must have a multiple of {2 * GROUP} columns up to {2 * MAX_COLUMNS}, "
            f"got shape {[*input.shape]}"
        )
    check_contiguous(export, m_indices=m_indices)
    for name, tensor, shape in (
        ("out", out, [input.shape[0], columns // 2]),
        ("out_scale", out_scale, [columns // 2 // GROUP, input.shape[0]]),
    ):
        if [*tensor.shape] != shape:
            raise ValueError(f"{export}: {name} must have shape {shape}, got {[*tensor.shape]}")
        check_elements_apart(export, name, tensor)


_BOTH = Both.of(
    "moe_activation",
    "input:T[rows,gated] m_indices?:i32[rows] eps:float(1e-30-) out!:e4m3 out_scale!:f32 "
    "enable_pdl:pdl",
    reference=moe_activation_reference,
    check=_check,
    write=_write,
)


def _fill(made: dict[str, Any]) -> None:
    """Some rows of no expert behind those of each."""
    indices = made["m_indices"]
    numbers = indices.new_tensor(range(len(indices)))
    indices.copy_((numbers // 8).where(numbers % 8 < 6, -1))


def _template(has_indices: bool) -> TraceTemplate:
    inputs: dict[str, Tensor | Scalar] = {"input": Tensor(["num_rows", "gated_size"])}
    if has_indices:
        inputs["m_indices"] = Tensor(
            ["num_rows"], dtype="int32", description="The expert of each row; -1 for none."
        )
    inputs["eps"] = Scalar("float32", sample=1e-10)
    return TraceTemplate(
        op_type="moe_activation",
        name_prefix="moe_activation" + "_indexed" * has_indices,
        description="silu(gate) * up in e4m3, with a scale for each 128 columns.",
        axes={
            "num_rows": Var("Rows of all experts, padding included."),
            "gated_size": Const("n", "Gate, then up.", multiple=2 * GROUP),
            "hidden_size": Const("", value="gated_size // 2"),
            "num_groups": Const("", value=f"gated_size // {2 * GROUP}"),
        },
        inputs=inputs,
        outputs={
            "output": Tensor(["num_rows", "hidden_size"], param="out", dtype="float8_e4m3fn"),
            "scale": Tensor(["num_groups", "num_rows"], param="out_scale", dtype="float32"),
        },
        reference=moe_activation_reference,
        tags=["moe"],
        fill=_fill if has_indices else None,
    )


_TRACE = by_form(lambda m_indices=None, **call: m_indices is not None, _template, [False, True])


@precast_api(trace=_TRACE)
@op("moe_activation", backends=backends("moe_activation"), chosen_by_body=True)
@documented(BACKEND)
def moe_activation(
    input: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    eps: float = 1e-10,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Apply SwiGLU to the rows of experts and quantise to e4m3 by groups of 128 columns.

    It stands between the two grouped products of a mixture of experts: ``input`` is what the first
    one returns, and the results are what the second one takes.

    .. math::

        y_c = \frac{g_c}{1 + e^{-g_c}} \cdot u_c, \quad
        s_j = \frac{\max(\max_{c \in j} |y_c|, eps)}{448}, \quad
        out_c = \mathrm{sat}\left(y_c \cdot \frac{1}{s_j}\right), \quad
        g = input_{:n},\ u = input_{n:}

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, 2 * n]``, float16 or bfloat16, on a CUDA device: the gate, then the other factor.
        The last dimension has stride 1, rows start at multiples of 16 bytes; ``n`` is a multiple
        of 128.
    m_indices : torch.Tensor, optional
        ``[rows]``, int32, contiguous: the expert of each row, as
        :func:`~precast.gemm.group_deepgemm_fp8_nt_groupwise` takes it. Rows with a negative number
        belong to none, such as the padding between experts: they are not read, and what they have
        in the outputs stays as it is. Default: every row belongs to one.
    eps : float
        The smallest magnitude that a scale stands for; at least 1e-30.
    out : torch.Tensor, optional
        The quantised values ``[rows, n]``, float8_e4m3fn; the last dimension has stride 1, rows
        start at multiples of 8 bytes. Default: a new tensor, in which rows of no expert are
        undefined.
    out_scale : torch.Tensor, optional
        *Dequantisation* scales ``[n / 128, rows]``, float32; the last dimension has stride 1. It is
        the layout that :func:`~precast.gemm.gemm_fp8_nt_groupwise` calls ``"MN"``; others take its
        transpose. Default: a new tensor.

    Returns
    -------
    tuple of torch.Tensor
        ``out`` and ``out_scale``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; an output that overlaps another argument; an ``eps`` that is too small or not
        finite.

    Notes
    -----
    The activation and the product are float32 and are not rounded to 16 bits before they are
    quantised; the exponential and the division are exact to about 2e-5. NaN and infinity are those
    of :func:`~precast.quantization.static_quant_fp8`. Allocates only missing outputs; one launch;
    safe in CUDA graphs, whichever rows have experts; not differentiable. Source: DeepSeek-V3.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.ones(2, 256).bfloat16()
    >>> with precast.reference_mode():
    ...     codes, scale = precast.moe_activation(x, torch.tensor([0, -1], dtype=torch.int32))
    >>> codes.shape, scale.shape, codes[0, 0].float() * scale[0, 0]
    (torch.Size([2, 128]), torch.Size([1, 2]), tensor(0.7311))
    """
    if out is None:
        columns = input.shape[1] // 2
        out = input.new_empty(input.shape[0], columns, dtype=torch.float8_e4m3fn)
    if out_scale is None:
        columns = input.shape[1] // (2 * GROUP)
        out_scale = input.new_empty(columns, input.shape[0], dtype=torch.float32)
    export = _BOTH.cuda if backend == "auto" or backend == "cuda" else _BOTH.other(backend)
    export.launch(input, m_indices, eps, out, out_scale, enable_pdl)
    return out, out_scale
