# SPDX-License-Identifier: Apache-2.0
"""SGLang on precast's ``flashinfer``, beside SGLang's own Triton attention: tokens and speed.

As ``bench_vllm.py``, with the same weights and prompts, and with what it counts as equal, as a tie
and as wrong. Start-up times include the kernels that SGLang compiles for itself with nvcc, whatever
its attention is. docs/engines.md says what has to be installed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peers
import torch
from _vllm_model import CONFIG, LENGTHS, write_checkpoint
from bench_vllm import EQUAL_LOGITS, TIE, compare, name_of, run_engine, table, write_logs

from precast.testing import environment, report

ENGINE = Path(__file__).with_name("_sglang_engine.py")
OURS = "flashinfer"
CACHES = ("auto", "fp8_e4m3")
#: What SGLang's attention backend and its sampler call in every run of this benchmark.
CALLED = (
    "BatchDecodeWithPagedKVCacheWrapper.forward",
    "BatchPrefillWithPagedKVCacheWrapper.forward_return_lse",
    "BatchPrefillWithRaggedKVCacheWrapper.forward",
    "fast_decode_plan",
    "merge_state",
    "top_k_top_p_sampling_from_probs",
)


def problems(ours: Mapping[str, Any], compared: Mapping[str, Any]) -> Iterator[str]:
    """What is not as it has to be, one line each."""
    if compared["wrong"]:
        yield f"{len(compared['wrong'])} prompts have a wrong token: {compared['wrong'][0]}"
    if ours["attention"] != [OURS]:
        yield f"attention is {ours['attention']}"
    for name in CALLED:
        if not ours["calls"].get(name):
            yield f"flashinfer's {name} was not called"
    if not ours["cached_tokens"]:
        yield "no prompt found its prefix in the cache"
    for name in ("top_k", "both"):
        worst = max(max(ranks) for ranks in ours["ranks"][name])
        if worst > 20 + EQUAL_LOGITS:
            yield f"{name}: a token of rank {worst} was drawn"


def record_of(
    kv: str, ours: Mapping[str, Any], other: Mapping[str, Any], tie: float
) -> dict[str, Any]:
    """One row of the result file, in seconds and tokens per second."""
    return {
        "name": f"KV cache {kv}",
        "engine": f"sglang {ours['sglang']}",
        "other": other["backend"],
        "seconds": ours["seconds"]["start"],
        "other_seconds": other["seconds"]["start"],
        "tokens_per_second": max(ours["tokens_per_second"]),
        "other_tokens_per_second": max(other["tokens_per_second"]),
        "repeats_itself": ours["greedy"] == ours["again"],
        "other_repeats_itself": other["greedy"] == other["again"],
        "tie": tie,
        **compare(ours, other, tie),
        "cached_tokens": ours["cached_tokens"],
        "prompt_tokens": ours["prompt_tokens"],
        "stages": ours["seconds"],
        "other_stages": other["seconds"],
        "calls": ours["calls"],
        "compilers": ours["compilers"],
        "other_compilers": other["compilers"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv", action="append", choices=CACHES, help="default: both")
    parser.add_argument("--other", default="triton", help="SGLang's own backend to compare with")
    parser.add_argument("--model", help="a folder or name of a model (default: random weights)")
    parser.add_argument("--vocab", type=int, default=CONFIG["vocab_size"], help="of that model")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and queries")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for a prompt")
    parser.add_argument("--runs", type=int, default=2, help="timed runs; the best counts")
    parser.add_argument("--tie", type=float, default=TIE, help="difference of log-probabilities")
    parser.add_argument("--logs", type=Path, help="a folder for the engines' whole logs")
    parser.add_argument(
        "--json", type=Path, help="write the results here, and the engines' logs beside as .log"
    )
    parser.add_argument("--commit", help="the commit measured (default: $COMMIT, then git)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("error: benchmarks need a CUDA device; torch sees none")
    packages = ("sglang", "sglang-kernel", "flashinfer-python", "transformers")
    here = environment(options.commit, Path(__file__).parent, (*packages, *peers.distributions()))
    report.print_circumstances(here)
    records, failures, engines = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = options.model or str(write_checkpoint(Path(temporary) / "model"))
        common = {
            "model": model,
            "caches": f"{temporary}/caches",
            "vocab": options.vocab,
            "dtype": options.dtype,
            "tokens": options.tokens,
            "runs": options.runs,
            "requests": len(LENGTHS),
            "max_model_len": 4096,
            "chunk": 512,
        }
        for kv in options.kv or CACHES:
            answers = []
            for backend in (OURS, options.other):
                asked = {**common, "kv_cache_dtype": kv, "backend": backend, "decode": "own"}
                engines.append(name_of(asked))
                answers.append(run_engine(asked, folder, ENGINE))
            ours, other = answers
            errors = [run["error"] for run in answers if "error" in run]
            if not errors:
                record = record_of(kv, ours, other, options.tie)
                records.append(record)
                errors = [*problems(ours, record)]
            name = f"KV cache {kv}"
            failures += [{"op": "sglang", "shape": name, "error": text} for text in errors]
            print("\n".join([name, *errors]), file=sys.stderr, flush=True)
            if options.json:
                report.write_json(options.json, report.document(here, records, failures=failures))
                places = {temporary: "$TEMPORARY"}
                if Path(model).is_dir():
                    places[model] = "$MODEL"
                write_logs(options.json.with_suffix(".log"), folder, engines, places)
    if records:
        report.print_table(table(records))
    for failure in failures:
        print("FAILED {op} {shape}: {error}".format(**failure))
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
