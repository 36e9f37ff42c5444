# SPDX-License-Identifier: Apache-2.0
"""Fuse steps to fewer steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from precast._ops.logits_processor.fusion_rules import FusionRule, get_default_fusion_rules
from precast._ops.logits_processor.op import Op
from precast._ops.logits_processor.types import TensorType
from precast._ops.logits_processor.validators import (
    CompileError,
    ValidityCheck,
    get_default_validity_checks,
)


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


def compile_pipeline(
    ops: Sequence[Op],
    custom_fusion_rules: Sequence[FusionRule] | None = None,
    custom_validity_checks: Sequence[ValidityCheck] | None = None,
) -> list[Op]:
    """Check steps and fuse them.

    Parameters
    ----------
    ops : sequence of Op
        In their order.
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
