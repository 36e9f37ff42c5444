# SPDX-License-Identifier: Apache-2.0
"""The plan and the walk of attention kernels on the CPU: thousands of random batches.

``attention_schedule.cpp`` runs them through the same functions as the kernels: every tile is
covered once, in parts whose slots and counters agree; CTAs have equal shares; and where parts are
asked for that do not depend on the batch, they do not. ``attention_limits.cpp`` has lengths that
are garbage, and plans of other calls.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from build_support import ROOT, run

from precast._jit.toolchain import find_toolchain

SOURCE = Path(__file__).with_name("attention_schedule.cpp")
LIMITS = SOURCE.with_name("attention_limits.cpp")
SANITIZED = "-fsanitize=undefined", "-fno-sanitize-recover=all"
HEADERS = ROOT / "include"
CASES = 3000


def compiled(folder: Path, *flags: str, include: Path = HEADERS, source: Path = SOURCE) -> Path:
    program = folder / source.stem
    compiler = find_toolchain().host_compiler
    words = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{include}", *flags]
    run([compiler, *words, "-o", program, source])
    return program


def test_random_batches(tmp_path: Path) -> None:
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    program = compiled(tmp_path, *SANITIZED)
    said = run([program, CASES, seed]).splitlines()[-1]
    words = said.replace(",", "").replace(":", "").split()
    streams, lists, cuts = (int(words[words.index(w) - 1]) for w in ("streams", "lists", "with"))
    assert streams + lists == CASES, said
    assert min(streams, lists, cuts) > CASES // 10, said


# Each breaks what one check of the program is for.
BROKEN = {
    "the number of parts": ("cuts.first_at(until) - first + 1", "cuts.first_at(until) - first"),
    "the first CTA": ("/ kBlockCost) + 1, first - 1,", "/ kBlockCost) + 1, first,"),
    "slots": ("piece.slot_skip = 1;", "piece.slot_skip = 0;"),
    "counters": ("slot_skip > 0 ? parts - 1 : 1", "slot_skip > 0 ? parts : 1"),
    "the window": (
        "quotient(first_row, shape.group) - shape.window_left",
        "first_row - shape.window_left",
    ),
    "chunks": ("int64_t(tokens.begin / chunk) + part", "int64_t(part)"),
    "the order of a round": ("ctas - 1 - place", "place + 1"),
    "the heads of a block": ("number = first + rest - piece", "number = rest - piece"),
    "what follows the blocks": ("number += in_blocks;", ""),
    "blocks": ("is_even && shape.tile_rows > kNarrowRows", "false"),
    "balance": (
        "return cta >= ctas ? total : total * cta / ctas;",
        "return cta < ctas / 2 ? 0 : total;",
    ),
    "balance of a list": ("ctas - 1 - place)", "place)"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_program_sees_what_is_broken(what: str, tmp_path: Path) -> None:
    include = broken(tmp_path, *BROKEN[what])
    program = compiled(tmp_path, "-w", "-O0", include=include)
    assert "case" in run(["timeout", "60", program, CASES, 1], fails=True)


def broken(folder: Path, right: str, wrong: str) -> Path:
    """The headers, with one of them changed."""
    include, found = folder / "include", 0
    for header in HEADERS.glob("precast/attention_[pst]*.cuh"):
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


# What keeps garbage from doing harm, taken away piece by piece.
LOST = {
    "the shape": ("return fits & (differ == 0);", "return fits;"),
    "the slots": ("header.slots <= slots;", "true;"),
    "the end": (
        "ends_here ? at_.block >= end_block_ : is_behind_end()",
        "ends_here && at_.block == end_block_",
    ),
    "the most tokens": ("kMostTokens = 1 << 30", "kMostTokens = 0x7fffffff"),
    "costs that fit": (" || sums.cost > kMostStreamed", ""),
    "the first query": ("to.q_begin < 0 || q_len < 0 ?", "q_len < 0 ?"),
    "packed rows": ("if (int64_t(to.q_len) * group > 0x7fffffff)", "if (group == 0)"),
}


@pytest.mark.parametrize("what", LOST)
def test_what_is_lost_shows(what: str, tmp_path: Path) -> None:
    include = broken(tmp_path, *LOST[what])
    program = compiled(tmp_path, "-w", *SANITIZED, include=include, source=LIMITS)
    run(["timeout", "60", program], fails=True)
