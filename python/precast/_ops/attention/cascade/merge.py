# SPDX-License-Identifier: Apache-2.0
"""Merge attention over parts of the keys to the results of one softmax over all of them.

Source: Ye et al., FlashInfer, arXiv:2501.01005; Milakov and Gimelshein, arXiv:1805.02867.
"""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.export import Export, op
from precast._op.validation import check_memory_apart, check_peer, check_rank
from precast._ops.attention.cascade.trace import in_place_trace, merge_trace
from precast.api_logging import precast_api


def merge_states_reference(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`merge_states` in plain PyTorch on any device: fp32 arithmetic, one cast at the end."""
    s = s.float()
    s_max = s.new_full((s.shape[0], 1, s.shape[2]), float("-inf"))
    if s.shape[1] > 0:
        s_max = s.amax(dim=1, keepdim=True)
    empty = s == float("-inf")
    weights = torch.where(empty, 0.0, torch.exp2(s - s_max))
    weight_sum = weights.sum(dim=1)
    # A state without keys may hold anything.
    parts = torch.where(empty[..., None], 0.0, v.float()) * weights[..., None]
    nothing = weight_sum == 0
    merged = parts.sum(dim=1) / torch.where(nothing, 1.0, weight_sum)[..., None]
    return merged.to(v.dtype), torch.where(nothing, float("-inf"), s_max[:, 0] + weight_sum.log2())


def merge_state_reference(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`merge_state` in plain PyTorch on any device: fp32 arithmetic, one cast at the end."""
    return merge_states_reference(torch.stack((v_a, v_b), dim=1), torch.stack((s_a, s_b), dim=1))


def merge_state_in_place_reference(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`merge_state_in_place` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    v, s : torch.Tensor
        A state as :func:`merge_state` takes them, which stays as it is.

    Returns
    -------
    tuple of torch.Tensor
        What ``v`` and ``s`` become.
    """
    merged, sums = merge_state_reference(v, s, v_other, s_other)
    if mask is None:
        return merged, sums
    kept = mask.bool()[:, None]
    return torch.where(kept[..., None], merged, v), torch.where(kept, sums, s)


def _check_sums(export: str, v_name: str, v: torch.Tensor, s_name: str, s: torch.Tensor) -> None:
    """Raise unless ``s`` has one number for each head of ``v``; a declaration has other words."""
    if s.shape != v.shape[:-1]:
        raise ValueError(
            f"{export}: {s_name} must have the shape of {v_name} less its last dimension, got "
            f"{[*s.shape]} for {[*v.shape]}"
        )


def _check_pair(
    export: str, v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> None:
    _check_sums(export, "v_a", v_a, "s_a", s_a)
    _check_sums(export, "v_b", v_b, "s_b", s_b)


def _check_in_place(
    export: str, v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor
) -> None:
    _check_sums(export, "v", v, "s", s)
    _check_sums(export, "v_other", v_other, "s_other", s_other)
    check_peer(export, "v", v, v_other, "v_other")
    check_peer(export, "s", s, s_other, "s_other")
    check_memory_apart(export, "v", v, s, "s")
    check_memory_apart(export, "v", v, s_other, "s_other")
    check_memory_apart(export, "s", s, v_other, "v_other")


def _check_states(export: str, v: torch.Tensor, s: torch.Tensor) -> None:
    if v.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"{export}: v must be float16, bfloat16 or float32, got {dtype_word(v.dtype)}"
        )
    _check_sums(export, "v", v, "s", s)


_V = "T=f16|bf16|f32[tokens,heads,head_dim]"
_MERGE_STATE = Export(
    "merge_state",
    "merge_state",
    f"v_a:{_V} s_a:f32 v_b:like(v_a) s_b:f32 v!:like(v_a) s!:like(s_a) enable_pdl:pdl",
    reference=merge_state_reference,
    check=_check_pair,
)
_MERGE_STATE_IN_PLACE = Export(
    "merge_state",
    "merge_state_in_place",
    f"v!:{_V} s!:f32 v_other:like(v) s_other:f32 mask?:bool|u8[tokens] enable_pdl:pdl",
    reference=merge_state_in_place_reference,
    check=_check_in_place,
)
_MERGE_STATES = Export(
    "merge_state",
    "merge_states",
    "v:T[tokens,states,heads,head_dim] s:f32 v_merged!:T[tokens,heads,head_dim] "
    "s_merged!:f32[tokens,heads] enable_pdl:pdl",
    reference=merge_states_reference,
    check=_check_states,
)


@precast_api(
    trace=merge_trace(
        "merge_state",
        "Attention over two parts of the keys, put together.",
        merge_state_reference,
        [("v_a", "s_a"), ("v_b", "s_b")],
    )
)
@op("merge_state")
def merge_state(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Merge attention over two parts of the keys.

    .. math::

        s = \log_2(2^{s_a} + 2^{s_b}), \quad v = 2^{s_a - s} v_a + 2^{s_b - s} v_b

    which is what one softmax over the keys of both would have given.

    Parameters
    ----------
    v_a : torch.Tensor
        ``[tokens, heads, head_dim]``: outputs of attention over the first part; float16, bfloat16
        or float32; on a CUDA device; stride 1 in the last dimension, any in the others.
    s_a : torch.Tensor
        ``[tokens, heads]``: the logarithms, base 2, of the sums that the softmax divided by, as
        ``return_lse`` gives them; float32 (any other dtype is converted first), any strides. -inf
        where a token saw no key.
    v_b, s_b : torch.Tensor
        The same of the second part; shape and dtype of the first, strides of their own.

    Returns
    -------
    v : torch.Tensor
        Shape and dtype of ``v_a``.
    s : torch.Tensor
        Shape of ``s_a``, float32, base 2.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above.

    Notes
    -----
    fp32 arithmetic relative to the larger of both logarithms, however large or small they are; one
    rounding. A state with -inf counts as nothing, whatever its ``v`` holds; of two such states v is
    0 and s is -inf. Any number of heads and any ``head_dim``; 16-byte aligned heads are fastest.
    Allocates both outputs alone; safe in CUDA graphs; not differentiable. Source: arXiv:2501.01005.

    Examples
    --------
    >>> import torch, precast
    >>> v, s = torch.ones(1, 1, 2), torch.zeros(1, 1)
    >>> with precast.reference_mode():
    ...     precast.merge_state(v, s, 2 * v, s)
    (tensor([[[1.5000, 1.5000]]]), tensor([[1.]]))
    """
    if s_a.dtype is not torch.float32 or s_b.dtype is not torch.float32:
        s_a, s_b = s_a.to(torch.float32), s_b.to(torch.float32)
    v, s = torch.empty_like(v_a), torch.empty_like(s_a)
    _MERGE_STATE.launch(v_a, s_a, v_b, s_b, v, s, enable_pdl)
    return v, s


@precast_api(
    trace=in_place_trace(
        "merge_state_in_place",
        "Attention over two parts of the keys, put together in place of the first",
        merge_state_in_place_reference,
        [("v", "s"), ("v_other", "s_other")],
    )
)
@op("merge_state")
def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> None:
    r"""Merge attention over more keys into a state, in place.

    .. math::

        s \leftarrow \log_2(2^{s} + 2^{s_{other}}), \quad
        v \leftarrow 2^{s_{old} - s} v + 2^{s_{other} - s} v_{other}

    Parameters
    ----------
    v, s : torch.Tensor
        A state as :func:`merge_state` takes them. Overwritten; a ``s`` that is not float32 is
        converted first, and then stays as it was.
    v_other, s_other : torch.Tensor
        The other one, which may not overlap the first.
    mask : torch.Tensor, optional
        ``[tokens]``, bool or uint8, contiguous: tokens with 0 stay as they are. Default: all are
        merged.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above; a
        ``v`` or ``s`` that overlaps itself or another argument.

    Notes
    -----
    As :func:`merge_state`. No allocation; safe in CUDA graphs, which the mask is for: it may change
    from replay to replay. Source: arXiv:2501.01005.

    Examples
    --------
    >>> import torch, precast
    >>> v, s = torch.ones(2, 1, 1), torch.zeros(2, 1)
    >>> with precast.reference_mode():
    ...     precast.merge_state_in_place(v, s, 2 * v, s.clone(), torch.tensor([True, False]))
    >>> v.flatten(), s.flatten()
    (tensor([1.5000, 1.0000]), tensor([1., 0.]))
    """
    if s.dtype is not torch.float32 or s_other.dtype is not torch.float32:
        s, s_other = s.to(torch.float32), s_other.to(torch.float32)
    _MERGE_STATE_IN_PLACE.launch(v, s, v_other, s_other, mask, enable_pdl)


@precast_api(
    trace=merge_trace(
        "merge_states",
        "Attention over parts of the keys, put together.",
        merge_states_reference,
        [("v", "s")],
        dims=["num_states"],
    )
)
@op("merge_state")
def merge_states(
    v: torch.Tensor, s: torch.Tensor, enable_pdl: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Merge attention over any number of parts of the keys.

    .. math::

        s = \log_2 \sum_i 2^{s_i}, \quad v = \sum_i 2^{s_i - s} v_i

    Parameters
    ----------
    v : torch.Tensor
        ``[tokens, states, heads, head_dim]``: outputs of attention over each part; float16,
        bfloat16 or float32; on a CUDA device; stride 1 in the last dimension, any in the others.
    s : torch.Tensor
        ``[tokens, states, heads]``: their logarithms as :func:`merge_state` takes them.

    Returns
    -------
    v : torch.Tensor
        ``[tokens, heads, head_dim]`` in the dtype of ``v``.
    s : torch.Tensor
        ``[tokens, heads]``, float32, base 2.

    Raises
    ------
    ValueError
        As :func:`merge_state`.

    Notes
    -----
    As :func:`merge_state`; of no states at all v is 0 and s is -inf. The order in which states are
    added depends on their number and ``head_dim`` alone: a token's result does not depend on the
    others. Source: arXiv:2501.01005.

    Examples
    --------
    >>> import torch, precast
    >>> v, s = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), torch.tensor([[[1.0], [2.0]]])
    >>> with precast.reference_mode():
    ...     precast.merge_states(v, s)
    (tensor([[[1.6667]]]), tensor([[2.5850]]))
    """
    if s.dtype is not torch.float32:
        s = s.to(torch.float32)
    if v.dim() != 4:
        check_rank("merge_states", "v", v, 4, 4)
    tokens, _, heads, head_dim = v.shape
    v_merged = v.new_empty((tokens, heads, head_dim))
    s_merged = v.new_empty((tokens, heads), dtype=torch.float32)
    _MERGE_STATES.launch(v, s, v_merged, s_merged, enable_pdl)
    return v_merged, s_merged
