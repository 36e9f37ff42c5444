# SPDX-License-Identifier: Apache-2.0
"""The routing of DeepSeek-V3: experts by biased sigmoids, in the best groups of experts."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._op.validation import check_rank
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

MAX_GROUPS, MAX_TOPK = 32, 32
_PER_LANE = 16  # experts, in the kernel
_EPS = 1e-20


def fused_topk_deepseek_reference(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
    routing_replay_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fused_topk_deepseek` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    topk_values, topk_indices, routing_replay_out : torch.Tensor, optional
        Neither read nor written.

    Returns
    -------
    tuple of torch.Tensor
        Weights, dtype of ``scores``, and experts, int32: ``[tokens, topk]``, the best first.
    """
    weights = torch.sigmoid(scores.float())
    keys = weights + bias.float()
    groups = keys.unflatten(1, (n_group, -1))
    best = groups.sort(dim=2, descending=True).values[..., :2].sum(dim=2)
    chosen = best.sort(dim=1, descending=True, stable=True).indices[:, :topk_group]
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
    left_out = ~is_chosen.repeat_interleave(groups.shape[2], dim=1)
    # Those of other groups come last, behind -inf, too.
    order = keys.sort(dim=1, descending=True, stable=True).indices
    last = left_out.gather(1, order).to(torch.int8).sort(dim=1, stable=True).indices
    experts = order.gather(1, last)[:, :topk]
    own = weights.gather(1, experts)
    values = own * routed_scaling_factor / (own.sum(dim=1, keepdim=True) + _EPS)
    return values.to(scores.dtype), experts.to(torch.int32)


