# SPDX-License-Identifier: Apache-2.0
"""RoPE by computed frequencies, with a position for each token.

Source: Su et al., RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import launches
from precast._ops.rope._angles import computed_angles, rotated_pair
from precast._ops.rope._frequencies import frequency_exports
from precast._ops.rope._trace import frequency_trace
from precast.api_logging import precast_api


def apply_rope_pos_ids_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_rope_pos_ids` in plain PyTorch, one cast at the end.

    Parameters
    ----------
    q, k : torch.Tensor
        ``[tokens, heads, head_dim]``, any device; each with its own number of heads.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64: the position of each token; exact below 2^24.
    rotary_dim : int, optional
        Even; columns behind it do not turn. A multiple of 16 is fastest. Default: ``head_dim``.
    interleave : bool
        True: pairs are neighbours (GPT-J). False: half of ``rotary_dim`` apart (NeoX).
    rope_scale, rope_theta : float
        As :func:`apply_rope` takes them.

    Returns
    -------
    tuple of torch.Tensor
        Queries and keys, turned; shapes and dtypes of the arguments.

    Examples
    --------
    >>> import torch
    >>> q = torch.tensor([[[1.0, 0.0]]])
    >>> apply_rope_pos_ids_reference(q, q, torch.tensor([5]))[0]
    tensor([[[ 0.2837, -0.9589]]])
    """
    size = q.shape[-1] if rotary_dim is None else rotary_dim
    angles = computed_angles(pos_ids, size, rope_scale, rope_theta)
    return rotated_pair(q, k, angles, interleave)


apply_rope_pos_ids_inplace_reference = apply_rope_pos_ids_reference


_APPLY_ROPE_POS_IDS, _APPLY_ROPE_POS_IDS_INPLACE = frequency_exports(
    "apply_rope_pos_ids", apply_rope_pos_ids_reference
)
_APPLY_ROPE_POS_IDS_TRACE = frequency_trace(
    "rope_pos_ids",
    "Queries and keys at given positions, turned by computed frequencies.",
    apply_rope_pos_ids_reference,
    in_place=False,
)
_APPLY_ROPE_POS_IDS_INPLACE_TRACE = frequency_trace(
    "rope_pos_ids_inplace",
    "Queries and keys at given positions, turned in place by computed frequencies.",
    apply_rope_pos_ids_reference,
    in_place=True,
)


@precast_api(trace=_APPLY_ROPE_POS_IDS_TRACE)
@launches(_APPLY_ROPE_POS_IDS)
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
    q, k : torch.Tensor
        ``[tokens, heads, head_dim]``, as :func:`apply_rope` takes them.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: the position of each token; exact below 2^24.
    rotary_dim : int, optional
        Even; columns behind it do not turn. A multiple of 16 is fastest. Default: ``head_dim``.
    interleave : bool
        True: pairs are neighbours (GPT-J). False: half of ``rotary_dim`` apart (NeoX).
    rope_scale, rope_theta : float
        As :func:`apply_rope` takes them.

    Returns
    -------
    tuple of torch.Tensor
        New queries and keys; shapes and dtypes of the arguments.

    Raises
    ------
    ValueError
        As :func:`apply_rope`.

    Notes
    -----
    As :func:`apply_rope`. Source: arXiv:2104.09864.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     precast.apply_rope_pos_ids(q, q.clone(), torch.tensor([5]), rotary_dim=2)[0]
    tensor([[[ 0.2837, -0.9589,  0.0000,  0.0000,  0.0000,  0.0000,  0.0000,
               0.0000]]])
    """


@precast_api(trace=_APPLY_ROPE_POS_IDS_INPLACE_TRACE)
@launches(_APPLY_ROPE_POS_IDS_INPLACE)
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

    Parameters
    ----------
    q, k : torch.Tensor
        As :func:`apply_rope` takes them; overwritten. They lie apart from each
        other in memory, such as slices of one packed projection. Columns behind ``rotary_dim`` are
        neither read nor written.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: the position of each token; exact below 2^24.
    rotary_dim : int, optional
        Even; columns behind it do not turn. A multiple of 16 is fastest. Default: ``head_dim``.
    interleave : bool
        True: pairs are neighbours (GPT-J). False: half of ``rotary_dim`` apart (NeoX).
    rope_scale, rope_theta : float
        As :func:`apply_rope` takes them.

    Raises
    ------
    ValueError
        As :func:`apply_rope`; also if ``q`` and ``k`` share memory.

    Notes
    -----
    As :func:`apply_rope_pos_ids`, without an allocation.
    Source: arXiv:2104.09864.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     precast.apply_rope_pos_ids_inplace(q, q.clone(), torch.tensor([5]), rotary_dim=2)
    >>> q
    tensor([[[ 0.2837, -0.9589,  0.0000,  0.0000,  0.0000,  0.0000,  0.0000,
               0.0000]]])
    """
