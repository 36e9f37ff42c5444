# SPDX-License-Identifier: Apache-2.0
"""Rotate by Llama 3.1's frequencies: requests, or tokens with a position each.

Source: Su et al., RoFormer, arXiv:2104.09864; Grattafiori et al., The Llama 3 Herd of Models,
arXiv:2407.21783.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.rope._angles import computed_angles, request_positions, rotated_pair
from precast._ops.rope._pair import IN_PLACE, rotates
from precast._ops.rope.apply_rope import apply_rope, apply_rope_pos_ids

_OF_REQUESTS = "Queries and keys of requests, {} by Llama 3.1's frequencies."
_AT_POSITIONS = "Queries and keys at given positions, {} by Llama 3.1's frequencies."


def apply_llama31_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_llama31_rope` in plain PyTorch on any device: one cast at the end."""
    pos_ids = request_positions(indptr, offsets, q.shape[0])
    llama31 = (low_freq_factor, high_freq_factor, old_context_len)
    return apply_llama31_rope_pos_ids_reference(
        q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, *llama31
    )


def apply_llama31_rope_pos_ids_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_llama31_rope_pos_ids` in plain PyTorch on any device: one cast at the end."""
    size = q.shape[-1] if rotary_dim is None else rotary_dim
    llama31 = (low_freq_factor, high_freq_factor, old_context_len)
    angles = computed_angles(pos_ids, size, rope_scale, rope_theta, llama31)
    return rotated_pair(q, k, angles, interleave)


apply_llama31_rope_inplace_reference = apply_llama31_rope_reference
apply_llama31_rope_pos_ids_inplace_reference = apply_llama31_rope_pos_ids_reference


@rotates(_OF_REQUESTS)
@documented(apply_rope)
def apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Rotate the queries and keys of requests by Llama 3.1's frequencies, into new tensors.

    :func:`apply_rope` with, for :math:`\theta_i = rope\_theta^{-2 i / r}`, the frequencies

    .. math::

        f_i = \theta_i \left(\frac{1 - s_i}{rope\_scale} + s_i\right), \quad
        s_i = \mathrm{clamp}\left(\frac{old\_context\_len \cdot \theta_i / 2 \pi - low}
        {high - low}, 0, 1\right)

    Parameters
    ----------
    rope_scale : float
        Divides the frequencies of long wavelengths; positive.
    low_freq_factor, high_freq_factor : float
        Wavelengths above ``old_context_len / low_freq_factor`` positions are stretched by
        ``rope_scale``, those below ``old_context_len / high_freq_factor`` are not, and those
        between by a blend. ``high_freq_factor`` must be the larger.
    old_context_len : int
        The context length that the model was first trained for.

    Notes
    -----
    As :func:`apply_rope`. Source: arXiv:2104.09864, arXiv:2407.21783.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     indptr, offsets = torch.tensor([0, 1]), torch.tensor([5])
    ...     rotated, _ = precast.apply_llama31_rope(q, q.clone(), indptr, offsets, 2)
    >>> rotated[0, 0, :2]
    tensor([ 0.2837, -0.9589])
    """


@rotates(_OF_REQUESTS)
@documented(IN_PLACE, apply_llama31_rope)
def apply_llama31_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """:func:`apply_llama31_rope` in place: ``q`` and ``k`` are overwritten.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     indptr, offsets = torch.tensor([0, 1]), torch.tensor([5])
    ...     precast.apply_llama31_rope_inplace(q, q.clone(), indptr, offsets, 2)
    >>> q[0, 0, :2]
    tensor([ 0.2837, -0.9589])
    """


@rotates(_AT_POSITIONS)
@documented(apply_llama31_rope, apply_rope_pos_ids)
def apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_llama31_rope` with a position for each token, into new tensors.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     rotated, _ = precast.apply_llama31_rope_pos_ids(q, q.clone(), torch.tensor([5]), 2)
    >>> rotated[0, 0, :2]
    tensor([ 0.2837, -0.9589])
    """


@rotates(_AT_POSITIONS)
@documented(IN_PLACE, apply_llama31_rope_pos_ids)
def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """:func:`apply_llama31_rope_pos_ids` in place: ``q`` and ``k`` are overwritten.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     precast.apply_llama31_rope_pos_ids_inplace(q, q.clone(), torch.tensor([5]), 2)
    >>> q[0, 0, :2]
    tensor([ 0.2837, -0.9589])
    """
