# SPDX-License-Identifier: Apache-2.0
"""Test on the CPU which bits of custom masks and of draft masks attention reads.

``attention_masks.cpp`` calls the same functions as the kernels.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from build_support import run, some
from test_attention_schedule import SANITIZED, broken, compiled

SOURCE = Path(__file__).with_name("attention_masks.cpp")
CASES = 2000
RIGHT = "all bits are right\n"


def test_every_bit(tmp_path: Path) -> None:
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    flags = (*SANITIZED, "-fsanitize=address")
    assert run([compiled(tmp_path, *flags, source=SOURCE), CASES, seed]) == RIGHT


# Each change reads another bit, or one that is not there.
BROKEN = {
    "the row of a query": ("int64_t(work.q_begin + q_idx) * p.m", "int64_t(q_idx) * p.m"),
    "the first draft": ("first_token_ = work.kv_len - work.q_len;", "first_token_ = 0;"),
    "tokens before the drafts": ("(bit & 7)) | before;", "(bit & 7));"),
    "the last bits of a word": ("i < 5", "i < 4"),
    "the first bit of a word": (">> (bit & 7)", ""),
    "the end of a row": ("end_bit_ = int64_t(p.mask_row_bytes) * 8;", "end_bit_ = 1 << 30;"),
    "the row of a request": ("int64_t(q_idx) * work.kv_len", "int64_t(q_idx) * work.q_len"),
    "the end of the mask": ("first_byte < 0 ? 0 : (p.mask_bytes - first_byte) * 8", "1 << 30"),
}


@pytest.mark.parametrize("what", some(BROKEN))
def test_the_program_finds_what_is_broken(what: str, tmp_path: Path) -> None:
    include = broken(tmp_path, *BROKEN[what])
    flags = ("-w", *SANITIZED, "-fsanitize=address")
    program = compiled(tmp_path, *flags, include=include, source=SOURCE)
    assert RIGHT not in run([program, CASES, 1], fails=True)
