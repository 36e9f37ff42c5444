# SPDX-License-Identifier: Apache-2.0
"""Check steps, and fuse them to fewer steps, by the rules of the library and further ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from precast._op.docs import documented
from precast._ops.logits_processor.op import Op, TensorType
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

# -- checks ---------------------------------------------------------------------------------------


class CompileError(ValueError):
    """Steps do not fit each other, or a check rejects them."""


#: Takes the steps, and raises :class:`CompileError` to reject them.
ValidityCheck: TypeAlias = Callable[[Sequence[Op]], None]


def single_softmax_rule(ops: Sequence[Op]) -> None:
    """Raise unless probabilities are made at most once.

    Raises
    ------
    CompileError
        If several steps make them of logits.
    """
    if sum(isinstance(op, SoftmaxOp) for op in ops) > 1:
        raise CompileError(
            "Multiple Softmax operators found. Only one Softmax is allowed per pipeline."
        )


def indices_terminal_rule(ops: Sequence[Op]) -> None:
    """Raise if anything follows a step that makes tokens.

    Raises
    ------
    CompileError
        If something does.
    """
    for op, follower in itertools.pairwise(ops):
        if op.OUT == TensorType.INDICES:
            raise CompileError(
                f"No operator may follow one that outputs Indices. Found "
                f"{type(follower).__name__} after {type(op).__name__}"
            )


def get_default_validity_checks() -> list[ValidityCheck]:
    """Return the checks of the library."""
    return [single_softmax_rule, indices_terminal_rule]


def validate_pipeline(
    ops: Sequence[Op], custom_checks: Sequence[ValidityCheck] | None = None
) -> None:
    """Apply the library's checks, then further ones; fuse nothing.

    Parameters
    ----------
    ops : sequence of Op
        In their order.
    custom_checks : sequence of callable, optional
        Checks besides those of the library.

    Raises
    ------
    CompileError
        If there is no step, or a check rejects them.

    Examples
    --------
    >>> from precast.logits_processor.operators import ProbsSampleOp, SoftmaxOp
    >>> from precast.logits_processor.validators import validate_pipeline
    >>> validate_pipeline([SoftmaxOp(), ProbsSampleOp()])
    """
    if not ops:
        raise CompileError("Pipeline cannot be empty")
    for check in (*get_default_validity_checks(), *(custom_checks or ())):
        check(ops)


# -- rules ----------------------------------------------------------------------------------------


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


# -- the compiler ---------------------------------------------------------------------------------


class Compiler:
    """Checks steps and fuses them, by the rules of the library and further ones."""

    def __init__(self) -> None:
        self.fusion_rules: list[FusionRule] = []
        self.validity_checks: list[ValidityCheck] = get_default_validity_checks()
        for rule in get_default_fusion_rules():
            self.register_fusion_rule(rule)

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Add a rule, which is tried in the order of priorities."""
        self.fusion_rules.append(rule)
        self.fusion_rules.sort(key=lambda known: -known.prio)

    def register_validity_check(self, check: ValidityCheck) -> None:
        """Add a check."""
        self.validity_checks.append(check)

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        """Check steps and fuse them to as few as the rules allow.

        Raises
        ------
        CompileError
            If there is none, one does not take what the one before it gives, or a check rejects
            them.
        """
        if not ops:
            raise CompileError("Cannot compile empty operator list")
        for check in [_types_fit, *self.validity_checks]:
            check(ops)
        steps = list(ops)
        while self._fuse_once(steps):
            pass
        return steps

    def _fuse_once(self, steps: list[Op]) -> bool:
        """Apply the first rule that fits anywhere, in place; return whether there was one."""
        for rule in self.fusion_rules:
            for start in range(len(steps) - len(rule.pattern) + 1):
                window = steps[start : start + len(rule.pattern)]
                if all(map(isinstance, window, rule.pattern)) and rule.guard(window):
                    steps[start : start + len(window)] = [rule.build(window)]
                    return True
        return False


def _types_fit(ops: Sequence[Op]) -> None:
    if ops[0].IN not in (TensorType.LOGITS, TensorType.PROBS):
        raise CompileError(
            f"First operator ({type(ops[0]).__name__}) cannot accept standard pipeline inputs. "
            f"Expected LOGITS or PROBS, but operator accepts: {ops[0].IN}"
        )
    for place, (op, follower) in enumerate(itertools.pairwise(ops), 1):
        if op.OUT != follower.IN and op.OUT != TensorType.INDICES:
            raise CompileError(
                f"Type mismatch at operator {place} ({type(follower).__name__}): it accepts "
                f"{follower.IN}, and {type(op).__name__} before it outputs {op.OUT}"
            )


@documented(validate_pipeline)
def compile_pipeline(
    ops: Sequence[Op],
    custom_fusion_rules: Sequence[FusionRule] | None = None,
    custom_validity_checks: Sequence[ValidityCheck] | None = None,
) -> list[Op]:
    """Check steps and fuse them.

    Parameters
    ----------
    custom_fusion_rules : sequence of FusionRule, optional
        Rules besides those of the library.
    custom_validity_checks : sequence of callable, optional
        Checks besides those of the library.

    Returns
    -------
    list of Op
        As few as the rules make them.

    Raises
    ------
    CompileError
        If they do not fit each other, or a check rejects them.
    """
    compiler = Compiler()
    for rule in custom_fusion_rules or ():
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or ():
        compiler.register_validity_check(check)
    return compiler.compile(ops)
