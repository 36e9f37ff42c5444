# SPDX-License-Identifier: Apache-2.0
"""The end of a mixture of experts: the weighted sum of the rows of each token's experts.

Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538, equation 1.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.validation import check_contiguous, check_elements_apart, check_rank
from precast._ops.moe._backends import BACKEND, Both, backends
from precast._ops.moe.moe_activation import MAX_COLUMNS
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var

#: Columns of 16 bytes, and the most experts of a token.
VECTOR, MAX_TOPK = 8, 64


def moe_finalize_reference(
    input: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """:func:`moe_finalize` in plain PyTorch on any device: float32 sums, one cast at the end."""
    exists = (indices >= 0) & (indices < len(input))
    rows = torch.nn.functional.pad(input.float(), (0, 0, 0, 1))  # The last row is zeros.
    gathered = rows[torch.where(exists, indices, len(input)).long()]
    return (gathered * torch.where(exists, weights, 0.0)[..., None]).sum(dim=1).to(input.dtype)


def _check(
    export: str,
    input: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    check_rank(export, "indices", indices, 2, 2)
    if not 1 <= indices.shape[1] <= MAX_TOPK:
        raise ValueError(
            f"{export}: indices must have 1 to {MAX_TOPK} columns, got shape {[*indices.shape]}"
        )
    if input.shape[1] % VECTOR or input.shape[1] > MAX_COLUMNS:
        raise ValueError(
            f"{export}: input must have a multiple of {VECTOR} columns up to {MAX_COLUMNS}, got "
            f"shape {[*input.shape]}"
        )
    check_contiguous(export, indices=indices, weights=weights)
    check_elements_apart(export, "out", out)


_BOTH = Both.of(
    "moe_finalize",
    "input:T[rows,columns] indices:i32[tokens,topk] weights:f32[tokens,topk] "
    "out!:T[tokens,columns] enable_pdl:pdl",
    reference=moe_finalize_reference,
    check=_check,
)


def _fill(made: dict[str, Any]) -> None:
    """Rows in an odd order, with an expert left out here and there."""
    indices = made["indices"]
    numbers = indices.new_tensor(range(indices.numel()))
    places = (numbers * 7 % len(made["input"])).where(numbers % 5 != 4, -1)
    made["indices"] = places.view(indices.shape)


_TRACE = TraceTemplate(
    op_type="moe_finalize",
    name_prefix="moe_finalize",
    description="Adds up the rows of each token's experts, weighted.",
    axes={
        "num_rows": Var("Rows of all experts, padding included."),
        "num_tokens": Var(),
        "hidden_size": Const("h", multiple=VECTOR),
        "topk": Const("k", sample=6),
    },
    inputs={
        "input": Tensor(["num_rows", "hidden_size"]),
        "indices": Tensor(
            ["num_tokens", "topk"], dtype="int32", description="Rows of input; -1 for none."
        ),
        "weights": Tensor(["num_tokens", "topk"], dtype="float32"),
    },
    outputs={"output": Tensor(["num_tokens", "hidden_size"], param="out", dtype_from="input")},
    reference=moe_finalize_reference,
    tags=["moe"],
    fill=_fill,
)


@precast_api(trace=_TRACE)
@op("moe_finalize", backends=backends("moe_finalize"), chosen_by_body=True)
@documented(BACKEND)
def moe_finalize(
    input: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Add up the rows of each token's experts, weighted.

    It is the last step of a mixture of experts: ``input`` is what the second grouped product
    returns, whose rows are ordered by experts; the result has a row for each token.

    .. math::

        out_{t,c} = \mathrm{round}\left(\sum_k weights_{t,k} \cdot input_{indices_{t,k},\,c}\right)

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, columns]``, float16 or bfloat16, on a CUDA device. The last dimension has stride 1,
        rows start at multiples of 16 bytes; ``columns`` is a multiple of 8.
    indices : torch.Tensor
        ``[tokens, topk]``, int32, contiguous: the row of each of the token's experts; ``topk`` is
        from 1 to 64. A number that is no row, such as -1, adds nothing: an expert that is on
        another GPU, or whose capacity is used up.
    weights : torch.Tensor
        ``[tokens, topk]``, float32, contiguous.
    out : torch.Tensor, optional
        ``[tokens, columns]``, dtype of ``input``, strides as there. Default: a new tensor.

    Returns
    -------
    torch.Tensor
        ``[tokens, columns]``; ``out`` if it is given. Tokens without any row are zeros.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; an ``out`` that overlaps another argument.

    Notes
    -----
    Sums are float32 in the order of the experts, and are rounded once to nearest even, so the same
    call gives the same bits each time. Allocates only a missing ``out``; one launch; safe in CUDA
    graphs, whichever experts are chosen; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> rows = torch.arange(3.0).half()[:, None].expand(3, 8).contiguous()
    >>> indices = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.moe_finalize(rows, indices, torch.full((2, 2), 0.5))[:, 0]
    tensor([1.0000, 0.5000], dtype=torch.float16)
    """
    if out is None:
        out = input.new_empty(indices.shape[0], input.shape[1])
    export = _BOTH.cuda if backend == "auto" or backend == "cuda" else _BOTH.other(backend)
    export.launch(input, indices, weights, out, enable_pdl)
    return out
