# SPDX-License-Identifier: Apache-2.0
"""One SGLang engine in one fresh process: ``python _sglang_engine.py OPTIONS.json RESULT.json``.

``bench_sglang.py`` starts it. SGLang computes in processes of its own, which import this file again
before they start, so that what they call can be counted there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from _engine_counts import COMPILERS, at_calls, at_programs

OURS = "flashinfer"
#: Variables of every engine. SGLang compiles kernels of its own; precast compiles none.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "PRECAST_JIT": "error",
    "TORCHDYNAMO_DISABLE": "1",
}
#: The folder of the counts of all processes of an engine.
COUNTS = "PRECAST_BENCH_COUNTS"
COUNTED = {
    "": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "fast_decode_plan",
    ),
    "cascade": ("merge_state",),
    "sampling": ("min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs"),
}
#: Names that SGLang before 0.5.22 imports when it starts, for experts on Blackwell.
IMPORTED = ("trtllm_fp4_block_scale_moe",)
#: As many of the likeliest tokens are listed for each drawn one, which is enough to know its rank.
LISTED = 64


class Counts:
    """Counts that outlive a killed process: a mapped file for each name and process.

    A call costs an addition. A system call for each would slow down one of two engines that are
    compared, because only precast's calls are counted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._counts: dict[str, memoryview] = {}
        os.register_at_fork(after_in_child=self._counts.clear)

    def __call__(self, name: str) -> None:
        count = self._counts.get(name)
        if count is None:
            with (self._folder / f"{name}@{os.getpid()}").open("w+b") as file:
                file.write(bytes(8))
                file.flush()
                count = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
            self._counts[name] = count
        count[0] += 1

    def totals(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for file in sorted(self._folder.iterdir()):
            name = file.name.rpartition("@")[0]
            found[name] = found.get(name, 0) + int.from_bytes(file.read_bytes(), sys.byteorder)
        return found


def watch(folder: Path, is_ours: bool) -> None:
    """Count the programs of this process and its calls, before it imports SGLang."""
    at_programs(Counts(folder / "programs"))
    if is_ours:
        options = "--for sglang --version <what SGLang pins>"
        at_calls(COUNTED, Counts(folder / "calls"), options)
        flashinfer = importlib.import_module("flashinfer")
        for name in IMPORTED:
            if not hasattr(flashinfer, name):
                setattr(flashinfer, name, _not_called)


def _not_called(*args: object, **options: object) -> NoReturn:
    raise NotImplementedError("a kernel for Blackwell was called. Fix: use an older model")


def generate(
    engine: Any, prompts: list[list[int]], tokens: int, listed: int = 0, **sampling: float
) -> tuple[float, list[Any]]:
    """Generate for all prompts at once; the seconds, and what came out."""
    given = {"max_new_tokens": tokens, "ignore_eos": True, **sampling}
    logprobs = {"return_logprob": True, "top_logprobs_num": listed} if listed else {}
    start = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=given, **logprobs)
    return time.perf_counter() - start, outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [[*output["output_ids"]] for output in outputs]


def steps_of(output: Mapping[str, Any]) -> list[dict[str, float]]:
    """The likeliest tokens of each step, in the order of their log-probabilities."""
    return [
        {str(token): logprob for logprob, token, _ in step}
        for step in output["meta_info"]["output_top_logprobs"]
    ]


