# SPDX-License-Identifier: Apache-2.0
"""Test on the CPU what the descriptors of wgmma say, against the fields of the PTX ISA."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from build_support import run, some
from test_attention_schedule import HEADERS, SANITIZED, compiled

SOURCE = Path(__file__).with_name("wgmma_descriptor.cpp")
RIGHT = "all descriptors are right\n"


def test_every_field_and_element(tmp_path: Path) -> None:
    assert run([compiled(tmp_path, *SANITIZED, source=SOURCE)]) == RIGHT


BROKEN = {
    "bits of the address": ("address & 0x3ffff", "address & 0x1ffff"),
    "its unit": ("0x3ffff) >> 4", "0x3ffff)"),
    "the place of the leading offset": ("<< 16", "<< 14"),
    "the place of the stride offset": ("<< 32", "<< 30"),
    "the swizzle": ("bytes == 128 ? 1", "bytes == 128 ? 2"),
    "that of short rows": ("bytes == 64 ? 2 : 3", "bytes == 64 ? 3 : 2"),
    "the swizzle without words": ("int swizzle_bytes = 128", "int swizzle_bytes = 64"),
    "which offset is which": (
        "uint64_t(panel_step >> 4) << 16 |\n         uint64_t(step >> 4)",
        "uint64_t(step >> 4) << 16 |\n         uint64_t(panel_step >> 4)",
    ),
}


@pytest.mark.parametrize("what", some(BROKEN))
def test_the_program_finds_what_is_broken(what: str, tmp_path: Path) -> None:
    include = tmp_path / "include"
    shutil.copytree(HEADERS / "precast" / "core", include / "precast" / "core")
    header, (right, wrong) = include / "precast/core/sm90/warpgroup.cuh", BROKEN[what]
    text = header.read_text()
    assert text.count(right) == 1
    header.write_text(text.replace(right, wrong))
    program = compiled(tmp_path, "-w", include=include, source=SOURCE)
    assert RIGHT not in run([program], fails=True)
