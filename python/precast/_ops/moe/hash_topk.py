# SPDX-License-Identifier: Apache-2.0
"""Routing by a table from tokens to experts."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._op.ranges import POSITIVE
from precast._op.validation import check_rank
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

MAX_TOPK = 32


def hash_topk_reference(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`hash_topk` in plain PyTorch on any device."""
    experts, vocabulary = router_logits.shape[1], len(tid2eid)
    known = (input_ids >= 0) & (input_ids < vocabulary)
    table = torch.nn.functional.pad(tid2eid, (0, 0, 0, 1), value=-1)  # The last row has none.
    chosen = table[torch.where(known, input_ids, vocabulary)].long()
    is_expert = (chosen >= 0) & (chosen < experts)
    padded = torch.nn.functional.pad(router_logits, (0, 1))
    x = padded.gather(1, torch.where(is_expert, chosen, experts))
    weights = torch.nn.functional.softplus(x, threshold=float("inf")).sqrt()
    weights = weights.where(is_expert, 0.0)
    weights = (weights / weights.sum(dim=1, keepdim=True)).where(is_expert, 0.0)
    chosen = chosen.where(is_expert, -1)
    if num_fused_shared_experts:
        shared = 1.0 / torch.tensor(routed_scaling_factor, dtype=torch.float32).item()
        weights = torch.nn.functional.pad(weights, (0, 1), value=shared)
        chosen = torch.nn.functional.pad(chosen, (0, 1), value=experts)
    return weights, chosen.to(torch.int32)


def _check(
    export: str,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int,
    routed_scaling_factor: float,
) -> None:
    if num_fused_shared_experts and not POSITIVE.holds(routed_scaling_factor):
        raise ValueError(
            f"{export}: routed_scaling_factor must be positive and finite with a shared expert, "
            f"got {routed_scaling_factor}"
        )
    check_rank(export, "tid2eid", tid2eid, 2, 2)
    most = MAX_TOPK - num_fused_shared_experts
    if not 1 <= tid2eid.shape[1] <= most:
        raise ValueError(
            f"{export}: tid2eid must have 1 to {most} columns, got shape {[*tid2eid.shape]}"
        )


def _new(dtype: str) -> str:
    columns = "tid2eid.shape[1] + num_fused_shared_experts"
    shape = f"(router_logits.shape[0], {columns})"
    return f"_torch.empty({shape}, dtype={dtype}, device=router_logits.device)"


_HASH = Export(
    "hash_topk",
    "hash_topk",
    "router_logits:f32[tokens,experts] input_ids:i64[tokens] tid2eid:i32[vocabulary,topk] "
    "num_fused_shared_experts:int(0-1) routed_scaling_factor:float "
    "topk_weights!:f32[tokens,topk+num_fused_shared_experts] "
    "topk_ids!:i32[tokens,topk+num_fused_shared_experts] launch_with_pdl:pdl",
    reference=hash_topk_reference,
    check=_check,
    new={"topk_weights": _new("_torch.float32"), "topk_ids": _new("_torch.int32")},
)


def _fill(made: dict[str, Any]) -> None:
    import torch

    experts = made["router_logits"].shape[1]
    for name, size in (("input_ids", len(made["tid2eid"])), ("tid2eid", experts)):
        tensor = made[name]
        numbers = torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        made[name] = (numbers * 7 % size).view(tensor.shape)


_TRACE = TraceTemplate(
    op_type="moe_routing",
    name_prefix="hash_topk",
    description="Looks up the experts of each token, and weighs them by the router's logits.",
    axes={
        "num_tokens": Var(),
        "num_experts": Const("e"),
        "vocab_size": Const("v"),
        "topk": Const("k", sample=6),
        "topk_fused": Const("", value="topk + num_fused_shared_experts"),
    },
    inputs={
        "router_logits": Tensor(["num_tokens", "num_experts"], dtype="float32"),
        "input_ids": Tensor(["num_tokens"], dtype="int64"),
        "tid2eid": Tensor(["vocab_size", "topk"], dtype="int32"),
        "num_fused_shared_experts": Scalar("int32", sample=1),
        "routed_scaling_factor": Scalar("float32", sample=2.5),
    },
    outputs={
        "topk_weights": Tensor(["num_tokens", "topk_fused"], dtype="float32"),
        "topk_ids": Tensor(["num_tokens", "topk_fused"], dtype="int32"),
    },
    reference=hash_topk_reference,
    tags=["moe"],
    fill=_fill,
)


@precast_api(trace=_TRACE)
@launches(_HASH)
def hash_topk(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    launch_with_pdl: bool | None = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Look up the experts of each token in a table, and weigh them by the router's logits.

    .. math::

        e_{t,i} &= tid2eid_{input\_ids_t,\,i} \\
        w_{t,i} &= \sqrt{\log(1 + \exp(router\_logits_{t,\,e_{t,i}}))} \\
        weight_{t,i} &= w_{t,i} \,/\, \sum_j w_{t,j}

    Parameters
    ----------
    router_logits : torch.Tensor
        ``[tokens, experts]``, float32, on a CUDA device; rows with unit stride and any distance.
    input_ids : torch.Tensor
        ``[tokens]``, int64, contiguous: the number of each token in the vocabulary.
    tid2eid : torch.Tensor
        ``[vocabulary, topk]``, int32, contiguous: the experts of each token of the vocabulary; at
        most 32, with the shared one.
    num_fused_shared_experts : int
        1 adds the shared expert behind the others: number ``experts``, weight
        ``1 / routed_scaling_factor``. 0 or 1. Default: 0.
    routed_scaling_factor : float
        Only for the weight of the shared expert, with which it must be positive. Default: 1.
    launch_with_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Returns
    -------
    tuple of torch.Tensor
        Weights, float32, and experts, int32: ``[tokens, topk + num_fused_shared_experts]``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        numbers out of range.

    Notes
    -----
    All arithmetic is float32. Where a token is not in the table or an expert not in the logits, the
    expert is -1 with weight 0, and has no part in the sum. One launch; allocates its results; safe
    in CUDA graphs; not differentiable. Source: DeepSeek-V4; Roller et al., arXiv:2106.04426.

    Examples
    --------
    >>> import torch, precast
    >>> logits, table = torch.zeros(1, 4), torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     weights, experts = precast.hash_topk(logits, torch.tensor([1]), table, 1, 2.0)
    >>> weights.tolist(), experts.tolist()
    ([[0.5, 0.5, 0.5]], [[2, 0, 4]])
    """
