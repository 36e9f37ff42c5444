# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_vllm.py: what it counts as equal, as a tie and as wrong, without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_support import BENCHMARKS, benchmarks

__all__ = ["benchmarks"]

COUNT = """
import sys
sys.path.insert(0, {folder!r})
import torch
import precast, precast.flashinfer
precast.flashinfer.install()
import _vllm_engine as engine
programs, calls = engine.count_programs(), engine.count_calls()
from flashinfer import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.decode import fast_decode_plan, trtllm_batch_decode_with_kv_cache
import flashinfer.sampling
import subprocess
subprocess.run([sys.executable, "-c", ""])
with precast.reference_mode():
    w = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024).byte())
    one = torch.tensor([0, 1], dtype=torch.int32)
    w.plan(one, one[:1], one[1:], 1, 1, 64, 1, q_data_type="float32")
    w.run(torch.zeros(1, 1, 64), torch.zeros(1, 2, 1, 1, 64))
    flashinfer.sampling.top_p_sampling_from_probs(torch.ones(2, 4) / 4, 0.5)
print(sum(programs.values()), sorted(calls.items()))
"""


def answer(greedy: list[list[int]], logprobs: list[list[dict[str, float]]]) -> dict[str, Any]:
    return {"greedy": greedy, "logprobs": logprobs}


def test_tokens_are_compared_up_to_the_first_difference(benchmarks: Any) -> None:
    compare = benchmarks("bench_vllm").compare
    sure = {"1": -0.1, "2": -5.0}
    near = {"3": -0.7, "4": -0.9}
    other = answer([[1, 3, 1], [1, 1, 1], [3, 1, 1]], [[sure, near, sure], [sure] * 3, [near] * 3])
    ours = answer([[1, 4, 9], [1, 2, 9], [3, 1, 1]], [])
    other["logprobs"][2][1:] = [sure, sure]
    found = compare(ours, other, tie=0.5)
    assert (found["tokens"], found["equal"], found["ties"]) == (9, 1 + 1 + 3, 1)
    assert [(w["prompt"], w["token"]) for w in found["wrong"]] == [(1, 1)]


def test_token_that_the_other_engine_does_not_list_is_wrong(benchmarks: Any) -> None:
    compare = benchmarks("bench_vllm").compare
    found = compare(answer([[7]], []), answer([[1]], [[{"1": -0.1, "2": -0.2}]]), tie=100.0)
    assert len(found["wrong"]) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"attention": ["TRITON_ATTN"]}, "attention is"),
        ({"compilers": {"nvcc": 1}}, "compilers ran"),
        ({"compilers": {"ptxas": 1}}, None),
        ({"cached_tokens": 0}, "prefix"),
        ({"ranks": {"top_k": [[27]], "both": [[1]]}}, "rank 27"),
        ({"calls": {}}, "was not called"),
    ],
)
def test_run_that_did_not_use_precast_fails(
    benchmarks: Any, change: dict[str, Any], said: str | None
) -> None:
    called = (
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "trtllm_batch_decode_with_kv_cache",
        "top_k_sampling_from_probs",
        "top_p_sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
    )
    good = {
        "attention": ["FLASHINFER"],
        "calls": dict.fromkeys(called, 1),
        "compilers": {},
        "cached_tokens": 16,
        "ranks": {"top_k": [[1, 20]], "both": [[3]]},
    }
    found = [*benchmarks("bench_vllm").problems({**good, **change}, {"wrong": []}, "xqa")]
    assert bool(found) == (said is not None)
    assert all(said in line for line in found if said)


def test_prompts_share_starts_and_weights_have_one_seed(benchmarks: Any) -> None:
    model = benchmarks("_vllm_model")
    drawn = model.prompts(1, 100, 1000)
    assert [len(p) for p in drawn] == [min(n, 1000) for n in model.LENGTHS]
    assert drawn[-1][:500] == drawn[-3][:500] != drawn[-2][:500]
    assert drawn == model.prompts(1, 100, 1000) != model.prompts(2, 100, 1000)


def test_calls_of_flashinfer_and_programs_are_counted() -> None:
    script = COUNT.format(folder=str(BENCHMARKS))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    counted = done.stdout.strip().splitlines()[-1]
    assert counted == (
        "1 [('BatchDecodeWithPagedKVCacheWrapper.plan', 1), "
        "('BatchDecodeWithPagedKVCacheWrapper.run', 1), ('top_p_sampling_from_probs', 1)]"
    )


def test_error_of_an_engine_names_no_folder(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = benchmarks("bench_vllm")
    script = tmp_path / "engine.py"
    script.write_text("import sys; sys.exit('no file /srv/models/x.bin')")
    monkeypatch.setattr(bench, "ENGINE", script)
    asked = {"backend": "A", "kv_cache_dtype": "auto", "decode": "own", "caches": str(tmp_path)}
    assert bench.run_engine(asked, tmp_path) == {"error": "A-auto-own: no file $DIR/x.bin"}
    assert (tmp_path / "A-auto-own.log").read_text() == "no file /srv/models/x.bin\n"
