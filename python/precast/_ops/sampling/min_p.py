# SPDX-License-Identifier: Apache-2.0
"""Draws among the tokens with a share of the largest probability."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import op
from precast._ops.sampling._arguments import Real, Whole, draw_outputs, explain_draw, refuse_nan
from precast._ops.sampling._filters import weights_of_probs
from precast._ops.sampling._formula import chosen
from precast._ops.sampling._kernels import draw_export
from precast._ops.sampling._trace import draw_trace
from precast.api_logging import precast_api


def min_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`min_p_sampling_from_probs` in plain PyTorch: the same tokens, bit for bit.

    Parameters
    ----------
    probs, min_p, indices : torch.Tensor or float
        Those of the function, on any device.
    seed, offset : int or torch.Tensor
        Those of the function. Default: 0.

    Returns
    -------
    torch.Tensor
        ``[outputs]``, int32 or the dtype of ``indices``.

    Examples
    --------
    >>> import torch
    >>> min_p_sampling_from_probs_reference(torch.tensor([[0.2, 0.7, 0.1]]), 0.5).tolist()
    [1]
    """
    tokens, _ = chosen(weights_of_probs(probs), indices, min_p=min_p, seed=seed, offset=offset)
    return tokens.to(torch.int32 if indices is None else indices.dtype)


_DRAW = draw_export("min_p_sampling_from_probs", ("min_p",))
_TRACE = draw_trace(
    "min_p_sampling_from_probs", "probs", ("min_p",), min_p_sampling_from_probs_reference
)


@precast_api(trace=_TRACE)
@op("sampling", explain=explain_draw)
def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: Real,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Draw a token among those that have ``min_p`` of the largest probability at least.

    .. math:: P(out_i = t) \propto p_{r_i, t} \, [p_{r_i, t} \ge min\_p \cdot \max_s p_{r_i, s}]

    Rows, filters and random numbers are as :mod:`precast.sampling` says.

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16.
    min_p : float or torch.Tensor
        The share of the largest, or float32 ``[rows]``. At 0 and below: all; from 1 on: the
        likeliest.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row of each output. Default: each row once.
    deterministic : bool
        Without effect: results never depend on timing.
    generator : torch.Generator, optional
        Where seed and offset come from. Default: the device's own.
    check_nan : bool
        Raise if there is a NaN, **for which the call waits for the GPU**.
    seed, offset : int or torch.Tensor, optional
        In place of a generator's: two integers, or int64 or uint64 tensors, ``[1]`` or
        ``[outputs]``; equal ones give equal tokens.
    return_valid : bool
        Return also whether each row was a distribution.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Tokens, ``[outputs]``, int32 or the dtype of ``indices``; with ``return_valid`` also bools
        ``[outputs]``.

    Raises
    ------
    ValueError
        Arguments that do not fit; a NaN that ``check_nan`` finds.

    Notes
    -----
    Source: Nguyen et al., "Turning up the heat: min-p sampling" (2024).

    Examples
    --------
    >>> import torch, precast
    >>> probs = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.min_p_sampling_from_probs(probs, 0.9, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """
    if check_nan:
        refuse_nan(probs, "probs")
    random = generator, seed, offset
    out, valid = draw_outputs(probs, indices, return_valid)
    _DRAW.launch(probs, indices, min_p, random, out, valid)
    return (out, valid) if return_valid else out
