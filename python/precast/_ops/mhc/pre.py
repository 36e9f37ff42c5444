# SPDX-License-Identifier: Apache-2.0
"""The weights of the residual streams, and the input of a layer."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.mhc.post import STREAMS
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

MIXES = STREAMS * (2 + STREAMS)
Mixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _sinkhorn(x: torch.Tensor, eps: float, repeat: int) -> torch.Tensor:
    x = x.softmax(dim=-1) + eps
    x = x / (x.sum(dim=-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        x = x / (x.sum(dim=-1, keepdim=True) + eps)
        x = x / (x.sum(dim=-2, keepdim=True) + eps)
    return x


def _mixes(
    dots: torch.Tensor,
    squares: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    *numbers: Any,
) -> Mixes:
    rms_eps, pre_eps, sinkhorn_eps, factor, repeat = numbers
    streams = residual.shape[:-1]
    sizes = (STREAMS, STREAMS, STREAMS**2)
    scale = torch.cat([part.expand(n) for part, n in zip(mhc_scale.split(1), sizes)])
    x = dots * torch.rsqrt(squares + rms_eps)[..., None] * scale + mhc_base
    pre, post = torch.sigmoid(x[..., : 2 * STREAMS]).split(STREAMS, dim=-1)
    comb = x[..., 2 * STREAMS :].reshape(*streams, STREAMS)
    layer_input = ((pre + pre_eps)[..., None] * residual.float()).sum(dim=-2)
    mixes = (post * factor)[..., None], _sinkhorn(comb, sinkhorn_eps, repeat)
    return *mixes, layer_input.to(residual.dtype)


def mhc_pre_big_fuse_reference(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    k: int,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    num_splits: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`mhc_pre_big_fuse` in plain PyTorch on any device."""
    if num_splits > 1:
        dot_mix, sqrsum = dot_mix.sum(dim=0), sqrsum.sum(dim=0)
    numbers = rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat
    return _mixes(dot_mix, sqrsum / k, residual, mhc_scale, mhc_base, *numbers)


