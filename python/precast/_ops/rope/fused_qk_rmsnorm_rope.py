# SPDX-License-Identifier: Apache-2.0
"""Norm of queries and keys over all heads, rotation by frame, height and width, copy of values.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; Su et al.,
RoFormer, arXiv:2104.09864; Peng et al., YaRN, arXiv:2309.00071.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._op.validation import check_dtype, check_rank
from precast._ops.norm.rmsnorm import normalized
from precast._ops.rope._angles import rotated
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

HEAD_DIMS, MAX_HEADS = (64, 128, 256), 32
_MOST = 2**31 - 1
_FP8_MAX = 448.0


def _frequencies(
    channels: int, base: float, factor: float, low: float, high: float
) -> torch.Tensor:
    """The frequencies of the pairs of one axis, which YaRN blends with a part of them."""
    pair = torch.arange(channels // 2, dtype=torch.float64)
    plain = torch.pow(base, -2.0 * pair / max(channels, 1))
    if factor != 1.0:
        last = high + 1e-3 if abs(low - high) <= 1e-6 else high
        ramp = ((pair - low) / (last - low)).clamp(0.0, 1.0)
        plain = plain / factor * ramp + plain * (1.0 - ramp)
    return plain.float()


def fused_qk_rmsnorm_rope_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float = 1e-6,
    base: float = 10000.0,
    interleave: bool = True,
    factor: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
    attention_factor: float = 1.0,
    is_qk_norm: bool = True,
    output_fp8: bool = False,
    output_quant_scale: float = 1.0,
    v_quant_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`fused_qk_rmsnorm_rope` in plain PyTorch on any device, out of place."""
    tokens, device = qkv.shape[:-1], qkv.device
    heads = num_heads_q, num_heads_k, num_heads_v
    rows = qkv.reshape(tokens.numel(), qkv.shape[-1])
    q, k, v = rows.split([count * head_dim for count in heads], dim=1)
    number = torch.arange(len(rows), device=device) % (ppf * pph * ppw)
    axes = (
        (number // (pph * ppw), num_frame_channels),
        (number % (pph * ppw) // ppw, num_height_channels),
        (number % ppw, num_width_channels),
    )
    angles = torch.cat(
        [
            position.float().unsqueeze(1)
            * _frequencies(channels, base, factor, low, high).to(device)
            for position, channels in axes
        ],
        dim=1,
    )
    cos_sin = angles.cos() * attention_factor, angles.sin() * attention_factor

    def stored(x: torch.Tensor, count: int, scale: float) -> torch.Tensor:
        x = x.reshape(*tokens, count, head_dim)
        if not output_fp8:
            return x.to(qkv.dtype)
        return (x * scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)

    def rotary(x: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
        x = x.float()
        if is_qk_norm and count:
            x = normalized(x, weight.float().reshape(-1), eps)
            # Operators that are not fused store the norm in 16 bits; fp8 is coarser than that.
            x = x if output_fp8 else x.to(qkv.dtype).float()
        x = rotated(x.view(len(rows), count, head_dim), cos_sin, interleave)
        return stored(x, count, output_quant_scale)

    return (
        rotary(q, q_weight, num_heads_q),
        rotary(k, k_weight, num_heads_k),
        stored(v.float(), num_heads_v, v_quant_scale),
    )


def _check(
    export: str,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    factor: float,
    attention_factor: float,
) -> None:
    """What the declaration does not say of the arguments besides the outputs."""
    if factor == 1.0 and attention_factor != 1.0:
        raise ValueError(
            f"{export}: attention_factor must be 1 where factor is 1, got {attention_factor}"
        )
    check_rank(export, "qkv", qkv, 2, 3)
    if not qkv.is_contiguous():
        raise ValueError(
            f"{export}: qkv must be contiguous, got strides {[*qkv.stride()]} for shape "
            f"{[*qkv.shape]}; call .contiguous()"
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{export}: head_dim must be 64, 128 or 256, got {head_dim}")
    counts = {"q": num_heads_q, "k": num_heads_k, "v": num_heads_v}
    for letter, count in counts.items():
        if not 0 <= count <= MAX_HEADS:
            raise ValueError(
                f"{export}: num_heads_{letter} must be from 0 to {MAX_HEADS}, got {count}"
            )
    channels = num_frame_channels, num_height_channels, num_width_channels
    if any(each < 0 or each % 2 for each in channels) or sum(channels) != head_dim:
        raise ValueError(
            f"{export}: num_frame_channels, num_height_channels and num_width_channels must be "
            f"even and add up to head_dim, {head_dim}, got {channels[0]}, {channels[1]} and "
            f"{channels[2]}"
        )
    sequence = ppf * pph * ppw
    if min(ppf, pph, ppw) <= 0 or sequence > _MOST:
        raise ValueError(
            f"{export}: ppf, pph and ppw must be positive with a product of at most 2^31 - 1, got "
            f"{ppf}, {pph} and {ppw}"
        )
    heads = sum(counts.values())
    if qkv.shape[-1] != heads * head_dim:
        raise ValueError(
            f"{export}: qkv must have {heads} heads of {head_dim} in a row, got shape "
            f"{[*qkv.shape]}"
        )
    is_batch = qkv.dim() == 3
    if qkv.shape[1] != sequence if is_batch else qkv.shape[0] % sequence:
        multiple = "" if is_batch else "a multiple of "
        raise ValueError(
            f"{export}: qkv must have {multiple}{sequence} tokens, ppf * pph * ppw, got shape "
            f"{[*qkv.shape]}"
        )
    for name, weight, count in (
        ("q_weight", q_weight, num_heads_q),
        ("k_weight", k_weight, num_heads_k),
    ):
        if weight.numel() != count * head_dim:
            raise ValueError(
                f"{export}: {name} must have {count * head_dim} elements, got shape "
                f"{[*weight.shape]}"
            )
        if not weight.is_contiguous():
            raise ValueError(f"{export}: {name} must be contiguous, got shape {[*weight.shape]}")


def _check_outputs(
    export: str,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    output_fp8: bool,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    **given: Any,
) -> None:
    _check(export, qkv, q_weight, k_weight, **{key: given[key] for key in _CHECKED})
    dtype = torch.float8_e4m3fn if output_fp8 else torch.bfloat16
    for letter, out in (("q", q_out), ("k", k_out), ("v", v_out)):
        check_dtype(export, f"{letter}_out", out, dtype)
        shape = [*qkv.shape[:-1], given[f"num_heads_{letter}"], given["head_dim"]]
        if [*out.shape] != shape:
            raise ValueError(f"{export}: {letter}_out must have shape {shape}, got {[*out.shape]}")
        if not out.is_contiguous():
            raise ValueError(
                f"{export}: {letter}_out must be contiguous, got strides {[*out.stride()]} for "
                f"shape {[*out.shape]}; call .contiguous()"
            )


_SIZES = (
    *("ppf", "pph", "ppw", "num_frame_channels", "num_height_channels", "num_width_channels"),
    *("num_heads_q", "num_heads_k", "num_heads_v", "head_dim"),
)
_CHECKED = (*_SIZES, "factor", "attention_factor")

_FUSED = Export(
    "fused_qk_rmsnorm_rope",
    "fused_qk_rmsnorm_rope",
    f"qkv:bf16 q_weight:bf16 k_weight:bf16 {' '.join(f'{name}:int' for name in _SIZES)} "
    "eps:float(0-) base:float(positive) interleave:bool factor:float(positive) low:float(finite) "
    "high:float(finite) attention_factor:float(finite) is_qk_norm:bool output_fp8:bool "
    "output_quant_scale:float(finite) v_quant_scale:float(finite) q_out!:bf16|e4m3 "
    "k_out!:bf16|e4m3 v_out!:bf16|e4m3 enable_pdl:pdl_on",
    reference=fused_qk_rmsnorm_rope_reference,
    check=_check_outputs,
)


def _explain(export: str, **given: Any) -> None:
    """Why the shapes of the outputs could not be made."""
    tensors = {name: given[name] for name in ("qkv", "q_weight", "k_weight")}
    check_dtype(export, "qkv", tensors["qkv"], torch.bfloat16)
    _check(export, **tensors, **{key: given[key] for key in _CHECKED})


def _fill(made: dict[str, Any]) -> None:
    """The tokens are one video of frames of one token, or each of them is one."""
    made["ppf"] = made["qkv"].shape[-2]


def _template(output_fp8: bool) -> TraceTemplate:
    dtype = "float8_e4m3fn" if output_fp8 else "bfloat16"
    sizes = {"num_frame_channels": 16, "num_height_channels": 24, "num_width_channels": 24}
    inputs: dict[str, Tensor | Scalar] = {
        "qkv": Tensor(["*tokens", "qkv_size"], dtype="bfloat16"),
        "q_weight": Tensor(["q_size"], dtype="bfloat16"),
        "k_weight": Tensor(["k_size"], dtype="bfloat16"),
        **{name: Scalar("int32", sample=1) for name in ("ppf", "pph", "ppw")},
        **{name: Scalar("int32", sample=size) for name, size in sizes.items()},
        **{name: Scalar("int32") for name in _SIZES[6:]},
    }
    for name in ("eps", "base"):
        inputs[name] = Scalar("float32")
    inputs["interleave"] = Scalar("bool")
    for name in ("factor", "low", "high", "attention_factor"):
        inputs[name] = Scalar("float32")
    inputs["is_qk_norm"] = Scalar("bool")
    if output_fp8:
        inputs["output_quant_scale"] = Scalar("float32")
        inputs["v_quant_scale"] = Scalar("float32")
    return TraceTemplate(
        op_type="rope",
        name_prefix="fused_qk_rmsnorm_rope" + "_fp8" * output_fp8,
        description="Normalises and rotates queries and keys of a video, and copies its values.",
        axes={
            "*tokens": Var("Videos and tokens of each, or tokens of all."),
            "num_heads_q": Const("qh", param="num_heads_q", sample=4),
            "num_heads_k": Const("kh", param="num_heads_k", sample=2),
            "num_heads_v": Const("vh", param="num_heads_v", sample=3),
            "head_dim": Const("d", param="head_dim", sample=64),
            "q_size": Const("", value="num_heads_q * head_dim"),
            "k_size": Const("", value="num_heads_k * head_dim"),
            "qkv_size": Const("", value="(num_heads_q + num_heads_k + num_heads_v) * head_dim"),
        },
        inputs=inputs,
        outputs={
            letter: Tensor(
                ["*tokens", f"num_heads_{letter}", "head_dim"], param=f"{letter}_out", dtype=dtype
            )
            for letter in "qkv"
        },
        reference=fused_qk_rmsnorm_rope_reference,
        fixed={"output_fp8": output_fp8},
        fill=_fill,
        tags=["diffusion"],
    )


_TRACE = by_form(lambda output_fp8=False, **call: bool(output_fp8), _template, [False, True])


@precast_api(trace=_TRACE)
@op("fused_qk_rmsnorm_rope", explain=_explain)
def fused_qk_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float = 1e-6,
    base: float = 10000.0,
    interleave: bool = True,
    factor: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
    attention_factor: float = 1.0,
    is_qk_norm: bool = True,
    output_fp8: bool = False,
    output_quant_scale: float = 1.0,
    v_quant_scale: float = 1.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Normalise queries and keys of a video over all heads, rotate them in 3-D, and copy values.

    For the elements :math:`x` of the queries of a token, all heads together, or of its keys,

    .. math::

        n_c &= \mathrm{round}\left(\frac{x_c}{\sqrt{\frac{1}{C} \sum_k x_k^2 + eps}}
            \cdot weight_c\right) \\
        out_h &= \mathrm{round}(attention\_factor \cdot \mathrm{rope}(n_h))

    Token ``t`` of a video has the position ``t // (pph * ppw)`` in frames,
    ``t % (pph * ppw) // ppw`` in height and ``t % ppw`` in width. The pairs of a head belong to
    frames, then to height, then to width; pair ``i`` of an axis with ``c`` channels is rotated by
    ``position * f(i)`` radians with

    .. math::

        g_i &= base^{-2 i / c} \\
        r_i &= \mathrm{clamp}\left(\frac{i - low}{high - low}, 0, 1\right) \\
        f(i) &= g_i \cdot (1 - r_i) + \frac{g_i}{factor} \cdot r_i

    Parameters
    ----------
    qkv : torch.Tensor
        ``[batch, ppf * pph * ppw, (num_heads_q + num_heads_k + num_heads_v) * head_dim]`` or
        ``[tokens, ...]`` with a multiple of ``ppf * pph * ppw`` tokens; bfloat16, contiguous,
        16-byte aligned, on a CUDA device: queries, then keys, then values.
    q_weight, k_weight : torch.Tensor
        ``num_heads_q * head_dim`` and ``num_heads_k * head_dim`` elements, bfloat16, contiguous,
        16-byte aligned.
    ppf, pph, ppw : int
        Patches of a video in frames, height and width; positive.
    num_frame_channels, num_height_channels, num_width_channels : int
        Elements of a head that belong to each axis: even, and together ``head_dim``.
    num_heads_q, num_heads_k, num_heads_v : int
        Heads of queries, keys and values, up to 32 of each.
    head_dim : int
        64, 128 or 256.
    eps : float
        Added to the mean square; at least 0. Default: 1e-6.
    base : float
        As above; positive. Default: 10000.
    interleave : bool
        True: pairs are neighbours (GPT-J). False: they are half a head apart (NeoX). Default: True.
    factor : float
        By what YaRN divides low frequencies; positive. Default: 1, which is no YaRN.
    low, high : float
        Between which pairs of an axis YaRN blends; where they are equal, 0.001 apart. Default: 0.
    attention_factor : float
        As above; 1 where ``factor`` is 1. Default: 1.
    is_qk_norm : bool
        False: no norm, and the weights have no meaning. Default: True.
    output_fp8 : bool
        Whether outputs are e4m3, rounded from the product with their scale. Then the norm is not
        rounded before the rotation. Default: False.
    output_quant_scale, v_quant_scale : float
        What outputs in e4m3 are multiplied by: queries and keys, and values. Default: 1.
    q_out, k_out, v_out : torch.Tensor, optional
        Where to write: the shape below, bfloat16 or e4m3, contiguous, 16-byte aligned, memory of
        their own. Default: new tensors.

    Returns
    -------
    tuple of torch.Tensor
        Queries, keys and values: ``[batch, ppf * pph * ppw, heads, head_dim]``, or
        ``[tokens, heads, head_dim]`` for a ``qkv`` of 2 dimensions.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; numbers out of range; an output that overlaps another argument.

    Notes
    -----
    Arithmetic is float32, angles included, and rounds to nearest even where the formulas say so;
    e4m3 saturates. Programmatic dependent launch is on. One launch; allocates only missing outputs
    and copies no table to the GPU, so that it is safe in CUDA graphs; not differentiable. Sources:
    arXiv:1910.07467, arXiv:2104.09864, arXiv:2309.00071.

    Examples
    --------
    >>> import torch, precast
    >>> qkv, weight = torch.ones(2, 3 * 64).bfloat16(), torch.ones(64).bfloat16()
    >>> with precast.reference_mode():
    ...     q, k, v = precast.fused_qk_rmsnorm_rope(
    ...         *(qkv, weight, weight), ppf=2, pph=1, ppw=1, num_frame_channels=64,
    ...         num_height_channels=0, num_width_channels=0, num_heads_q=1, num_heads_k=1,
    ...         num_heads_v=1, head_dim=64,
    ...     )
    >>> q[:, 0, :2].tolist(), v.shape
    ([[1.0, 1.0], [-0.30078125, 1.3828125]], torch.Size([2, 1, 64]))
    """
    dtype = torch.float8_e4m3fn if output_fp8 else torch.bfloat16
    rows, device = qkv.shape[:-1], qkv.device
    if q_out is None:
        q_out = torch.empty((*rows, num_heads_q, head_dim), dtype=dtype, device=device)
    if k_out is None:
        k_out = torch.empty((*rows, num_heads_k, head_dim), dtype=dtype, device=device)
    if v_out is None:
        v_out = torch.empty((*rows, num_heads_v, head_dim), dtype=dtype, device=device)
    _FUSED.launch(
        *(qkv, q_weight, k_weight, ppf, pph, ppw),
        *(num_frame_channels, num_height_channels, num_width_channels),
        *(num_heads_q, num_heads_k, num_heads_v, head_dim, eps, base, interleave),
        *(factor, low, high, attention_factor, is_qk_norm, output_fp8),
        *(output_quant_scale, v_quant_scale, q_out, k_out, v_out),
    )
    return q_out, k_out, v_out
