# SPDX-License-Identifier: Apache-2.0
"""Draw tokens from the softmax of rows of logits, which is not written anywhere."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.sampling._arguments import Real, Whole
from precast._ops.sampling._draws import draws
from precast._ops.sampling._formula import draw_tokens, weights_of_logits


def sampling_from_logits_reference(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`sampling_from_logits` in plain PyTorch on any device; ``exp`` may round otherwise."""
    return draw_tokens(weights_of_logits(logits, 1.0), indices, seed=seed, offset=offset)


def top_k_top_p_sampling_from_logits_reference(
    logits: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`top_k_top_p_sampling_from_logits` in plain PyTorch; ``exp`` may round differently."""
    filters = {"top_k": top_k, "top_p": top_p, "filter_apply_order": filter_apply_order}
    return draw_tokens(weights_of_logits(logits, 1.0), indices, **filters, seed=seed, offset=offset)


@draws(sampling_from_logits_reference)
def sampling_from_logits(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
) -> torch.Tensor:
    r"""Draw a token from the softmax of each row of logits, which is not written anywhere.

    .. math:: P(out_i = t) \propto \exp(x_{r_i, t})

    Rows and random numbers are as :mod:`precast.sampling` says.

    Notes
    -----
    Tokens are those that :func:`sampling_from_probs` draws from the softmax with the same seed and
    offset, but for rounding.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.sampling_from_logits(torch.tensor([[0.0, 200.0, 0.0]]), seed=1, offset=0)
    tensor([1], dtype=torch.int32)
    """


@draws(top_k_top_p_sampling_from_logits_reference)
def top_k_top_p_sampling_from_logits(
    logits: torch.Tensor,
    top_k: Whole,
    top_p: Real,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
) -> torch.Tensor:
    """Draw a token from what top-k and top-p leave of the softmax of each row of logits.

    Rows, filters and random numbers are as :mod:`precast.sampling` says.

    Notes
    -----
    One launch does softmax, both filters and the draw; no distribution is written.

    Examples
    --------
    >>> import torch, precast
    >>> logits = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.top_k_top_p_sampling_from_logits(logits, 2, 0.3, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """
