# SPDX-License-Identifier: Apache-2.0
"""Gated activations: ``act(gate) * up``, with the gate in the first half of the last dimension.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from precast._base.torch import torch
from precast._op.decorators import CheckedOp, reference_of
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._op.validation import check_half
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var

P = ParamSpec("P")
R = TypeVar("R")


def silu_and_mul_reference(input: torch.Tensor) -> torch.Tensor:
    """:func:`silu_and_mul` in plain PyTorch on any device: fp32 arithmetic, one cast at the end."""
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def gelu_and_mul_reference(input: torch.Tensor) -> torch.Tensor:
    """:func:`gelu_and_mul` in plain PyTorch on any device: fp32 arithmetic, one cast at the end."""
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate) * up).to(input.dtype)


def gelu_tanh_and_mul_reference(input: torch.Tensor) -> torch.Tensor:
    """:func:`gelu_tanh_and_mul` in plain PyTorch on any device: fp32 arithmetic, then one cast."""
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(input.dtype)


def _new_output(input: torch.Tensor) -> torch.Tensor:
    if input.dim() == 2:  # Half the time of what follows: torch parses two plain tuples.
        rows, last = input.shape
        columns = last // 2
        return input.new_empty_strided((rows, columns), (columns or 1, 1))
    if input.dim() == 0:  # The check of the shapes raises.
        return torch.empty_like(input)
    *leading, last = input.shape
    return input.new_empty((*leading, last // 2))


def _gated(activation: str) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Make a public op of a function without a body; its reference is the function of its name."""

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        name, reference = function.__name__, reference_of(function)
        export = Export(
            "activation",
            name,
            "input:T[*rows] out!:T enable_pdl:pdl",
            reference=reference,
            check=check_half,
            new={"out": _new_output},
        )
        rows = "*num_tokens"
        trace = TraceTemplate(
            op_type="activation",
            name_prefix=name,
            description=f"The {activation} of the first half of each row times the second half.",
            axes={
                rows: Var(),
                "gate_up_size": Const(abbrev=""),
                "intermediate_size": Const(abbrev="i", value="gate_up_size // 2"),
            },
            inputs={"gate_up": Tensor([rows, "gate_up_size"], param="input")},
            outputs={
                "output": Tensor([rows, "intermediate_size"], dtype_from="gate_up", param="out")
            },
            reference=reference,
        )
        return precast_api(trace=trace)(launches(export)(function))

    return decorate


@_gated("SiLU")
def silu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    r"""Multiply the SiLU of the first half by the second half, as SwiGLU does.

    .. math::

        out_{c} = \mathrm{round}\left(\frac{g_c}{1 + e^{-g_c}} \cdot u_c\right),
        \quad g = input_{:n},\ u = input_{n:}

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * n]``, float16 or bfloat16, on a CUDA device, at a 16-byte aligned address; the
        last dimension has stride 1 and is a multiple of 16 bytes, the others merge into at most
        two strides.
    out : torch.Tensor, optional
        ``[..., n]``, dtype and device of ``input``, aligned and strided likewise, not overlapping
        ``input``. Default: a new tensor.

    Returns
    -------
    torch.Tensor
        ``[..., n]``, dtype of ``input``; ``out`` if it is given.

    Raises
    ------
    ValueError
        "The pointers must be multiple of 16 bytes." for a last dimension or an address that is not;
        a tensor that is not on a CUDA device; another dtype, device or strides than above.
    precast.errors.OutputShapeError
        An ``out`` of another shape (an ``AssertionError`` and a ``ValueError``).

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even. Allocates only a missing ``out``; safe
    in CUDA graphs; not differentiable. Source: arXiv:2002.05202.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.silu_and_mul(torch.tensor([[1.0, 0.0, 2.0, 3.0]]))
    tensor([[1.4621, 0.0000]])
    """


@_gated("exact GELU")
@documented(silu_and_mul)
def gelu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    r"""Multiply the exact GELU of the first half by the second half, as GEGLU does.

    .. math::

        out_{c} = \mathrm{round}\left(\frac{g_c}{2}
        \left(1 + \mathrm{erf}\frac{g_c}{\sqrt 2}\right) u_c\right),
        \quad g = input_{:n},\ u = input_{n:}

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even. Allocates only a missing ``out``; safe
    in CUDA graphs; not differentiable. Source: arXiv:2002.05202, arXiv:1606.08415.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.gelu_and_mul(torch.tensor([[1.0, 0.0, 2.0, 3.0]]))
    tensor([[1.6827, 0.0000]])
    """


@_gated("tanh GELU")
@documented(silu_and_mul)
def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    r"""Multiply the tanh approximation of GELU of the first half by the second half (Gemma's form).

    .. math::

        out_{c} = \mathrm{round}\left(\frac{g_c}{2} \left(1 + \tanh\left(\sqrt{2 / \pi}
        \left(g_c + 0.044715\, g_c^3\right)\right)\right) u_c\right),
        \quad g = input_{:n},\ u = input_{n:}

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even. Allocates only a missing ``out``; safe
    in CUDA graphs; not differentiable. Source: arXiv:2002.05202, arXiv:1606.08415.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.gelu_tanh_and_mul(torch.tensor([[1.0, 0.0, 2.0, 3.0]]))
    tensor([[1.6824, 0.0000]])
    """
