# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in one fresh process: ``python _vllm_engine.py OPTIONS.json RESULT.json``.

``bench_vllm.py`` starts it. The engine runs in this process, not in one of its own, so that what it
calls can be counted: the programs that are started, and the functions of ``flashinfer``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _engine_counts import COMPILERS, at_calls, at_programs

#: Variables of every engine. vLLM takes FlashInfer without a compiler if FlashInfer's prebuilt
#: kernels are there, which is what this variable says of precast's.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "PRECAST_JIT": "error",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HAS_FLASHINFER_CUBIN": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Names of ``flashinfer`` whose calls are counted: functions, and methods of classes.
COUNTED = {
    "": ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"),
    "decode": ("fast_decode_plan", "trtllm_batch_decode_with_kv_cache"),
    "sampling": (
        "top_k_sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
        "top_p_sampling_from_probs",
    ),
}


def count_programs() -> Counter[str]:
    """Count the programs that this process starts from now on, by name."""
    programs: Counter[str] = Counter()
    at_programs(lambda name: programs.update([name]))
    return programs


def count_calls() -> Counter[str]:
    """Count the calls of what an engine reads from ``flashinfer``, which must be precast's."""
    calls: Counter[str] = Counter()
    at_calls(COUNTED, lambda name: calls.update([name]), "--for vllm --version <what vLLM pins>")
    return calls


def keep_queries_of_triton() -> None:
    """Let TRITON_ATTN compute with queries of 16 bits over an FP8 cache, as precast does.

    vLLM rounds them to FP8 there; no option says otherwise, and rounding changes tokens.
    """
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    original = TritonAttentionImpl.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.supports_quant_query_input = False

    TritonAttentionImpl.__init__ = init


def engine(options: dict[str, Any]) -> Any:
    """Make the engine of these options: graphs for decode, chunks of prefill, a prefix cache."""
    from vllm import LLM

    attention: dict[str, Any] = {"backend": options["backend"]}
    if options["backend"] == "FLASHINFER":
        if options["decode"] == "wrapper":
            attention["use_trtllm_attention"] = False
        # precast's wrappers take queries of 16 bits; vLLM would round them to FP8 on Hopper.
        attention["disable_flashinfer_q_quantization"] = True
    requests = options["requests"]
    return LLM(
        model=options["model"],
        skip_tokenizer_init=True,
        dtype=options["dtype"],
        kv_cache_dtype=options["kv_cache_dtype"],
        max_model_len=options["max_model_len"],
        max_num_seqs=requests,
        max_num_batched_tokens=options["chunk"],
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        seed=0,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=4 << 30,
        attention_config=attention,
        # Neither TorchDynamo nor Inductor: they would compile the same for every backend.
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [n for n in (1, 2, 4, 8, 16, 24) if n < requests]
            + [requests],
        },
    )


def generate(llm: Any, prompts: list[list[int]], **sampling: Any) -> tuple[float, list[Any]]:
    """Generate for all prompts at once; the seconds, and what came out."""
    from vllm import SamplingParams

    given = SamplingParams(ignore_eos=True, detokenize=False, **sampling)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], given, use_tqdm=False)
    return time.perf_counter() - start, outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [[*output.outputs[0].token_ids] for output in outputs]


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, generate greedily and by sampling, and say what was called."""
    os.environ.update(VARIABLES)
    is_ours = options["backend"] == "FLASHINFER"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = str(int(is_ours))
    programs = count_programs()
    start = time.perf_counter()
    import torch
    from _vllm_model import prompts

    torch.zeros(1, device="cuda")
    torch_ready = time.perf_counter()
    calls = count_calls() if is_ours else Counter()
    import vllm

    if options["backend"] == "TRITON_ATTN":
        keep_queries_of_triton()
    imported = time.perf_counter()
    llm = engine(options)
    created = time.perf_counter()
    generate(llm, [[1]], temperature=0.0, max_tokens=1)
    first = time.perf_counter()

    vocab, most = options["vocab"], options["max_model_len"] - options["tokens"]
    batch = prompts(1, vocab, most)
    _, greedy = generate(llm, batch, temperature=0.0, max_tokens=options["tokens"], logprobs=5)
    _, again = generate(llm, batch, temperature=0.0, max_tokens=options["tokens"])
    speeds = []
    for seed in range(2, 2 + options["runs"]):  # New prompts: nothing of them is in the cache.
        fresh = prompts(seed, vocab, most)
        seconds, outputs = generate(llm, fresh, temperature=0.0, max_tokens=options["tokens"])
        speeds.append(sum(map(len, tokens_of(outputs))) / seconds)
    graph_calls = dict(calls)
    sampled = {}
    for name, sampling in (
        ("top_k", {"top_k": 20}),
        ("top_p", {"top_p": 0.8}),
        ("both", {"top_k": 20, "top_p": 0.8}),
    ):
        _, outputs = generate(llm, batch, temperature=1.0, max_tokens=16, logprobs=1, **sampling)
        sampled[name] = [
            [step[token].rank for token, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)]
            for o in outputs
        ]
    return {
        "vllm": vllm.__version__,
        "backend": options["backend"],
        "attention": attention_of(llm),
        "seconds": {
            "import of torch, CUDA": torch_ready - start,
            "import of vLLM": imported - torch_ready,
            "engine": created - imported,
            "first token": first - created,
            "start": first - start,
        },
        "tokens_per_second": speeds,
        "greedy": tokens_of(greedy),
        "again": tokens_of(again),
        "logprobs": [
            [{str(t): p.logprob for t, p in step.items()} for step in o.outputs[0].logprobs]
            for o in greedy
        ],
        "cached_tokens": sum(o.num_cached_tokens or 0 for o in greedy),
        "prompt_tokens": sum(map(len, batch)),
        "ranks": sampled,
        "calls_before_sampling": graph_calls,
        "calls": dict(calls),
        "programs": dict(programs),
        "compilers": {name: n for name, n in programs.items() if name.startswith(COMPILERS)},
    }


def attention_of(llm: Any) -> list[str]:
    """The attention backends that the engine's layers have in the end."""
    core = llm.llm_engine.engine_core.engine_core
    layers = core.vllm_config.compilation_config.static_forward_context.values()
    return sorted({layer.attn_backend.get_name() for layer in layers})


if __name__ == "__main__":
    asked, answer = sys.argv[1:]
    found = main(json.loads(Path(asked).read_text(encoding="utf-8")))
    Path(answer).write_text(json.dumps(found), encoding="utf-8")
