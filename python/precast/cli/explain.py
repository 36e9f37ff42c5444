# SPDX-License-Identifier: Apache-2.0
"""Explain where the kernel of one configuration comes from, and why each candidate fits or not.

    precast explain norm dtype=bf16 --arch 9.0
    precast explain precast.rmsnorm dtype=torch.bfloat16
    precast explain BatchDecodeWithPagedKVCacheWrapper dtype=bf16 head_dim=128
    precast explain gemm m=64 n=7168 k=2048

The op may also be a function or a class that precast exports; then every op that its calls use is
explained. Arguments of FlashInfer stand for the axes that they decide: q_data_type, kv_data_type,
out_dtype, head_dim, and dtype for every element type. Exits with 1 if there is no kernel and none
can be compiled.

With m, n and k, and perhaps groups, kind, operands and sms (the multiprocessors, 132), gemm means
the tile that a product takes on Hopper, the time that its model expects, and the next best ones.
Operands are fp8_block, e4m3 with scales of blocks, unless they are fp8_row, e4m3 with scales of
rows, or bf16.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from precast.cli import _completers, _fit, _gemm_choice, _names, _output, _state
from precast.cli._output import UsageError

if TYPE_CHECKING:
    from precast._runtime.resolution import Step

EXIT_CODES = (0, 1, 2, 3)
JSON = {
    "modules": f"one for each op and device or capability, with {_state.OUTCOME_KEYS}",
    **_gemm_choice.JSON,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_argument(
        "op", metavar="OP", help="an op, or a public function or class, such as norm or rmsnorm"
    )
    _completers.attach(action, _completers.ops_and_functions)
    action = parser.add_argument(
        "axes", metavar="KEY=VALUE", nargs="*", default=[], help="its axes: dtype=bf16"
    )
    _completers.attach(action, _completers.axes)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--device", type=int, metavar="N", help="index of a GPU (default: the first)"
    )
    action = where.add_argument(
        "--arch", type=_state.capabilities, metavar="CC", help="a compute capability such as 9.0"
    )
    _completers.attach(action, _completers.capabilities)
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if _gemm_choice.is_asked(args.op, args.axes):
        return _gemm_choice.explain(args.axes, args.json)
    ops = _names.ops_of(args.op)
    chosen, given = _names.of_queries(ops, _given(ops[0], args.axes))
    (op, *beside), given = _names.of_cache(chosen, given)
    axes = {op: _names.axes_of(op, given)}
    for other in beside:
        follow = _names.axes_beside(other, axes[op])
        if follow is not None:
            axes[other] = follow
    if args.arch is not None:
        targets = _state.arch_targets(args.arch)
    else:
        targets = _state.device_targets(args.device or 0)
    rows = [
        (target, _state.outcome(name, values, target.capability))
        for target in targets
        for name, values in axes.items()
    ]
    # What runs beside the op only where it exists is not among the modules of another call.
    rows = [(target, row) for target, row in rows if row.op == op or row.state != "unsupported"]
    if args.json:
        _output.print_json({"modules": [row.as_json() for _, row in rows]})
    else:
        for target, row in rows:
            _print(target, row)
    return 1 if any(row.state in ("missing", "unsupported") for _, row in rows) else 0


def _print(target: _state.Target, row: _state.Outcome) -> None:
    _output.print_heading(f"{row.module} on {target.label}")
    _output.print_table(
        [("accepted" if s.accepted else "rejected", _candidate(s), s.reason) for s in row.steps]
    )
    result = {
        "JIT": "would be compiled at the first call",
        "missing": "no kernel",
        "unsupported": row.reason,
    }.get(row.state, f"{row.state}: {row.path}")
    print(f"Result: {result}")
    fixes = _fit.fixes([row]) if row.state in ("JIT", "missing") else []
    for fix in fixes:
        print(f"{'To install it prebuilt' if row.state == 'JIT' else 'Fix'}: {fix}")
    hint = _fit.folder_hint(fixes)
    if hint is not None:
        print(hint)


def _candidate(step: Step) -> str:
    return f"{step.source}: {step.place}" if step.place else step.source


def _given(op: str, arguments: list[str]) -> dict[str, str]:
    """The arguments ``KEY=VALUE``."""
    from precast._base.names import axis_word
    from precast._plan.installed import plan

    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not value or key in given:
            first = next(plan().config.op(op).space.points())
            legal = " ".join(f"{axis}={axis_word(value)}" for axis, value in first.items())
            raise UsageError(f"{argument!r} is not KEY=VALUE, or repeats a key; legal: {legal}")
        given[key] = {"true": "1", "false": "0"}.get(value.lower(), value)
    return given
