# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_sglang.py: what it counts in the processes of an engine, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_support import BENCHMARKS, benchmarks

__all__ = ["benchmarks"]

#: A worker as SGLang starts it: spawned, so that it imports the main module, and killed at the end.
WORKER = """
import multiprocessing, os, signal, subprocess, sys
from pathlib import Path
import precast.flashinfer
precast.flashinfer.install()
import _sglang_engine as engine
if __name__ == "__mp_main__":
    engine.watch(Path(os.environ[engine.COUNTS]), is_ours=True)


def work():
    import torch, precast
    from flashinfer import trtllm_fp4_block_scale_moe
    from flashinfer.sampling import top_k_top_p_sampling_from_probs as sample
    subprocess.run([sys.executable, "-c", ""])
    with precast.reference_mode():
        for _ in range(3):
            sample(torch.ones(2, 4) / 4, torch.tensor([2, 2]), 0.5, filter_apply_order="joint")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    os.environ[engine.COUNTS] = sys.argv[1]
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
    print(worker.exitcode)
"""


def test_calls_of_a_killed_worker_are_counted(benchmarks: Any, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\n{WORKER}")
    argv = [sys.executable, str(script), str(tmp_path / "counts")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "-9", done.stderr
    counts = benchmarks("_sglang_engine").Counts
    assert counts(tmp_path / "counts" / "calls").totals() == {"top_k_top_p_sampling_from_probs": 3}
    assert counts(tmp_path / "counts" / "programs").totals()[Path(sys.executable).name] == 1


def test_ranks_are_places_among_the_likeliest_tokens(benchmarks: Any) -> None:
    engine = benchmarks("_sglang_engine")
    likeliest = [(-0.1, 7, None), (-0.2, 5, None)]
    output = {
        "output_ids": [5, 7, 9],
        "meta_info": {"output_top_logprobs": [likeliest, likeliest, likeliest]},
    }
    assert engine.ranks_of(output) == [2, 1, 3]
    assert engine.steps_of(output)[0] == {"7": -0.1, "5": -0.2}


@pytest.mark.parametrize(
    ("change", "wrong", "said"),
    [
        ({}, [], None),
        ({"attention": ["triton"]}, [], "attention is"),
        ({"calls": {}}, [], "was not called"),
        ({"cached_tokens": 0}, [], "prefix"),
        ({"ranks": {"top_k": [[1]], "both": [[26]]}}, [], "both: a token of rank 26"),
        ({}, [{"prompt": 3}], "1 prompts have a wrong token"),
    ],
)
def test_run_that_did_not_use_precast_fails(
    benchmarks: Any, change: dict[str, Any], wrong: list[Any], said: str | None
) -> None:
    bench, engines = benchmarks("bench_sglang"), benchmarks("_engines")
    (pair,) = bench.pairs(["auto"], None)
    good = {
        "attention": ["flashinfer"],
        "compilers": {"nvcc": 1},  # SGLang compiles kernels of its own
        "calls": dict.fromkeys(bench.CALLED, 1),
        "cached_tokens": 16,
        "ranks": {"top_k": [[1, 20]], "both": [[25]]},
    }
    found = [*engines.problems(bench.ENGINE, pair, {**good, **change}, {"wrong": wrong})]
    assert bool(found) == (said is not None)
    assert all(said in line for line in found if said)


def test_both_engines_have_the_same_options_but_for_what_is_compared(benchmarks: Any) -> None:
    engine = benchmarks("_sglang_engine")
    asked = {
        "model": "m",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "max_model_len": 4096,
        "requests": 32,
        "chunk": 512,
    }
    ours, other = (engine.engine_options({**asked, "backend": b}) for b in ("flashinfer", "triton"))
    assert {key for key in ours if ours[key] != other[key]} == {
        "attention_backend",
        "sampling_backend",
    }


def test_an_answer_counts_again_only_for_the_same_options(benchmarks: Any, tmp_path: Path) -> None:
    engines = benchmarks("_engines")
    asked = {"backend": "triton", "kv_cache_dtype": "auto", "decode": "own", "tokens": 64}
    place = {"model": "here", "caches": "there"}
    assert engines.answer_in(tmp_path, {**asked, **place}) is None
    name = engines.name_of(asked)
    (tmp_path / f"{name}.options.json").write_text(json.dumps({**asked, **place}))
    assert engines.answer_in(tmp_path, asked) is None
    (tmp_path / f"{name}.json").write_text('{"greedy": [[1]]}')
    other_places = {"model": "elsewhere", "caches": "elsewhere"}
    assert engines.answer_in(tmp_path, {**asked, **other_places}) == {"greedy": [[1]]}
    assert engines.answer_in(tmp_path, {**asked, **place, "tokens": 32}) is None
