# SPDX-License-Identifier: Apache-2.0
"""Which steps one launch can do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from precast.logits_processor.op import Op
from precast.logits_processor.operators import (
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
    """Those of the library: the more steps one replaces, the earlier it is tried."""
    rules = [_rule(pattern, FusedLogitsSampleOp, 100) for pattern in _from_logits()]
    return [
        *rules,
        *_from_probs(),
        _fused((TemperatureOp, SoftmaxOp), FusedTemperatureSoftmaxOp, 1),
    ]


def _rule(
    pattern: tuple[type[Op], ...], build: Callable[[Sequence[Op]], Op], prio: int
) -> FusionRule:
    return FusionRule(pattern, lambda window: True, build, prio + len(pattern))


def _fused(pattern: tuple[type[Op], ...], op: type[Op], prio: int) -> FusionRule:
    return _rule(pattern, lambda window: op(**_defaults(window)), prio)


def _from_logits() -> Iterator[tuple[type[Op], ...]]:
    """All pipes from logits to tokens that the fused function computes."""
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


def _from_probs() -> Iterator[FusionRule]:
    yield _rule((ProbsTopKOp, TopPOp, ProbsSampleOp), _top_k_first, 10)
    yield _rule((TopPOp, ProbsTopKOp, ProbsSampleOp), _nucleus_first, 10)
    yield _fused((ProbsTopKOp, ProbsSampleOp), FusedProbsTopKSampleOp, 10)
    yield _fused((TopPOp, ProbsSampleOp), FusedProbsTopPSampleOp, 10)
    yield _fused((MinPOp, ProbsSampleOp), FusedProbsMinPSampleOp, 10)


def _top_k_first(window: Sequence[Op]) -> Op:
    """Unless the step of top-k was made to be joint."""
    return FusedProbsTopKTopPSampleOp(**{"joint_topk_topp": False, **_defaults(window)})


def _nucleus_first(window: Sequence[Op]) -> Op:
    return FusedProbsTopKTopPSampleOp(**{**_defaults(window), "joint_topk_topp": True})
