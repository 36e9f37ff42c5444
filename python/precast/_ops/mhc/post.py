# SPDX-License-Identifier: Apache-2.0
"""The residual streams behind a layer."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var

STREAMS = 4


def mhc_post_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    """:func:`mhc_post` in plain PyTorch on any device, out of place."""
    post = post_layer_mix.reshape(residual.shape[:-1])
    mixed = comb_res_mix.mT @ residual.float()
    return (x.float()[..., None, :] * post[..., None] + mixed).to(residual.dtype)


def _check(export: str, x: torch.Tensor, post_layer_mix: torch.Tensor) -> None:
    streams = (*x.shape[:-1], STREAMS)
    if post_layer_mix.shape not in (streams, (*streams, 1)):
        raise ValueError(
            f"{export}: post_layer_mix must have shape [..., 4] or [..., 4, 1] with the leading "
            f"dimensions of x, got {[*post_layer_mix.shape]}"
        )


_POST = Export(
    "mhc",
    "mhc_post",
    "x:T=f16|bf16[*tokens(1-),hidden] residual:T[*tokens,4,hidden] post_layer_mix:f32 "
    "comb_res_mix:f32[*tokens,4,4] out!:like(residual) enable_pdl:pdl",
    reference=mhc_post_reference,
    check=_check,
)

_TRACE = TraceTemplate(
    op_type="mhc_post",
    name_prefix="mhc_post",
    description="Adds a layer's output to four residual streams that are mixed.",
    axes={
        "*num_tokens": Var(),
        "streams": Const("", value="4"),
        "hidden_size": Const("h"),
    },
    inputs={
        "x": Tensor(["*num_tokens", "hidden_size"]),
        "residual": Tensor(["*num_tokens", "streams", "hidden_size"]),
        "post_layer_mix": Tensor(["*num_tokens", "streams"], dtype="float32"),
        "comb_res_mix": Tensor(["*num_tokens", "streams", "streams"], dtype="float32"),
    },
    outputs={
        "output": Tensor(["*num_tokens", "streams", "hidden_size"], "out", dtype_from="residual")
    },
    reference=mhc_post_reference,
)


@precast_api(trace=_TRACE)
@launches(_POST)
def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Add the output of a layer to the four residual streams, which are mixed.

    .. math::

        out_{t,n,h} = \mathrm{round}\left(x_{t,h} \cdot post_{t,n}
            + \sum_o residual_{t,o,h} \cdot comb_{t,o,n}\right)

    Parameters
    ----------
    x : torch.Tensor
        ``[..., hidden]`` with at least one leading dimension, contiguous: the output of the layer;
        bfloat16 or float16, on a CUDA device.
    residual : torch.Tensor
        ``[..., 4, hidden]``, contiguous, dtype and device of ``x``.
    post_layer_mix : torch.Tensor
        ``[..., 4]`` or ``[..., 4, 1]``, float32, contiguous, at a multiple of 16 bytes: the weight
        of ``x`` in each new stream.
    comb_res_mix : torch.Tensor
        ``[..., 4, 4]``, float32, likewise: the weight of each old stream in each new one, the old
        one first.
    out : torch.Tensor, optional
        Where to write: shape, dtype and device of ``residual``, contiguous. May be ``residual``.
        Default: a new tensor.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``residual``; ``out`` if it is given.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        an ``out`` that overlaps another argument.

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even. ``out`` is an addition to FlashInfer's
    signature, whose function copies tensors that are not contiguous. Any hidden size; multiples of
    8 are fastest. Allocates only a missing ``out``; safe in CUDA graphs; not differentiable.
    Source: arXiv:2512.24880.

    Examples
    --------
    >>> import torch, precast
    >>> x, streams = torch.ones(1, 2, dtype=torch.float16), torch.ones(1, 4, 2, dtype=torch.float16)
    >>> post, comb = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.eye(4)[None]
    >>> with precast.reference_mode():
    ...     precast.mhc_post(x, streams, post, comb)[..., 0]
    tensor([[1., 2., 3., 4.]], dtype=torch.float16)
    """
