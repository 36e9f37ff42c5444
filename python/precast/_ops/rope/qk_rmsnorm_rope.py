# SPDX-License-Identifier: Apache-2.0
"""Normalise and rotate each query and key head of a packed projection, in place.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; Su et al.,
RoFormer, arXiv:2104.09864; in this order in Qwen3, arXiv:2505.09388, and Gemma 3, arXiv:2503.19786.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._ops.norm.rmsnorm import normalized
from precast._ops.rope._angles import cached_angles, rotated
from precast._ops.rope._checks import MAX_HEAD_DIM, VECTOR, check_cache, check_first
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var


def qk_rmsnorm_rope_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    is_neox: bool = True,
) -> torch.Tensor:
    """:func:`qk_rmsnorm_rope` in plain PyTorch on any device, out of place; one cast at the end.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``qkv``; what is neither query nor key is copied.
    """
    head_dim = q_weight.shape[0]
    heads = qkv.reshape(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    angles = cached_angles(positions, cos_sin_cache)
    parts, start = [], 0
    for count, weight in ((num_q_heads, q_weight), (num_k_heads, k_weight)):
        x = heads[:, start : start + count].float()
        normed = normalized(x, weight.float() + weight_bias, eps)
        parts.append(rotated(normed, angles, not is_neox).to(qkv.dtype))
        start += count
    return torch.cat((*parts, heads[:, start:]), dim=1).view(qkv.shape)


def _check(
    export: str,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
) -> None:
    check_first(export, "qkv", qkv)
    if q_weight.dim() != 1:
        raise ValueError(f"{export}: q_weight must have shape [head_dim], got {[*q_weight.shape]}")
    head_dim = q_weight.shape[0]
    if not 0 < head_dim <= MAX_HEAD_DIM or head_dim % VECTOR:
        raise ValueError(
            f"{export}: q_weight's size, the head size, must be a multiple of {VECTOR} up to "
            f"{MAX_HEAD_DIM}, got {head_dim}"
        )
    if k_weight.shape != (head_dim,):
        raise ValueError(
            f"{export}: k_weight must have shape [{head_dim}], got {[*k_weight.shape]}"
        )
    if num_q_heads < 0 or num_k_heads < 0:
        raise ValueError(
            f"{export}: num_q_heads and num_k_heads must not be negative, got {num_q_heads} and "
            f"{num_k_heads}"
        )
    heads = num_q_heads + num_k_heads
    if qkv.shape[1] % head_dim or qkv.shape[1] // head_dim < heads:
        raise ValueError(
            f"{export}: qkv's rows must hold whole heads of {head_dim} elements, at least {heads}, "
            f"got shape {[*qkv.shape]}"
        )
    check_cache(export, cos_sin_cache)
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"{export}: cos_sin_cache's last dimension, the rotary size, must be even, from 2 to "
            f"the head size {head_dim}, got {rotary_dim}"
        )
    if rotary_dim % 16 and head_dim > MAX_HEAD_DIM - 16:
        raise ValueError(
            f"{export}: cos_sin_cache's last dimension, the rotary size, must be a multiple of 16 "
            f"for heads of more than {MAX_HEAD_DIM - 16} elements, got {rotary_dim}"
        )


_QK_RMSNORM_ROPE = Export(
    "rope",
    "qk_rmsnorm_rope",
    "qkv!:T[tokens,columns] q_weight:T k_weight:T positions:i32|i64[tokens] cos_sin_cache:any "
    "num_q_heads:int num_k_heads:int eps:float(0-) weight_bias:float(-) is_neox:bool "
    "enable_pdl:pdl",
    reference=qk_rmsnorm_rope_reference,
    check=_check,
)
_TRACE = TraceTemplate(
    op_type="rope",
    name_prefix="qk_rmsnorm_rope",
    description="The norm of each query and key head of a packed projection, rotated in place.",
    axes={
        "num_tokens": Var("Tokens of all requests."),
        "qkv_size": Const("qkv", "All heads times head_dim.", sample=512),
        "head_dim": Const("d", sample=64),
        "num_q_heads": Const("qh", param="num_q_heads", sample=4),
        "num_k_heads": Const("kh", param="num_k_heads", sample=2),
        "max_position": Var("Rows of the cache."),
        "rotary_dim": Const("r", sample=48),
    },
    inputs={
        "qkv": Tensor(["num_tokens", "qkv_size"]),
        "q_weight": Tensor(["head_dim"]),
        "k_weight": Tensor(["head_dim"]),
        "positions": Tensor(["num_tokens"], dtype="int64"),
        "cos_sin_cache": Tensor(["max_position", "rotary_dim"], dtype="float32"),
        "num_q_heads": Scalar("int32"),
        "num_k_heads": Scalar("int32"),
        "eps": Scalar("float32"),
        "weight_bias": Scalar("float32"),
        "is_neox": Scalar("bool"),
    },
    outputs={
        "qkv_out": Tensor(["num_tokens", "qkv_size"], dtype_from="qkv", param="qkv"),
    },
    reference=qk_rmsnorm_rope_reference,
    constraints=["(num_q_heads + num_k_heads) * head_dim <= qkv_size"],
)


@precast_api(trace=_TRACE)
@launches(_QK_RMSNORM_ROPE)
def qk_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    is_neox: bool = True,
    enable_pdl: bool | None = None,
) -> None:
    r"""Normalise each query and key head of a packed projection and rotate it; one pass, in place.

    For the elements :math:`x` of a head, with the weights of the queries or of the keys,

    .. math::

        n_c &= \frac{x_c}{\sqrt{\frac{1}{d} \sum_k x_k^2 + eps}} \cdot (w_c + bias) \\
        x &= \mathrm{round}(\mathrm{rope}(n))

    Parameters
    ----------
    qkv : torch.Tensor
        ``[tokens, (num_q_heads + num_k_heads + more) * head_dim]``, float16 or bfloat16, on a CUDA
        device: queries, then keys, then heads that are left alone, such as values. Stride 1 in the
        last dimension, any between tokens. Queries and keys are overwritten.
    q_weight, k_weight : torch.Tensor
        ``[head_dim]``, contiguous, dtype and device of ``qkv``. ``head_dim`` is a multiple of 8 up
        to 512.
    positions : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: a row of the cache for each token. A token whose
        position the cache does not have, such as -1 for padding, is normalised and not rotated.
    cos_sin_cache : torch.Tensor
        ``[max_position, rotary_dim]``, float32, stride 1 in the last dimension: the cosines in the
        first half of a row, the sines in the second. ``rotary_dim`` is even and at most
        ``head_dim``, and a multiple of 16 is fastest (above 496 columns of a head the only choice);
        columns behind it are normalised and not rotated.
    num_q_heads, num_k_heads : int
        How many heads are queries, and after them keys.
    eps : float
        Added to the mean square.
    weight_bias : float
        Added to the weights, in float32: 1 for Gemma, whose weights are stored around zero.
    is_neox : bool
        True: pairs are half of ``rotary_dim`` apart. False: they are neighbours (GPT-J).

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device, or not on that of the others; a dtype, shape, stride
        or size other than above.

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even: the norm is not rounded before
    the rotation. No allocation; safe in CUDA graphs; not differentiable. Sources: arXiv:1910.07467,
    arXiv:2104.09864.

    Examples
    --------
    >>> import torch, precast
    >>> qkv = torch.ones(1, 48)
    >>> weight, cache = torch.ones(16), torch.tensor([[0.0] * 8 + [1.0] * 8])
    >>> with precast.reference_mode():
    ...     precast.qk_rmsnorm_rope(qkv, weight, weight, torch.tensor([0]), cache, 1, 1)
    >>> qkv[0, [0, 8, 16, 24, 32]].round()
    tensor([-1.,  1., -1.,  1.,  1.])
    """