def mhc_pre_big_fuse_with_prenorm_reference(
    dot_mix: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`mhc_pre_big_fuse_with_prenorm` in plain PyTorch on any device."""
    squares = residual.float().square().mean(dim=(-2, -1))
    dots = dot_mix.reshape(*residual.shape[:-2], MIXES)
    numbers = rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat
    return _mixes(dots, squares, residual, mhc_scale, mhc_base, *numbers)


def _check_shape(export: str, name: str, tensor: torch.Tensor, *legal: tuple[int, ...]) -> None:
    if tensor.shape not in legal:
        raise ValueError(f"{export}: {name} must have shape {[*legal[0]]}, got {[*tensor.shape]}")


def _check(
    export: str,
    dot_mix: torch.Tensor,
    residual: torch.Tensor,
    sqrsum: torch.Tensor | None = None,
    num_splits: int = 1,
) -> None:
    tokens = tuple(residual.shape[:-2])
    if sqrsum is None:
        dots = (*tokens, MIXES)
        _check_shape(export, "dot_mix", dot_mix, dots, (1, *dots))
        return
    split = (num_splits,) if num_splits > 1 else ()
    _check_shape(export, "dot_mix", dot_mix, (*split, *tokens, MIXES))
    _check_shape(export, "sqrsum", sqrsum, (*split, *tokens))


def _new(end: str, dtype: str) -> str:
    shape = f"(*residual.shape[:-2], {end})"
    return f"_torch.empty({shape}, dtype={dtype}, device=residual.device)"


_NEW = {
    "post_mix": _new("4, 1", "_torch.float32"),
    "comb_mix": _new("4, 4", "_torch.float32"),
    "layer_input": _new("residual.shape[-1]", "residual.dtype"),
}
_NUMBERS = (
    "rms_eps:float(positive) mhc_pre_eps:float(positive) mhc_sinkhorn_eps:float(positive) "
    "mhc_post_mult_value:float(-) sinkhorn_repeat:int(1-10000)"
)
_RESIDUAL = "residual:T=f16|bf16[*tokens(1-),4,hidden] mhc_scale:f32[3] mhc_base:f32[24]"
_RESULTS = (
    "post_mix!:f32[*tokens,4,1] comb_mix!:f32[*tokens,4,4] layer_input!:T[*tokens,hidden] "
    "enable_pdl:pdl"
)

_BIG_FUSE = Export(
    "mhc",
    "mhc_pre_big_fuse",
    f"dot_mix:f32 sqrsum:f32 {_RESIDUAL} k:int(1-) {_NUMBERS} num_splits:int(1-1024) {_RESULTS}",
    reference=mhc_pre_big_fuse_reference,
    check=_check,
    new=_NEW,
)
_PRENORM = Export(
    "mhc",
    "mhc_pre_big_fuse_with_prenorm",
    f"dot_mix:f32 {_RESIDUAL} {_NUMBERS} {_RESULTS}",
    reference=mhc_pre_big_fuse_with_prenorm_reference,
    check=_check,
    new=_NEW,
)


def _template(export: Export, reference: Any, splits: bool) -> TraceTemplate:
    own_squares = export is _PRENORM
    axes: dict[str, Var | Const] = {
        "num_tokens": Var(),
        "streams": Const("", value="4"),
        "hidden_size": Const("h"),
        "mixes": Const("", value="24"),
        "scales": Const("", value="3"),
        "one": Const("", value="1"),
    }
    split = []
    if splits:
        axes["num_splits"] = Const("s", "Parts of the sums.", sample=4)
        split = ["num_splits"]
    inputs: dict[str, Tensor | Scalar] = {
        "dot_mix": Tensor([*split, "num_tokens", "mixes"], dtype="float32")
    }
    if not own_squares:
        inputs["sqrsum"] = Tensor([*split, "num_tokens"], dtype="float32")
    inputs["residual"] = Tensor(["num_tokens", "streams", "hidden_size"])
    inputs["mhc_scale"] = Tensor(["scales"], dtype="float32")
    inputs["mhc_base"] = Tensor(["mixes"], dtype="float32")
    if not own_squares:
        inputs["k"] = Scalar("int32", sample=64)
    for name in ("rms_eps", "mhc_pre_eps", "mhc_sinkhorn_eps", "mhc_post_mult_value"):
        inputs[name] = Scalar("float32")
    inputs["sinkhorn_repeat"] = Scalar("int32")
    if splits:
        inputs["num_splits"] = Scalar("int32", sample=4)
    return TraceTemplate(
        op_type="mhc_pre_big_fuse",
        name_prefix=export.function + "_splits" * splits,
        description="Computes the weights of four residual streams and the input of a layer.",
        axes=axes,
        inputs=inputs,
        outputs={
            "post_mix": Tensor(["num_tokens", "streams", "one"], dtype="float32"),
            "comb_mix": Tensor(["num_tokens", "streams", "streams"], dtype="float32"),
            "layer_input": Tensor(["num_tokens", "hidden_size"], dtype_from="residual"),
        },
        reference=reference,
        fill=None if own_squares else _fill,
    )


def _fill(made: dict[str, Any]) -> None:
    """Sums of squares are not negative."""
    made["sqrsum"] = made["sqrsum"].abs()


_BIG_FUSE_TRACE = by_form(
    lambda num_splits=1, **call: num_splits > 1,
    lambda splits: _template(_BIG_FUSE, mhc_pre_big_fuse_reference, splits),
    [False, True],
)


@precast_api(trace=_BIG_FUSE_TRACE)
@launches(_BIG_FUSE)
def mhc_pre_big_fuse(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    k: int,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    num_splits: int = 1,
    block_size: int = 0,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Compute the weights of the four residual streams, and the input of a layer.

    .. math::

        m_t &= \frac{\sum_s dot_{s,t}}{\sqrt{\sum_s sqrsum_{s,t} / k + rms\_eps}} \\
        pre_t &= \sigma(m_{t,0:4} \cdot scale_0 + base_{0:4}) + mhc\_pre\_eps \\
        post_t &= \sigma(m_{t,4:8} \cdot scale_1 + base_{4:8}) \cdot mhc\_post\_mult\_value \\
        comb_t &= \mathrm{Sinkhorn}(m_{t,8:24} \cdot scale_2 + base_{8:24}) \\
        layer\_input_{t,h} &= \mathrm{round}\left(\sum_j pre_{t,j} \cdot residual_{t,j,h}\right)

    Sinkhorn's algorithm makes a 4 x 4 matrix nearly doubly stochastic: a softmax of each row plus
    ``mhc_sinkhorn_eps``, then each column divided by its sum plus ``mhc_sinkhorn_eps``; after that
    rows and columns in turn, ``sinkhorn_repeat - 1`` times.

    Parameters
    ----------
    dot_mix : torch.Tensor
        ``[..., 24]``, or ``[num_splits, ..., 24]`` where there are several splits; float32,
        contiguous: products of the flattened streams with 24 vectors, before any norm.
    sqrsum : torch.Tensor
        ``[...]`` or ``[num_splits, ...]``, float32, contiguous: sums of the squares of the
        flattened streams.
    residual : torch.Tensor
        ``[..., 4, hidden]`` with at least one leading dimension, contiguous; bfloat16 or float16,
        on a CUDA device.
    mhc_scale : torch.Tensor
        ``[3]``, float32: factors of the parts for pre, post and comb.
    mhc_base : torch.Tensor
        ``[24]``, float32, contiguous: added to each part.
    k : int
        What ``sqrsum`` is divided by: ``4 * hidden``, usually. At least 1.
    rms_eps, mhc_pre_eps, mhc_sinkhorn_eps : float
        As above; positive. Default: 1e-6.
    mhc_post_mult_value : float
        As above. Default: 1.
    sinkhorn_repeat : int
        From 1 to 10000. Default: 20.
    num_splits : int
        Parts whose sums ``dot_mix`` and ``sqrsum`` are, from 1 to 1024; they are added in their
        order. Default: 1, without that dimension.
    block_size : int
        Taken for compatibility, and without effect: the hidden size decides the number of threads.

    Returns
    -------
    tuple of torch.Tensor
        The weights of post, ``[..., 4, 1]``, and comb, ``[..., 4, 4]`` (from the old stream to the
        new one), both float32 as :func:`mhc_post` takes them; and the input of the layer,
        ``[..., hidden]``, dtype of ``residual``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        numbers out of range.

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even. Any hidden size; multiples of 8 are
    fastest. One launch; allocates its results; safe in CUDA graphs; not differentiable. Sources:
    arXiv:2512.24880; Sinkhorn and Knopp, Concerning nonnegative matrices and doubly stochastic
    matrices, 1967.

    Examples
    --------
    >>> import torch, precast
    >>> streams = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]], dtype=torch.float16)
    >>> zeros, ones = torch.zeros(1, 24), torch.ones(3)
    >>> with precast.reference_mode():
    ...     post, comb, x = precast.mhc_pre_big_fuse(
    ...         zeros, torch.ones(1), streams, ones, zeros[0], 4, mhc_post_mult_value=2.0
    ...     )
    >>> post.flatten().tolist(), round(comb[0, 0, 0].item(), 3), x.tolist()
    ([1.0, 1.0, 1.0, 1.0], 0.25, [[5.0]])
    """


@precast_api(trace=_template(_PRENORM, mhc_pre_big_fuse_with_prenorm_reference, False))
@launches(_PRENORM)
@documented(mhc_pre_big_fuse)
def mhc_pre_big_fuse_with_prenorm(
    dot_mix: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    block_size: int = 0,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Compute what :func:`mhc_pre_big_fuse` does, with the squares of ``residual`` itself.

    .. math::

        m_t = \frac{dot_t}{\sqrt{\frac{1}{4 n} \sum_{j,h} residual_{t,j,h}^2 + rms\_eps}}

    for ``n`` the hidden size; the rest is as there.

    Parameters
    ----------
    dot_mix : torch.Tensor
        ``[..., 24]`` or ``[1, ..., 24]``, float32, contiguous.

    Examples
    --------
    >>> import torch, precast
    >>> streams = torch.ones(1, 4, 8, dtype=torch.float16)
    >>> zeros, ones = torch.zeros(1, 24), torch.ones(3)
    >>> with precast.reference_mode():
    ...     _, _, x = precast.mhc_pre_big_fuse_with_prenorm(zeros, streams, ones, zeros[0])
    >>> x[0, 0].item()
    2.0
    """
