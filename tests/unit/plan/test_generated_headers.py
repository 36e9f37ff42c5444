# SPDX-License-Identifier: Apache-2.0
"""The committed headers are those that the plan makes, and every change of a fact changes them."""

from __future__ import annotations

import re

import pytest

from precast._plan import generate
from precast._plan.places import source_root
from precast._plan.planner import Plan

ROOT = source_root()
HEADERS = generate.headers(Plan.load(ROOT))
TILES = "include/precast/attention/tile_traits.cuh"
TARGETS = "include/precast/core/target_traits.cuh"


@pytest.mark.parametrize("path", HEADERS)
def test_a_generated_header_is_up_to_date(path):
    assert (ROOT / path).read_text(encoding="utf-8") == HEADERS[path], "Fix: make generate"


def test_every_header_that_says_it_is_generated_is():
    mark = re.compile(re.escape(generate.MARK).replace(re.escape("{sources}"), r"\S+"))
    marked = {
        path.relative_to(ROOT).as_posix()
        for folder in ("include", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and mark.search(path.read_text(encoding="utf-8"))
    }
    assert marked == set(HEADERS)


@pytest.mark.parametrize(
    ("file", "old", "new", "path", "text"),
    [
        ("attention", "block_m = [16, 64]", "block_m = [16, 32]", TILES, "{64, 64, 32, 0},"),
        ("attention", "min_shared_kib = 128", "min_shared_kib = 96", TILES, "{256, 256, 128, 96},"),
        ("attention", "  [80, 80],\n", "  [72, 72],\n", TILES, "{72, 72, 16, 0},"),
        ("attention", "max_head_dim_v = 256", "max_head_dim_v = 128", TILES, "kMaxHeadDimV = 128;"),
        ("build", "shared_kib = 163", "shared_kib = 164", TARGETS, "kSharedKibPerCta = 164;"),
    ],
)
def test_a_change_of_a_fact_changes_its_header_alone(tree, file, old, new, path, text):
    config = tree / "aot_configs" / f"{file}.toml"
    before = config.read_text().partition("[[aot]]")[0]  # may name what the change takes away
    if "72" in new:
        before = before.replace("[80, 80], ", "")
    assert old in before
    config.write_text(before.replace(old, new, 1))
    assert text not in (tree / path).read_text()
    assert generate.main(["--root", str(tree)]) == 0
    assert text in (tree / path).read_text()
    others = set(HEADERS) - {path}
    assert {other for other in others if (tree / other).read_text() != HEADERS[other]} == set()
    # A second run writes nothing.
    written = (tree / path).stat().st_mtime_ns
    assert generate.main(["--root", str(tree)]) == 0
    assert (tree / path).stat().st_mtime_ns == written
