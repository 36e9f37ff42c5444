# SPDX-License-Identifier: Apache-2.0
"""Draw tokens from rows of probabilities or logits, with filters or without.

What is drawn from logits is drawn from their softmax, which is not written anywhere.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.sampling._arguments import Real, Whole
from precast._ops.sampling._draws import draws
from precast._ops.sampling._formula import draw_tokens, weights_of_logits, weights_of_probs


def sampling_from_probs_reference(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`sampling_from_probs` in plain PyTorch on any device: the same tokens, bit for bit."""
    return draw_tokens(weights_of_probs(probs), indices, seed=seed, offset=offset)


def top_k_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`top_k_sampling_from_probs` in plain PyTorch on any device: the same tokens."""
    return draw_tokens(weights_of_probs(probs), indices, top_k=top_k, seed=seed, offset=offset)


def top_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`top_p_sampling_from_probs` in plain PyTorch on any device: the same tokens."""
    return draw_tokens(weights_of_probs(probs), indices, top_p=top_p, seed=seed, offset=offset)


def min_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`min_p_sampling_from_probs` in plain PyTorch on any device: the same tokens."""
    return draw_tokens(weights_of_probs(probs), indices, min_p=min_p, seed=seed, offset=offset)


def top_k_top_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`top_k_top_p_sampling_from_probs` in plain PyTorch on any device: the same tokens."""
    filters = {"top_k": top_k, "top_p": top_p, "filter_apply_order": filter_apply_order}
    return draw_tokens(weights_of_probs(probs), indices, **filters, seed=seed, offset=offset)


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


@draws(sampling_from_probs_reference)
def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Draw a token from each distribution.

    .. math:: P(out_i = t) = p_{r_i, t} / \sum_s p_{r_i, s}

    Rows and random numbers are as :mod:`precast.sampling` says.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.sampling_from_probs(torch.tensor([[0.0, 1.0, 0.0]]), seed=1, offset=0)
    tensor([1], dtype=torch.int32)
    """


@draws(top_k_sampling_from_probs_reference)
def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: Whole,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Draw a token among the ``top_k`` likeliest of each distribution.

    .. math:: P(out_i = t) \propto p_{r_i, t} \, [p_{r_i, t} \ge \tau_{r_i}]

    :math:`\tau` is the k-th largest of the row.

    Rows, filters and random numbers are as :mod:`precast.sampling` says.

    Notes
    -----
    The threshold is found first: no round of rejection is needed.

    Source: Fan, Lewis, Dauphin, "Hierarchical neural story generation" (2018).

    Examples
    --------
    >>> import torch, precast
    >>> probs = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.top_k_sampling_from_probs(probs, 1, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """


@draws(top_p_sampling_from_probs_reference)
def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: Real,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Draw a token from the nucleus of each distribution: the likeliest with a share ``top_p``.

    .. math:: P(out_i = t) \propto p_{r_i, t} \, [p_{r_i, t} \ge \tau_{r_i}], \quad
        \tau = \max \{x : \textstyle\sum_s p_s [p_s \ge x] \ge top\_p \cdot \sum_s p_s\}

    Rows, filters and random numbers are as :mod:`precast.sampling` says.

    Notes
    -----
    A token is drawn from the whole distribution first and stands if it is in the set; otherwise one
    is drawn from the set.

    Source: Holtzman et al., "The curious case of neural text degeneration" (2020).

    Examples
    --------
    >>> import torch, precast
    >>> probs = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.top_p_sampling_from_probs(probs, 0.5, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """


@draws(min_p_sampling_from_probs_reference)
def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: Real,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Draw a token among those that have ``min_p`` of the largest probability at least.

    .. math:: P(out_i = t) \propto p_{r_i, t} \, [p_{r_i, t} \ge min\_p \cdot \max_s p_{r_i, s}]

    Rows, filters and random numbers are as :mod:`precast.sampling` says.

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


@draws(top_k_top_p_sampling_from_probs_reference)
def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: Whole,
    top_p: Real,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from what top-k and top-p leave of each distribution.

    Rows, filters and random numbers are as :mod:`precast.sampling` says.

    Notes
    -----
    One launch does both filters and the draw.

    Examples
    --------
    >>> import torch, precast
    >>> probs = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.top_k_top_p_sampling_from_probs(probs, 2, 0.3, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """


@draws(sampling_from_logits_reference)
def sampling_from_logits(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
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
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
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
