# SPDX-License-Identifier: Apache-2.0
"""docs/support.md has the tables that ``aot_configs/`` gives."""

from __future__ import annotations

import itertools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from ci_support import script
from cli_support import core_specs
from small_wheels import make_provider

from precast._plan.planner import Plan

ROOT = Path(__file__).resolve().parents[3]
PLAN = Plan.load(ROOT)


@pytest.fixture
def support(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import support

    return support


def expanded(products: list[tuple[tuple[str, ...], ...]]) -> Iterator[tuple[str, ...]]:
    for product in products:
        yield from itertools.product(*product)


def test_the_page_is_made_from_the_plan(support):
    page = (ROOT / support.PAGE).read_text(encoding="utf-8")
    assert page == support.made(page, PLAN), "Fix: make generate"


@pytest.mark.parametrize("op", PLAN.config.ops.values(), ids=lambda op: op.name)
def test_the_rows_of_an_op_are_its_configurations_each_once(support, op):
    sources = support.sources(PLAN, op)
    shown = [p for points in sources.values() for p in expanded(support.products(points))]
    legal = [
        tuple("/".join(str(point[name]) for name in axis.names) for axis in op.space.axes)
        for point in op.space.points()
    ]
    assert sorted(shown) == sorted(point or ("",) for point in legal)
    names = {axes_name(point) for op_name, point in PLAN.aot_axes("full") if op_name == op.name}
    prebuilt = [p for source in support.PROFILES for p in sources[source]]
    assert len(prebuilt) == len(names)
    assert len(sources["core"]) == sum(op.name == name for name, _ in PLAN.aot_axes("core"))


def axes_name(point: dict[str, object]) -> str:
    return repr(sorted(point.items()))


@pytest.mark.parametrize(
    ("points", "products"),
    [
        (["ax", "ay", "bx", "by"], [("ab", "xy")]),
        (["ax", "bx", "by"], [("a", "x"), ("b", "xy")]),
        (["axp", "axq", "ayp", "ayq", "bxp"], [("a", "xy", "pq"), ("b", "x", "p")]),
        (["a", "b"], [("ab",)]),
        ([], []),
    ],
)
def test_points_become_few_products(support, points, products):
    want = [tuple(map(tuple, product)) for product in products]
    assert support.products([tuple(point) for point in points]) == want


def test_what_one_target_or_one_cuda_lacks_is_marked(support, tree):
    scale = tree / "aot_configs" / "scale.toml"
    scale.write_text(re.sub(r"^archs = .*$", 'archs = ["sm90a"]', scale.read_text(), flags=re.M))
    plan = Plan.load(tree)
    names = list(plan.build.archs)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", support.matrix(plan), re.MULTILINE))
    cells = dict(zip(names, rows["scale"].split(" | ")))
    assert cells.pop("sm90a") == "12, 13"
    assert set(cells.values()) == {"-"}
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", support.targets(plan), re.MULTILINE))
    only_13 = [name for name, arch in plan.build.archs.items() if arch.cuda[0] == 13]
    assert only_13 == [name for name, row in rows.items() if row.split(" | ")[-2] == "-"]
    assert only_13


def test_the_sizes_are_those_of_wheels(support, tmp_path, monkeypatch):
    wheel_sizes = script("wheel_sizes")
    kept = tmp_path / "sizes.json"
    wheels = [make_provider(tmp_path / "dist", tmp_path, arch) for arch in ("sm90a", "sm80")]
    for _ in range(2):  # A second measurement replaces the first.
        assert wheel_sizes.main([*map(str, wheels), "-o", str(kept)]) == 0
    rows = wheel_sizes.read(kept)
    assert [row.target for row in rows] == ["sm80", "sm90a"]
    for row, wheel in zip(rows, reversed(wheels), strict=True):
        assert row.modules == len(core_specs(row.target))
        assert row.wheel == wheel.stat().st_size
        with zipfile.ZipFile(wheel) as archive:
            files = [i.file_size for i in archive.infolist() if i.filename.endswith(".so")]
        assert row.installed == sum(files) > 0
    monkeypatch.setattr(support, "SIZES", kept)
    table = support.sizes(PLAN)
    assert [line.split("`")[1] for line in table.splitlines()[2:] if "`" in line] == [
        "sm80",
        "sm90a",
    ]
