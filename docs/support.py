# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/support.md from ``aot_configs/``: a new op or target needs no edit."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sitegen import ROOT, markup

from precast._base.names import axis_word
from precast._plan.axes import AxisValue
from precast._plan.config import Arch, OpConfig
from precast._plan.planner import Plan

PAGE = "docs/support.md"
SIZES = "docs/wheel_sizes.json"
#: Where a configuration comes from: a wheel of modules holds one profile, and JIT has the rest.
PROFILES = ("core", "full")
JIT = "JIT"

#: A choice of rows for each key of ``[axes]``, of which all combinations are meant.
Product = tuple[tuple[str, ...], ...]


def targets(plan: Plan) -> str:
    """A row for each target: its GPUs, and the modules that a wheel of each CUDA major has."""
    majors = list(plan.build.cuda)
    rows = []
    for arch in plan.build.archs.values():
        counts = [len(plan.modules(profile, [arch])) for profile in PROFILES]
        cells = [" / ".join(map(str, counts)) if _compiles(m, arch) else "-" for m in majors]
        gpus = ", ".join(arch.serves)
        rows.append((f"`{arch.name}`", gpus, f"{arch.cuda[0]}.{arch.cuda[1]}", *cells))
    header = ("target", "compute capabilities", "toolkit from", *(f"CUDA {m}" for m in majors))
    return markup.table(header, rows)


def sizes(plan: Plan) -> str:
    """A row for each wheel that ci/wheel_sizes.py has measured, in the order of the targets."""
    kept = json.loads((ROOT / SIZES).read_text(encoding="utf-8"))
    order = list(plan.build.archs)
    rows = [
        (
            f"`{row['target']}`",
            str(row["cuda"]),
            row["machine"],
            f"`{row['profile']}`",
            str(row["modules"]),
            f"{row['wheel'] / 1e6:.1f}",
            f"{row['installed'] / 1e6:.1f}",
        )
        for row in sorted(kept, key=lambda row: order.index(row["target"]))
    ]
    return markup.table(
        ("target", "CUDA", "machine", "profile", "modules", "wheel, MB", "installed, MB"), rows
    )


def matrix(plan: Plan) -> str:
    """A row for each op: the CUDA majors for which its modules exist, for each target."""
    rows = [
        (f"`{op.name}`", *(_majors(plan, op, arch) for arch in plan.build.archs.values()))
        for op in plan.config.ops.values()
    ]
    return markup.table(("op", *plan.build.archs), rows)


def configurations(plan: Plan) -> str:
    """A row for each product of types and dimensions of an op, and where its modules come from."""
    rows = []
    for op in plan.config.ops.values():
        for source, points in sources(plan, op).items():
            for product in products(points):
                cells = (
                    f"`{axis.key}` {', '.join(words)}"
                    for axis, words in zip(op.space.axes, product)
                )
                served = f"`{source}`" if source != JIT else source
                rows.append((f"`{op.name}`", "; ".join(cells) or "one module for all", served))
    return markup.table(("op", "types and dimensions", "from"), rows)


def sources(plan: Plan, op: OpConfig) -> dict[str, list[tuple[str, ...]]]:
    """Every configuration of an op, below the smallest profile that prebuilds it, or below JIT."""
    found: dict[str, list[tuple[str, ...]]] = {name: [] for name in (*PROFILES, JIT)}
    prebuilt = {
        profile: [axes for name, axes in plan.aot_axes(profile) if name == op.name]
        for profile in PROFILES
    }
    for point in op.space.points():
        source = next((name for name in PROFILES if point in prebuilt[name]), JIT)
        found[source].append(_words(op, point))
    return found


def products(points: Sequence[tuple[str, ...]]) -> list[Product]:
    """``points`` as few products: (a, x), (a, y), (b, x), (b, y) are {a, b} times {x, y}."""
    if not points:
        return []
    tails: dict[str, list[tuple[str, ...]]] = {}
    for head, *tail in (point or ("",) for point in points):
        tails.setdefault(head, []).append(tuple(tail))
    heads: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for head, rest in tails.items():
        heads.setdefault(tuple(rest), []).append(head)
    return [
        (tuple(group), *product)
        for rest, group in heads.items()
        for product in (products(rest) if rest[0] else [()])
    ]


def _words(op: OpConfig, point: dict[str, AxisValue]) -> tuple[str, ...]:
    """A configuration as a word for each key of ``[axes]``, such as ``192/128``."""
    return tuple("/".join(axis_word(point[n]) for n in axis.names) for axis in op.space.axes)


def _majors(plan: Plan, op: OpConfig, arch: Arch) -> str:
    majors = [str(major) for major in plan.build.cuda if _compiles(major, arch)]
    return ", ".join(majors) if arch.name in op.archs else "-"


def _compiles(major: int, arch: Arch) -> bool:
    """Whether a toolkit of a CUDA major compiles for a target."""
    return arch.cuda[0] <= major


def made(page: str, plan: Plan) -> str:
    """The page's text with the tables as they should be."""
    for name, table in (
        ("targets", targets(plan)),
        ("sizes", sizes(plan)),
        ("matrix", matrix(plan)),
        ("configurations", configurations(plan)),
    ):
        page = markup.with_block(page, name, table)
    return page


if __name__ == "__main__":
    path = ROOT / PAGE
    before = path.read_text(encoding="utf-8")
    after = made(before, Plan.load(ROOT))
    if after != before:
        path.write_text(after, encoding="utf-8")
        print(PAGE)
