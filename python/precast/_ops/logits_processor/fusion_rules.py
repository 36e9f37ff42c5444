# SPDX-License-Identifier: Apache-2.0
"""Rules that say which steps one launch can do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from precast._ops.logits_processor.op import Op
from precast._ops.logits_processor.operators import (
    FusedLogitsSampleOp,
    FusedProbsMinPSampleOp,
    FusedProbsTopKSampleOp,
    FusedProbsTopKTopPSampleOp,
    FusedProbsTopPSampleOp,
    FusedTemperatureSoftmaxOp,
    LogitsSampleOp,
    LogitsTopKOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
    _defaults,
)


class FusionRule(NamedTuple):
    """Steps that follow each other, and the one that replaces them.

    Attributes
    ----------
    pattern : tuple of type
        Their classes.
    guard : callable
        Takes the steps; False leaves them as they are.
    build : callable
        Takes the steps and makes the one.
    prio : int
        Rules with a larger number are tried first.
    """

    pattern: tuple[type[Op], ...]
    guard: Callable[[Sequence[Op]], bool]
    build: Callable[[Sequence[Op]], Op]
    prio: int = 0


def get_default_fusion_rules() -> list[FusionRule]:
    """Return the library's rules; the more steps one replaces, the earlier it is tried."""
    return [
        *(_rule(pattern, FusedLogitsSampleOp, 100) for pattern in _from_logits()),
        _rule((ProbsTopKOp, TopPOp, ProbsSampleOp), _build_topk_topp_sampling, 10),
        _rule((TopPOp, ProbsTopKOp, ProbsSampleOp), _build_topp_topk_sampling, 10),
        _rule((ProbsTopKOp, ProbsSampleOp), build_topk_sampling, 10),
        _rule((TopPOp, ProbsSampleOp), build_topp_sampling, 10),
        _rule((MinPOp, ProbsSampleOp), build_minp_sampling, 10),
        _rule((TemperatureOp, SoftmaxOp), build_temperature_softmax, 1),
    ]


def joint_topk_topp_sampleprobs_guard(window: Sequence[Op]) -> bool:
    """Whether the first step, top-k, was made to leave top-p the whole distribution."""
    return bool(getattr(window[0], "default_params", {}).get("joint_topk_topp", False))


def _fuses_to(op: Callable[..., Op]) -> Callable[[Sequence[Op]], Op]:
    """Make a builder of one step, with the parameters of the steps that it replaces."""
    return lambda window: op(**_defaults(window))


build_temperature_softmax = _fuses_to(FusedTemperatureSoftmaxOp)
build_topk_sampling = _fuses_to(FusedProbsTopKSampleOp)
build_topp_sampling = _fuses_to(FusedProbsTopPSampleOp)
build_minp_sampling = _fuses_to(FusedProbsMinPSampleOp)


def _build_topk_topp_sampling(window: Sequence[Op]) -> Op:
    joint = joint_topk_topp_sampleprobs_guard(window)
    return FusedProbsTopKTopPSampleOp(**{**_defaults(window), "joint_topk_topp": joint})


def _build_topp_topk_sampling(window: Sequence[Op]) -> Op:
    """One step for both; the nucleus that top-k filters is that of the whole distribution."""
    return FusedProbsTopKTopPSampleOp(**{**_defaults(window), "joint_topk_topp": True})


def _rule(
    pattern: tuple[type[Op], ...], build: Callable[[Sequence[Op]], Op], prio: int
) -> FusionRule:
    return FusionRule(pattern, lambda window: True, build, prio + len(pattern))


def _from_logits() -> Iterator[tuple[type[Op], ...]]:
    """Yield all pipes from logits to tokens that the fused function computes."""
    heads = itertools.product([(), (TemperatureOp,)], [(), (LogitsTopKOp,)])
    for temperature, top_k in heads:
        head = (*temperature, *top_k)
        if head:
            yield (*head, LogitsSampleOp)
        filters = [TopPOp, MinPOp] if top_k else [ProbsTopKOp, TopPOp, MinPOp]
        for count in range(len(filters) + 1):
            for chain in itertools.permutations(filters, count):
                if _is_intersection(chain):
                    yield (*head, SoftmaxOp, *chain, ProbsSampleOp)


def _is_intersection(chain: Sequence[type[Op]]) -> bool:
    """Whether filters one after the other keep what they keep side by side.

    The share that min-p asks for survives a renormalisation, the rank of top-k does too; top-p's
    share of the mass is that of the whole, or of what top-k leaves, but not of what min-p leaves.
    """
    return not (TopPOp in chain and MinPOp in chain[: chain.index(TopPOp)])
