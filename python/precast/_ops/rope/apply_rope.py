# SPDX-License-Identifier: Apache-2.0
"""Rotate by computed frequencies: requests, or tokens with a position each.

Source: Su et al., RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.rope._angles import computed_angles, request_positions, rotated_pair
from precast._ops.rope._pair import IN_PLACE, rotates

_OF_REQUESTS = "Queries and keys of requests, {} by computed frequencies."
_AT_POSITIONS = "Queries and keys at given positions, {} by computed frequencies."


def apply_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_rope` in plain PyTorch on any device: one cast at the end."""
    pos_ids = request_positions(indptr, offsets, q.shape[0])
    return apply_rope_pos_ids_reference(
        q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta
    )


def apply_rope_pos_ids_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_rope_pos_ids` in plain PyTorch on any device: one cast at the end."""
    size = q.shape[-1] if rotary_dim is None else rotary_dim
    angles = computed_angles(pos_ids, size, rope_scale, rope_theta)
    return rotated_pair(q, k, angles, interleave)


apply_rope_inplace_reference = apply_rope_reference
apply_rope_pos_ids_inplace_reference = apply_rope_pos_ids_reference


@rotates(_OF_REQUESTS)
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Rotate the queries and keys of requests by computed frequencies, into new tensors (RoPE).

    With :math:`r` = ``rotary_dim``, for pair :math:`i < r / 2` of every head,

    .. math::

        x' = \mathrm{round}(x \cos p f_i - y \sin p f_i), \quad
        y' = \mathrm{round}(y \cos p f_i + x \sin p f_i)

    where :math:`(x, y)` are columns :math:`(i, i + r/2)`, or :math:`(2 i, 2 i + 1)` interleaved,
    :math:`p` is the token's position and :math:`f_i = rope\_theta^{-2 i / r} / rope\_scale`.

    Parameters
    ----------
    q, k : torch.Tensor
        ``[tokens, heads, head_dim]``, float16 or bfloat16, on a CUDA device; stride 1 in the last
        dimension, any in the others. Each has its own number of heads; ``head_dim`` is a multiple
        of 8 up to 512. Addresses need no alignment; 16-byte aligned heads are fastest.
    indptr : torch.Tensor
        ``[requests + 1]``, int32 or int64, contiguous, not decreasing: tokens ``indptr[b]`` to
        ``indptr[b + 1] - 1`` are request ``b``. A token that no request holds comes out as it is.
    offsets : torch.Tensor
        ``[requests]``, int32 or int64: the position of the first token of each request.
    rotary_dim : int, optional
        How many columns are rotated, an even number; the others are not. A multiple of 16 is
        fastest. Default: ``head_dim``.
    interleave : bool
        True: pairs are neighbours (GPT-J). False: half of ``rotary_dim`` apart (NeoX).
    rope_scale : float
        Divides the frequencies; positive.
    rope_theta : float
        Their base; positive.

    Returns
    -------
    tuple of torch.Tensor
        New queries and keys; shapes and dtypes of the arguments.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device, or not on that of the others; a dtype, shape, stride,
        size or number other than above.

    Notes
    -----
    Angles are exact to 1e-6 radians at positions below 2^24, the rotation is float32, rounded once
    to nearest even. Allocates new results alone, in place nothing; safe in CUDA graphs; not
    differentiable. Source: arXiv:2104.09864.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     indptr, offsets = torch.tensor([0, 1]), torch.tensor([5])
    ...     precast.apply_rope(q, q.clone(), indptr, offsets, 2)[0]
    tensor([[[ 0.2837, -0.9589,  0.0000,  0.0000,  0.0000,  0.0000,  0.0000,
               0.0000]]])
    """


@rotates(_OF_REQUESTS)
@documented(IN_PLACE, apply_rope)
def apply_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """:func:`apply_rope` in place: ``q`` and ``k`` are overwritten.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     indptr, offsets = torch.tensor([0, 1]), torch.tensor([5])
    ...     precast.apply_rope_inplace(q, q.clone(), indptr, offsets, 2)
    >>> q[0, 0, :2]
    tensor([ 0.2837, -0.9589])
    """


@rotates(_AT_POSITIONS)
@documented(apply_rope)
def apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_rope` with a position for each token, into new tensors.

    Parameters
    ----------
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: the position of each token; exact below 2^24.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     rotated, _ = precast.apply_rope_pos_ids(q, q.clone(), torch.tensor([5]), rotary_dim=2)
    >>> rotated[0, 0, :2]
    tensor([ 0.2837, -0.9589])
    """


@rotates(_AT_POSITIONS)
@documented(IN_PLACE, apply_rope_pos_ids)
def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """:func:`apply_rope_pos_ids` in place: ``q`` and ``k`` are overwritten.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     precast.apply_rope_pos_ids_inplace(q, q.clone(), torch.tensor([5]), rotary_dim=2)
    >>> q[0, 0, :2]
    tensor([ 0.2837, -0.9589])
    """
