# SPDX-License-Identifier: Apache-2.0
"""Test the plan and the tile scheduler of attention on the CPU, with thousands of random batches.

``attention_schedule.cpp`` calls the same functions as the kernels: every tile is covered once, in
splits whose partial results and counters fit together; CTAs get equal shares; and splits of a fixed
size do not depend on the rest of the batch. ``attention_limits.cpp`` has lengths that are garbage,
and plans that were made for another call.
"""

from __future__ import annotations

import os
from pathlib import Path

import host_programs
import pytest
from build_support import EVERYTHING, run, some
from host_programs import HEADERS, SANITIZED

SOURCE = Path(__file__).with_name("attention_schedule.cpp")
LIMITS = SOURCE.with_name("attention_limits.cpp")
CASES = 3000
#: Of the batches that differ in every run; they take most of the time.
RANDOM_CASES = CASES if EVERYTHING else 1000


def compiled(folder: Path, *flags: str, include: Path = HEADERS, source: Path = SOURCE) -> Path:
    return host_programs.compiled(folder, source, *flags, include=include)


def test_random_batches(tmp_path: Path) -> None:
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    program = compiled(tmp_path, *SANITIZED)
    printed = run([program, RANDOM_CASES, seed]).splitlines()[-1]
    words = printed.replace(",", "").replace(":", "").split()
    names = "stream_k", "static", "by_tiles", "split"
    stream_k, static, by_tiles, split = (int(words[words.index(name) - 1]) for name in names)
    assert stream_k + static + by_tiles == RANDOM_CASES, printed
    assert min(stream_k, static, split) > RANDOM_CASES // 10, printed
    assert by_tiles > RANDOM_CASES // 100, printed


# Each change breaks the header at a point that one check of the program is for.
BROKEN = {
    "the number of splits": (
        "partition.first_cta_at(until) - first + 1",
        "partition.first_cta_at(until) - first",
    ),
    "the first CTA": ("/ kBlockCost) + 1, first - 1,", "/ kBlockCost) + 1, first,"),
    "partial results": ("work.partial_skip = 1;", "work.partial_skip = 0;"),
    "split counters": (
        "partial_skip > 0 ? num_splits - 1 : 1",
        "partial_skip > 0 ? num_splits : 1",
    ),
    "the window": (
        "quotient(first_row, shape.group_size) - shape.window_left",
        "first_row - shape.window_left",
    ),
    "fixed splits": ("int64_t(range.begin / split_size) + split_idx", "int64_t(split_idx)"),
    "the order of a round": ("ctas - 1 - place", "place + 1"),
    "the heads of a swizzled block": (
        "entry_idx = first + rest - work",
        "entry_idx = rest - work",
    ),
    "the entries that are not swizzled": ("entry_idx += num_swizzled;", ""),
    "the swizzle": ("is_even && shape.block_m > kDecodeBlockM", "false"),
    "the balance of stream-K": (
        "return Cost(cta) >= ctas ? total_cost : total_cost * cta / ctas;",
        "return Cost(cta) < ctas / 2 ? 0 : total_cost;",
    ),
    "tiles that run at the same time": (
        "if (ctas > neighbours) ctas -= ctas % neighbours;",
        "",
    ),
    "the order of tiles": ("start.m_block = low / totals.num_requests;", "start.m_block = 0;"),
    "the balance of whole tiles": ("ctas - 1 - place)", "place)"),
}


@pytest.mark.parametrize("what", some(BROKEN))
def test_the_program_finds_what_is_broken(what: str, tmp_path: Path) -> None:
    include = broken(tmp_path, *BROKEN[what])
    program = compiled(tmp_path, "-w", "-O0", include=include)
    assert "case" in run(["timeout", "60", program, CASES, 1], fails=True)


def broken(folder: Path, right: str, wrong: str) -> Path:
    """Copy the headers, with one place of them changed."""
    include, found = folder / "include", 0
    for header in HEADERS.glob("precast/attention/*.cuh"):
        text = header.read_text()
        copy = include / header.relative_to(HEADERS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        found += text.count(right)
        copy.write_text(text.replace(right, wrong))
    assert found == 1, f"{right!r} is not in the headers once"
    core = include / "precast" / "core"
    core.symlink_to(HEADERS / "precast" / "core")
    return include


def test_limits(tmp_path: Path) -> None:
    run([compiled(tmp_path, *SANITIZED, source=LIMITS)])


# Each change removes one of the checks that keep garbage from doing harm.
LOST = {
    "the shape": ("return fits & (differ == 0);", "return fits;"),
    "the split workspace": ("fits = num_partials <= max_partials;", "fits = true;"),
    "the end": (
        "ends_here ? at_.n_block >= end_n_block_ : is_past_end()",
        "ends_here && at_.n_block == end_n_block_",
    ),
    "the longest request": ("kMaxKvLen = 1 << 30", "kMaxKvLen = 0x7fffffff"),
    "costs that fit": (" || totals.cost > kMaxStreamKCost", ""),
    "the first query": ("planned.q_begin < 0 || q_len < 0 ?", "q_len < 0 ?"),
    "packed rows": (
        "if (int64_t(planned.q_len) * group_size > 0x7fffffff)",
        "if (group_size == 0)",
    ),
}


@pytest.mark.parametrize("what", some(LOST))
def test_a_lost_check_is_noticed(what: str, tmp_path: Path) -> None:
    include = broken(tmp_path, *LOST[what])
    program = compiled(tmp_path, "-w", *SANITIZED, include=include, source=LIMITS)
    run(["timeout", "60", program], fails=True)
