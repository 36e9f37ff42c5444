# SPDX-License-Identifier: Apache-2.0
"""Kernels against the references of their definitions, and dumps around graphs and compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from code_params import E5M2_PARAM
from gpu_cases import CASES

from precast.testing import Tolerance, assert_close
from precast.testing.tolerances import tolerance, tolerance_of_attention
from precast.trace import TraceTemplate, fi_trace, make_inputs, registered

PAIRS = registered()
#: Tensor cores keep 14 bits of a sum of products of e4m3, of which an error of the last two shows
#: where a sum cancels.
BITS_OF_FP8_SUMS = 2.0**-13
#: What a sum of mono_moe changes by where an activation is so near the middle of two codes of e4m3
#: that the last bits of the sum before decide.
ONE_CODE = 2.0**-6
#: Sums of 7168 products of numbers near 1, in another order than the reference's.
LONG_SUMS = {"mm_M1_16_K7168_N256": Tolerance(1e-5, 2e-4)}


@pytest.mark.parametrize(
    ("function", "template"),
    [
        pytest.param(
            function,
            template,
            id=template.name_prefix,
            marks=E5M2_PARAM.marks if template.name_prefix.endswith("e5m2") else (),
        )
        for function, template in PAIRS
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_kernel_gives_what_its_definition_says(
    function: Callable[..., Any], template: TraceTemplate, dtype: torch.dtype
) -> None:
    call = make_inputs(function, template, dtype=dtype, device="cuda", seed=5)
    definition = fi_trace(function, **call)
    names: dict[str, Any] = {}
    exec(definition["reference"], names)
    wanted = names["run"](*template.values(call))
    result = function(**call)
    got = template.results(call, result)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for name, mine, expected in zip(template.outputs, got, wanted, strict=True):
        of_mla = template.name_prefix.startswith(("mla_paged", "trtllm_mla", "xqa_mla"))
        of_attention = of_mla or template.op_type.startswith(("gqa_", "block_sparse_attention"))
        # Kernels write the dtype of queries, which is copied where outputs have another.
        written = dtype if of_attention and name == "output" else mine.dtype
        row = (tolerance_of_attention if of_attention else tolerance)(written)
        limits = LONG_SUMS.get(template.name_prefix, row)
        largest = expected.float().abs().max().item() if expected.numel() > 0 else 0.0
        if template.op_type == "gemm_fp8":
            limits = Tolerance(row.rtol, BITS_OF_FP8_SUMS * largest)
        elif template.op_type == "moe":
            # Sums of what was rounded twice before, which cancel.
            limits = Tolerance(2 * row.rtol, row.rtol * largest)
            if template.name_prefix == "mono_moe":
                limits = Tolerance(limits.rtol, ONE_CODE * largest)
        elif of_mla:
            # Scales of tokens make values of any size; queries beside e4m3 are rounded to f16.
            rounded = 2.0**-11 if "fp8" in template.name_prefix else 0.0
            rtol = max(row.rtol, rounded)
            limits = Tolerance(rtol, rtol * max(1.0, largest))
        assert_close(mine, expected, name=f"{template.name_prefix}: {name}", **limits._asdict())


def run(folder: Path, *argv: str) -> None:
    environment = {**os.environ, "PRECAST_TRACE_DUMP": "1", "PRECAST_TRACE_DUMP_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *argv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is not written" not in done.stderr


def definitions(folder: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in (folder / "definitions").rglob("*.json")]
    return {definition["name"]: definition for definition in found}


def test_calls_that_are_captured_are_dumped(tmp_path: Path) -> None:
    run(tmp_path, str(Path(__file__).with_name("capture_first_call.py")))
    tags = {
        definition["tags"][0].rpartition(".")[2] for definition in definitions(tmp_path).values()
    }
    assert tags == set(CASES)


def test_calls_that_are_compiled_are_dumped(tmp_path: Path) -> None:
    code = """
import torch, precast

@torch.compile(fullgraph=True)
def block(x, w):
    return precast.silu_and_mul(precast.rmsnorm(x, w)) + 1

w = torch.ones(512, device="cuda", dtype=torch.bfloat16)
for batch in (4, 5, 6):
    out = block(torch.ones(batch, 512, device="cuda", dtype=torch.bfloat16), w)
    torch.testing.assert_close(out, torch.full_like(out, 1.7311))  # No eager call writes them.
"""
    run(tmp_path, "-c", code)
    assert set(definitions(tmp_path)) == {"rmsnorm_h512", "silu_and_mul_i256"}