def _check(
    export: str,
    scores: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routing_replay_out: torch.Tensor | None,
) -> None:
    check_rank(export, "scores", scores, 2, 2)
    tokens, experts = scores.shape
    if not 1 <= n_group <= MAX_GROUPS or experts % n_group:
        raise ValueError(
            f"{export}: n_group must be from 1 to {MAX_GROUPS} and divide the {experts} experts, "
            f"got {n_group}"
        )
    each = experts // n_group
    most = _PER_LANE << (32 // n_group).bit_length() - 1
    if each > most:
        raise ValueError(
            f"{export}: scores must have at most {most} experts in each of {n_group} groups, got "
            f"{each}"
        )
    if not 1 <= topk_group <= n_group:
        raise ValueError(
            f"{export}: topk_group must be from 1 to n_group, {n_group}, got {topk_group}"
        )
    most = min(topk_group * each, MAX_TOPK)
    if not 1 <= topk <= most:
        raise ValueError(
            f"{export}: topk must be from 1 to {most} for {topk_group} groups of {each} experts, "
            f"got {topk}"
        )
    if routing_replay_out is not None:
        check_rank(export, "routing_replay_out", routing_replay_out, 2, 2)
        rows, columns = routing_replay_out.shape
        if rows < tokens or columns != topk:
            raise ValueError(
                f"{export}: routing_replay_out must have shape [{tokens} or more, {topk}], got "
                f"{[*routing_replay_out.shape]}"
            )


def _write(
    scores: torch.Tensor,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    routing_replay_out: torch.Tensor | None,
    **given: Any,
) -> None:
    names = ("bias", "n_group", "topk_group", "topk", "routed_scaling_factor")
    values, experts = fused_topk_deepseek_reference(scores, *(given[name] for name in names))
    topk_values.copy_(values)
    topk_indices.copy_(experts)
    if routing_replay_out is not None:
        routing_replay_out[: len(scores)].copy_(experts)


_ROUTING = Export(
    "fused_topk_deepseek",
    "fused_topk_deepseek",
    "scores:T=f32|f16|bf16[tokens,experts] bias:U=f32|f16|bf16[experts] n_group:int "
    "topk_group:int topk:int routed_scaling_factor:float(-) topk_values!:T[tokens,topk] "
    "topk_indices!:i32[tokens,topk] launch_with_pdl:pdl routing_replay_out!?:i16",
    check=_check,
    write=_write,
)


def _template(replays: bool) -> TraceTemplate:
    axes: dict[str, Var | Const] = {
        "num_tokens": Var(),
        "num_experts": Const("e", sample=64),
        "topk": Const("k", sample=4),
    }
    inputs: dict[str, Tensor | Scalar] = {
        "scores": Tensor(["num_tokens", "num_experts"]),
        "bias": Tensor(["num_experts"]),
        "n_group": Scalar("int32", sample=8),
        "topk_group": Scalar("int32", sample=4),
        "topk": Scalar("int32"),
        "routed_scaling_factor": Scalar("float32", sample=2.5),
        "topk_values": Tensor(["num_tokens", "topk"], description="Overwritten."),
        "topk_indices": Tensor(["num_tokens", "topk"], dtype="int32", description="Overwritten."),
    }
    if replays:
        axes["max_tokens"] = Var("Rows of the buffer.", value="num_tokens + 2")
        inputs["routing_replay_out"] = Tensor(
            ["max_tokens", "topk"], dtype="int16", description="Gets the experts, too."
        )
    return TraceTemplate(
        op_type="moe_routing",
        name_prefix="fused_topk_deepseek" + "_replay" * replays,
        description="Chooses experts by biased sigmoids in the best groups; weights are sigmoids.",
        axes=axes,
        inputs=inputs,
        outputs={
            "values": Tensor(["num_tokens", "topk"], param="topk_values", dtype_from="scores"),
            "indices": Tensor(["num_tokens", "topk"], param="topk_indices", dtype="int32"),
        },
        reference=fused_topk_deepseek_reference,
        tags=["moe"],
    )


_TRACE = by_form(
    lambda routing_replay_out=None, **call: routing_replay_out is not None,
    _template,
    [False, True],
)


@precast_api(trace=_TRACE)
@op("fused_topk_deepseek")
def fused_topk_deepseek(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: bool | None = True,
    routing_replay_out: torch.Tensor | None = None,
    *,
    backend: str = "default",
) -> None:
    r"""Choose the experts of each token as DeepSeek-V3 does, and weigh them.

    .. math::

        s_{t,e} &= \frac{1}{1 + e^{-scores_{t,e}}} \\
        c_{t,e} &= s_{t,e} + bias_e \\
        v_{t,i} &= \mathrm{round}\left(routed\_scaling\_factor \cdot
            \frac{s_{t,e_i}}{\sum_j s_{t,e_j} + 10^{-20}}\right)

    The ``topk_group`` groups with the largest sum of their two largest :math:`c` are kept, and
    :math:`e_1, e_2, \ldots` are the ``topk`` experts of these with the largest :math:`c`, the
    largest first. The bias has no part in the weights :math:`v`. Of equal groups and experts the
    first are chosen; NaN is larger than all numbers.

    Parameters
    ----------
    scores : torch.Tensor
        ``[tokens, experts]``: the router's logits; float32, bfloat16 or float16, on a CUDA device;
        rows with unit stride and any distance. Rows that begin at a multiple of four elements are
        fastest.
    bias : torch.Tensor
        ``[experts]``, contiguous; float32, bfloat16 or float16, which need not be the dtype of
        ``scores``.
    n_group : int
        Groups of experts, from 1 to 32; expert ``e`` is in group ``e // (experts / n_group)``. A
        group has at most 16 experts for each of its lanes, the largest power of two up to
        ``32 / n_group``: 512 experts in one group, 64 in each of eight.
    topk_group : int
        Groups that are kept, from 1 to ``n_group``.
    topk : int
        Experts of a token; at most 32, and at most those of the groups that are kept.
    routed_scaling_factor : float
        What the weights of a token add up to.
    topk_values : torch.Tensor
        ``[tokens, topk]``, contiguous, dtype of ``scores``. Overwritten with the weights.
    topk_indices : torch.Tensor
        ``[tokens, topk]``, contiguous, int32. Overwritten with the experts.
    launch_with_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.
    routing_replay_out : torch.Tensor, optional
        ``[tokens or more, topk]``, contiguous, int16: the experts are also written to its first
        rows; others stay.
    backend : str
        Only ``default``; FlashInfer's ``cake`` is a kernel for compute capability 10.0.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        numbers out of range; a ``routed_scaling_factor`` of NaN; outputs that overlap another
        argument; another backend.

    Notes
    -----
    All arithmetic is float32; weights are rounded once to nearest even. FlashInfer's limits are
    lower: 8 experts of a token, and 256 experts in groups or 384 in one. One launch; no allocation;
    safe in CUDA graphs; not differentiable. Source: arXiv:2412.19437.

    Examples
    --------
    >>> import torch, precast
    >>> scores, bias = torch.tensor([[0.0, 0.0, 2.0, -2.0]]), torch.tensor([0.0, 0.5, 0.0, 0.0])
    >>> values, experts = torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.fused_topk_deepseek(scores, bias, 2, 1, 2, 1.0, values, experts)
    >>> experts.tolist(), values.tolist()
    ([[1, 0]], [[0.5, 0.5]])
    """
    if backend != "default":
        raise ValueError(f"fused_topk_deepseek: backend must be 'default', got {backend!r}")
    _ROUTING.launch(
        *(scores, bias, n_group, topk_group, topk, routed_scaling_factor),
        *(topk_values, topk_indices, launch_with_pdl, routing_replay_out),
    )
