# SPDX-License-Identifier: Apache-2.0
"""RoPE with Llama 3.1's frequencies, with a position for each token.

Source: Su et al., RoFormer, arXiv:2104.09864; Grattafiori et al., The Llama 3 Herd of Models,
arXiv:2407.21783.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import launches
from precast._ops.rope._angles import llama31_angles, rotated_pair
from precast._ops.rope._frequencies import frequency_exports
from precast._ops.rope._trace import frequency_trace
from precast.api_logging import precast_api


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
    """:func:`apply_llama31_rope_pos_ids` in plain PyTorch, one cast at the end.

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
    rope_scale, rope_theta, low_freq_factor, high_freq_factor : float
        As :func:`apply_llama31_rope` takes them.
    old_context_len : int
        The context length that the model was first trained for.

    Returns
    -------
    tuple of torch.Tensor
        Queries and keys, turned; shapes and dtypes of the arguments.

    Examples
    --------
    >>> import torch
    >>> q = torch.tensor([[[1.0, 0.0]]])
    >>> apply_llama31_rope_pos_ids_reference(q, q, torch.tensor([5]))[0]
    tensor([[[ 0.2837, -0.9589]]])
    """
    size = q.shape[-1] if rotary_dim is None else rotary_dim
    angles = llama31_angles(
        pos_ids, size, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len
    )
    return rotated_pair(q, k, angles, interleave)


apply_llama31_rope_pos_ids_inplace_reference = apply_llama31_rope_pos_ids_reference


_APPLY_LLAMA31_ROPE_POS_IDS, _APPLY_LLAMA31_ROPE_POS_IDS_INPLACE = frequency_exports(
    "apply_llama31_rope_pos_ids", apply_llama31_rope_pos_ids_reference
)
_APPLY_LLAMA31_ROPE_POS_IDS_TRACE = frequency_trace(
    "llama31_rope_pos_ids",
    "Queries and keys at given positions, turned by Llama 3.1's frequencies.",
    apply_llama31_rope_pos_ids_reference,
    in_place=False,
)
_APPLY_LLAMA31_ROPE_POS_IDS_INPLACE_TRACE = frequency_trace(
    "llama31_rope_pos_ids_inplace",
    "Queries and keys at given positions, turned in place by Llama 3.1's frequencies.",
    apply_llama31_rope_pos_ids_reference,
    in_place=True,
)


@precast_api(trace=_APPLY_LLAMA31_ROPE_POS_IDS_TRACE)
@launches(_APPLY_LLAMA31_ROPE_POS_IDS)
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

    Parameters
    ----------
    q, k : torch.Tensor
        ``[tokens, heads, head_dim]``, as :func:`apply_llama31_rope` takes them.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: the position of each token; exact below 2^24.
    rotary_dim : int, optional
        Even; columns behind it do not turn. A multiple of 16 is fastest. Default: ``head_dim``.
    interleave : bool
        True: pairs are neighbours (GPT-J). False: half of ``rotary_dim`` apart (NeoX).
    rope_scale, rope_theta, low_freq_factor, high_freq_factor : float
        As :func:`apply_llama31_rope` takes them.
    old_context_len : int
        The context length that the model was first trained for.

    Returns
    -------
    tuple of torch.Tensor
        New queries and keys; shapes and dtypes of the arguments.

    Raises
    ------
    ValueError
        As :func:`apply_llama31_rope`.

    Notes
    -----
    As :func:`apply_llama31_rope`. Source: arXiv:2104.09864, arXiv:2407.21783.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     precast.apply_llama31_rope_pos_ids(q, q.clone(), torch.tensor([5]), rotary_dim=2)[0]
    tensor([[[ 0.2837, -0.9589,  0.0000,  0.0000,  0.0000,  0.0000,  0.0000,
               0.0000]]])
    """


@precast_api(trace=_APPLY_LLAMA31_ROPE_POS_IDS_INPLACE_TRACE)
@launches(_APPLY_LLAMA31_ROPE_POS_IDS_INPLACE)
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

    Parameters
    ----------
    q, k : torch.Tensor
        As :func:`apply_llama31_rope` takes them; overwritten. They lie apart from each
        other in memory, such as slices of one packed projection. Columns behind ``rotary_dim`` are
        neither read nor written.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: the position of each token; exact below 2^24.
    rotary_dim : int, optional
        Even; columns behind it do not turn. A multiple of 16 is fastest. Default: ``head_dim``.
    interleave : bool
        True: pairs are neighbours (GPT-J). False: half of ``rotary_dim`` apart (NeoX).
    rope_scale, rope_theta, low_freq_factor, high_freq_factor : float
        As :func:`apply_llama31_rope` takes them.
    old_context_len : int
        The context length that the model was first trained for.

    Raises
    ------
    ValueError
        As :func:`apply_llama31_rope`; also if ``q`` and ``k`` share memory.

    Notes
    -----
    As :func:`apply_llama31_rope_pos_ids`, without an allocation.
    Source: arXiv:2104.09864, arXiv:2407.21783.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     precast.apply_llama31_rope_pos_ids_inplace(q, q.clone(), torch.tensor([5]), 2)
    >>> q
    tensor([[[ 0.2837, -0.9589,  0.0000,  0.0000,  0.0000,  0.0000,  0.0000,
               0.0000]]])
    """