def ranks_of(output: Mapping[str, Any]) -> list[int]:
    """The rank of each drawn token, 1 for the likeliest; beyond those listed, one more."""
    drawn = zip(output["output_ids"], steps_of(output))
    return [
        [*step].index(str(token)) + 1 if str(token) in step else len(step) + 1
        for token, step in drawn
    ]


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``Engine``: graphs for decode, chunks of prefill, a prefix cache."""
    return {
        "model_path": options["model"],
        "skip_tokenizer_init": True,
        "dtype": options["dtype"],
        "kv_cache_dtype": options["kv_cache_dtype"],
        "attention_backend": options["backend"],
        "sampling_backend": "flashinfer" if options["backend"] == OURS else "pytorch",
        "context_length": options["max_model_len"],
        "max_running_requests": options["requests"],
        "chunked_prefill_size": options["chunk"],
        "max_total_tokens": 1 << 17,
        "mem_fraction_static": 0.5,
        "page_size": 1,
        "random_seed": 0,
        "cuda_graph_max_bs_decode": options["requests"],
        "cuda_graph_backend_prefill": "disabled",
        "skip_server_warmup": True,
        "host": "127.0.0.1",
        "log_level": "info",
    }


def main(options: dict[str, Any], counts: Path) -> dict[str, Any]:
    """Start the engine, generate greedily and by sampling, and say what was called."""
    os.environ.update(VARIABLES)
    is_ours = options["backend"] == OURS
    os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] = str(is_ours).lower()
    os.environ[COUNTS] = str(counts)
    start = time.perf_counter()
    import torch
    from _vllm_model import prompts

    torch.zeros(1, device="cuda")
    torch_ready = time.perf_counter()
    watch(counts, is_ours)
    import sglang

    imported = time.perf_counter()
    with contextlib.closing(_Engine(sglang.Engine(**engine_options(options)))) as held:
        engine = held.engine
        created = time.perf_counter()
        generate(engine, [[1]], 1, temperature=0.0)
        first = time.perf_counter()

        vocab, most = options["vocab"], options["max_model_len"] - options["tokens"]
        count = options["tokens"]
        batch = prompts(1, vocab, most)
        _, greedy = generate(engine, batch, count, 5, temperature=0.0)
        _, again = generate(engine, batch, count, temperature=0.0)
        speeds = []
        for seed in range(2, 2 + options["runs"]):  # New prompts: nothing of them is in the cache.
            seconds, outputs = generate(engine, prompts(seed, vocab, most), count, temperature=0.0)
            speeds.append(sum(map(len, tokens_of(outputs))) / seconds)
        sampled = {}
        for name, sampling in (
            ("top_k", {"top_k": 20}),
            ("top_p", {"top_p": 0.8}),
            ("both", {"top_k": 20, "top_p": 0.8}),
        ):
            _, outputs = generate(engine, batch, 16, LISTED, temperature=1.0, **sampling)
            sampled[name] = [ranks_of(output) for output in outputs]
        attention = engine.get_server_info()["attention_backend"]
    programs = Counts(counts / "programs").totals()
    return {
        "sglang": sglang.__version__,
        "backend": options["backend"],
        "attention": [attention],
        "seconds": {
            "import of torch, CUDA": torch_ready - start,
            "import of SGLang": imported - torch_ready,
            "engine": created - imported,
            "first token": first - created,
            "start": first - start,
        },
        "tokens_per_second": speeds,
        "greedy": tokens_of(greedy),
        "again": tokens_of(again),
        "logprobs": [steps_of(output) for output in greedy],
        "cached_tokens": sum(output["meta_info"]["cached_tokens"] for output in again),
        "prompt_tokens": sum(map(len, batch)),
        "ranks": sampled,
        "calls": Counts(counts / "calls").totals(),
        "programs": programs,
        "compilers": {name: n for name, n in programs.items() if name.startswith(COMPILERS)},
    }


class _Engine:
    """An engine whose processes end with ``close``."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def close(self) -> None:
        self.engine.shutdown()


if __name__ == "__mp_main__" and COUNTS in os.environ:
    watch(Path(os.environ[COUNTS]), os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] == "true")
elif __name__ == "__main__":
    asked, answer = map(Path, sys.argv[1:])
    found = main(json.loads(asked.read_text(encoding="utf-8")), answer.with_suffix(".counts"))
    answer.write_text(json.dumps(found), encoding="utf-8")
