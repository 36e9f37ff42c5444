# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_vllm.py: what it counts as equal, as a tie and as wrong, without an engine."""

from __future__ import annotations

import json
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
    compare = benchmarks("_engines").compare
    sure = {"1": -0.1, "2": -5.0}
    near = {"3": -0.7, "4": -0.9}
    other = answer([[1, 3, 1], [1, 1, 1], [3, 1, 1]], [[sure, near, sure], [sure] * 3, [near] * 3])
    ours = answer([[1, 4, 9], [1, 2, 9], [3, 1, 1]], [])
    other["logprobs"][2][1:] = [sure, sure]
    found = compare(ours, other, tie=0.5)
    assert (found["tokens"], found["equal"], found["ties"]) == (9, 1 + 1 + 3, 1)
    assert [(w["prompt"], w["token"]) for w in found["wrong"]] == [(1, 1)]


def test_token_that_the_other_engine_does_not_list_is_wrong(benchmarks: Any) -> None:
    compare = benchmarks("_engines").compare
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
    bench, engines = benchmarks("bench_vllm"), benchmarks("_engines")
    (pair,) = bench.pairs(["auto"], ["xqa"], None)
    good = {
        "attention": ["FLASHINFER"],
        "calls": dict.fromkeys((*bench.CALLED, "trtllm_batch_decode_with_kv_cache"), 1),
        "compilers": {},
        "cached_tokens": 16,
        "ranks": {"top_k": [[1, 20]], "both": [[3]]},
    }
    found = [*engines.problems(bench.ENGINE, pair, {**good, **change}, {"wrong": []})]
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


def test_error_of_an_engine_names_no_folder(benchmarks: Any, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text("import sys; sys.exit('no file /srv/models/x.bin')")
    asked = {"backend": "A", "kv_cache_dtype": "auto", "decode": "own", "caches": str(tmp_path)}
    found = benchmarks("_engines").run_engine(asked, tmp_path, script)
    assert found == {"error": "A-auto-own: no file $DIR/x.bin"}
    assert (tmp_path / "A-auto-own.log").read_text() == "no file /srv/models/x.bin\n"


#: An engine that answers at once, and fails with a cache in FP8.
STUB = """
import json, sys
asked = json.load(open(sys.argv[1]))
print("an engine with", asked["backend"])
if asked["kv_cache_dtype"] == "fp8":
    sys.exit("no such cache")
step = {"1": -0.1, "2": -3.0}
json.dump({
    "vllm": "0.0", "backend": asked["backend"], "attention": [asked["backend"]],
    "greedy": [[1, 1]], "again": [[1, 1]], "logprobs": [[step, step]],
    "seconds": {"start": 2.0}, "tokens_per_second": [10.0, 20.0],
    "cached_tokens": 16, "prompt_tokens": 99, "compilers": {},
    "calls": dict.fromkeys(asked["called"], 1),
    "ranks": {"top_k": [[1]], "both": [[1]]},
}, open(sys.argv[2], "w"))
"""


def test_pairs_of_engines_are_measured_and_a_failure_stops_nothing(
    benchmarks: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench, engines = benchmarks("bench_vllm"), benchmarks("_engines")
    script = tmp_path / "engine.py"
    script.write_text(STUB)
    monkeypatch.setattr(engines.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engines, "environment", lambda *args: {"gpu": "Test GPU", "commit": "abc"})
    monkeypatch.setattr(engines, "write_checkpoint", lambda folder: folder)
    ran = []

    def run(options: dict[str, Any], *rest: Any) -> dict[str, Any]:
        ran.append(engines.name_of(options))
        called = [*bench.CALLED, bench.DECODES.get(options["decode"], "")]
        return run_engine({**options, "called": called}, *rest)

    run_engine = engines.run_engine
    monkeypatch.setattr(engines, "run_engine", run)
    json_file = tmp_path / "vllm.json"
    monkeypatch.setattr(bench, "ENGINE", bench.ENGINE._replace(script=script))
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--json", str(json_file), "--decode", "xqa", "--decode", "wrapper"])
    assert stopped.value.code == 1
    # The other engine of a cache runs once, whatever it is compared with.
    assert ran == [
        *("FLASH_ATTN-auto-own", "FLASHINFER-auto-xqa", "FLASHINFER-auto-wrapper"),
        *("TRITON_ATTN-fp8-own", "FLASHINFER-fp8-xqa", "FLASHINFER-fp8-wrapper"),
    ]
    document = json.loads(json_file.read_text())
    rows = [(r["name"], r["equal"], r["tokens_per_second"]) for r in document["results"]]
    assert rows == [(f"KV cache auto, decode by {d}", 2, 20.0) for d in ("xqa", "wrapper")]
    assert {f["shape"] for f in document["failures"]} == {
        f"KV cache fp8, decode by {d}" for d in ("xqa", "wrapper")
    }
    log = json_file.with_suffix(".log").read_text()
    assert all(f"an engine with {name}" in log for name in ("FLASH_ATTN", "FLASHINFER"))
    assert "2 of 2" in capsys.readouterr().out
