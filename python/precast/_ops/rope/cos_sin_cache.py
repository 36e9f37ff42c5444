# SPDX-License-Identifier: Apache-2.0
"""Rotate by a cache of cosines and sines, as engines keep one.

Source: Su et al., RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.validation import check_indices
from precast._ops.rope._angles import cached_angles, rotated_pair
from precast._ops.rope._checks import check_cache, check_first, check_pair
from precast._ops.rope._pair import IN_PLACE, rotates


def apply_rope_with_cos_sin_cache_reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_rope_with_cos_sin_cache` in PyTorch on any device: fp32, one cast at the end."""
    tokens = positions.shape[0]
    q = query.reshape(tokens, query.shape[1:].numel() // head_size, head_size)
    k = key.reshape(tokens, key.shape[1:].numel() // head_size, head_size)
    q, k = rotated_pair(q, k, cached_angles(positions, cos_sin_cache), not is_neox)
    return q.view(query.shape), k.view(key.shape)


apply_rope_with_cos_sin_cache_inplace_reference = apply_rope_with_cos_sin_cache_reference


def _check(
    export: str,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> None:
    check_first(export, "query", query)
    if head_size <= 0:
        raise ValueError(f"{export}: head_size must be positive, got {head_size}")
    q = _as_heads(export, "query", query, head_size)
    k = _as_heads(export, "key", key, head_size)
    if q.shape[-1] != head_size:
        raise ValueError(
            f"{export}: query must have heads of head_size {head_size}, got shape {[*query.shape]}"
        )
    check_cache(export, cos_sin_cache)
    check_indices(export, "positions", positions, query.shape[0], query, "query")
    check_pair(export, ("query", "key"), q, k, cos_sin_cache.shape[1])


def _as_heads(export: str, name: str, x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """View ``[tokens, heads * dim]`` as ``[tokens, heads, dim]``."""
    if x.dim() == 3:
        return x
    if x.shape[-1] % head_dim:
        raise ValueError(
            f"{export}: {name}'s last dimension must be a multiple of the head size {head_dim}, "
            f"got shape {[*x.shape]}"
        )
    return x.unflatten(-1, (x.shape[-1] // head_dim, head_dim))


_DESCRIPTION = "Queries and keys, {} by the cosines and sines of their positions."


@rotates(_DESCRIPTION, _check)
def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Rotate queries and keys by a cache of cosines and sines, into new tensors (RoPE).

    With :math:`r` = ``rotary_dim``, for pair :math:`i < r / 2` of every head of token :math:`t`,

    .. math::

        x' = \mathrm{round}(x \cos_{p_t,i} - y \sin_{p_t,i}), \quad
        y' = \mathrm{round}(y \cos_{p_t,i} + x \sin_{p_t,i})

    where :math:`(x, y)` are columns :math:`(i, i + r/2)` (NeoX) or :math:`(2 i, 2 i + 1)`.

    Parameters
    ----------
    positions : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: a row of the cache for each token. A token whose
        position the cache does not have, such as -1 for padding, comes out as it is.
    query, key : torch.Tensor
        ``[tokens, heads * head_size]`` or ``[tokens, heads, head_size]``, float16 or bfloat16, on a
        CUDA device; stride 1 in the last dimension, any in the others, such as slices of a packed
        projection. Each has its own number of heads. Addresses need no alignment; 16-byte aligned
        heads are fastest.
    head_size : int
        Elements of a head, a multiple of 8 up to 512.
    cos_sin_cache : torch.Tensor
        ``[max_position, rotary_dim]``, float32, stride 1 in the last dimension: the cosines in the
        first half of a row, the sines in the second. ``rotary_dim`` is even and at most
        ``head_size``, and a multiple of 16 is fastest; columns behind it are copied.
    is_neox : bool
        True: pairs are half of ``rotary_dim`` apart. False: they are neighbours (GPT-J).

    Returns
    -------
    tuple of torch.Tensor
        New queries and keys; shapes and dtypes of the arguments.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device, or not on that of the others; a dtype ("cos_sin_cache
        should be float32"), shape, stride or size other than above.

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even. Allocates new results alone, in place
    nothing; safe in CUDA graphs; not differentiable. Source: arXiv:2104.09864.

    Examples
    --------
    >>> import torch, precast
    >>> cache = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    >>> q, position = torch.arange(8.0).view(1, 8), torch.tensor([1])
    >>> with precast.reference_mode():
    ...     precast.apply_rope_with_cos_sin_cache(position, q, q.clone(), 8, cache)[0]
    tensor([[-2.,  1.,  0.,  3.,  4.,  5.,  6.,  7.]])
    """


@rotates(_DESCRIPTION, _check)
@documented(IN_PLACE, apply_rope_with_cos_sin_cache)
def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """:func:`apply_rope_with_cos_sin_cache` in place: ``query`` and ``key`` are overwritten.

    Parameters
    ----------
    query, key : torch.Tensor
        As :func:`apply_rope_with_cos_sin_cache` takes them, apart from each other in memory, such
        as slices of one packed projection; overwritten. Columns behind ``rotary_dim`` are neither
        read nor written.

    Examples
    --------
    >>> import torch, precast
    >>> cache = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    >>> qkv, position = torch.arange(24.0).view(1, 24), torch.tensor([1])
    >>> with precast.reference_mode():
    ...     precast.apply_rope_with_cos_sin_cache_inplace(
    ...         position, qkv[:, :8], qkv[:, 8:16], 8, cache
    ...     )
    >>> qkv[:, 8:16]
    tensor([[-10.,   9.,   8.,  11.,  12.,  13.,  14.,  15.]])
    """
