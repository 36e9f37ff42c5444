# SPDX-License-Identifier: Apache-2.0
"""RoPE with Llama 3.1's frequencies of requests.

Source: Su et al., RoFormer, arXiv:2104.09864; Grattafiori et al., The Llama 3 Herd of Models,
arXiv:2407.21783.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import launches
from precast._ops.rope._angles import llama31_angles, request_positions, rotated_pair
from precast._ops.rope._frequencies import frequency_exports
from precast._ops.rope._trace import frequency_trace
from precast.api_logging import precast_api


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
    """:func:`apply_llama31_rope` in plain PyTorch, one cast at the end.

    Parameters
    ----------
    q, k : torch.Tensor
        ``[tokens, heads, head_dim]``, any device; each with its own number of heads.
    indptr, offsets : torch.Tensor
        Requests, as :func:`apply_llama31_rope` takes them.
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
    >>> q = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    >>> apply_llama31_rope_reference(q, q, torch.tensor([0, 2]), torch.tensor([5]))[0]
    tensor([[[ 0.2837, -0.9589]],
    <BLANKLINE>
            [[ 0.9602, -0.2794]]])
    """
    size = q.shape[-1] if rotary_dim is None else rotary_dim
    positions = request_positions(indptr, offsets, q.shape[0])
    angles = llama31_angles(
        positions, size, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len
    )
    return rotated_pair(q, k, angles, interleave)


apply_llama31_rope_inplace_reference = apply_llama31_rope_reference


_APPLY_LLAMA31_ROPE, _APPLY_LLAMA31_ROPE_INPLACE = frequency_exports(
    "apply_llama31_rope", apply_llama31_rope_reference
)
_APPLY_LLAMA31_ROPE_TRACE = frequency_trace(
    "llama31_rope",
    "Queries and keys of requests, turned by Llama 3.1's frequencies.",
    apply_llama31_rope_reference,
    in_place=False,
)
_APPLY_LLAMA31_ROPE_INPLACE_TRACE = frequency_trace(
    "llama31_rope_inplace",
    "Queries and keys of requests, turned in place by Llama 3.1's frequencies.",
    apply_llama31_rope_reference,
    in_place=True,
)


@precast_api(trace=_APPLY_LLAMA31_ROPE_TRACE)
@launches(_APPLY_LLAMA31_ROPE)
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
    r"""RoPE with Llama 3.1's frequencies of requests' queries and keys, into new tensors.

    With :math:`r` = ``rotary_dim``, for pair :math:`i < r / 2` of every head,

    .. math::

        x' = \mathrm{round}(x \cos p f_i - y \sin p f_i), \quad
        y' = \mathrm{round}(y \cos p f_i + x \sin p f_i)

    where :math:`(x, y)` are columns :math:`(i, i + r/2)`, or :math:`(2 i, 2 i + 1)` interleaved,
    and :math:`p` is the token's position; :math:`\theta_i = rope\_theta^{-2 i / r}`,

    .. math::

        f_i = \theta_i \left(\frac{1 - s_i}{rope\_scale} + s_i\right), \quad
        s_i = \mathrm{clamp}\left(\frac{old\_context\_len \cdot \theta_i / 2 \pi - low}
        {high - low}, 0, 1\right)

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
        Even; columns behind it do not turn. A multiple of 16 is fastest. Default: ``head_dim``.
    interleave : bool
        True: pairs are neighbours (GPT-J). False: half of ``rotary_dim`` apart (NeoX).
    rope_scale : float
        Divides the frequencies that are long; positive.
    rope_theta : float
        Their base; positive.
    low_freq_factor, high_freq_factor : float
        Wavelengths above ``old_context_len / low_freq_factor`` positions are stretched by
        ``rope_scale``, those below ``old_context_len / high_freq_factor`` are not, and those
        between by a blend. ``high_freq_factor`` must be the larger.
    old_context_len : int
        The context length that the model was first trained for.

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
    to nearest even. Allocates the results alone; safe in CUDA graphs; not differentiable. Source:
    arXiv:2104.09864, arXiv:2407.21783.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     indptr, offsets = torch.tensor([0, 1]), torch.tensor([5])
    ...     precast.apply_llama31_rope(q, q.clone(), indptr, offsets, 2)[0]
    tensor([[[ 0.2837, -0.9589,  0.0000,  0.0000,  0.0000,  0.0000,  0.0000,
               0.0000]]])
    """


@precast_api(trace=_APPLY_LLAMA31_ROPE_INPLACE_TRACE)
@launches(_APPLY_LLAMA31_ROPE_INPLACE)
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

    Parameters
    ----------
    q, k : torch.Tensor
        As :func:`apply_llama31_rope` takes them; overwritten. They lie apart from each
        other in memory, such as slices of one packed projection. Columns behind ``rotary_dim`` are
        neither read nor written.
    indptr, offsets : torch.Tensor
        Requests, as :func:`apply_llama31_rope` takes them.
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
    As :func:`apply_llama31_rope`, without an allocation.
    Source: arXiv:2104.09864, arXiv:2407.21783.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> with precast.reference_mode():
    ...     indptr, offsets = torch.tensor([0, 1]), torch.tensor([5])
    ...     precast.apply_llama31_rope_inplace(q, q.clone(), indptr, offsets, 2)
    >>> q
    tensor([[[ 0.2837, -0.9589,  0.0000,  0.0000,  0.0000,  0.0000,  0.0000,
               0.0000]]])
    """
