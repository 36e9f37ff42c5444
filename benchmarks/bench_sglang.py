# SPDX-License-Identifier: Apache-2.0
"""SGLang on precast's ``flashinfer``, beside SGLang's own Triton attention: tokens and speed.

As ``bench_vllm.py``, with the same weights and prompts, and with what it counts as equal, as a tie
and as wrong. Start-up times include the kernels that SGLang compiles for itself with nvcc, whatever
its attention is. docs/engines.md says what has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from _engines import Engine, Pair, measure, parser

ENGINE = Engine(
    "sglang",
    Path(__file__).with_name("_sglang_engine.py"),
    ("sglang", "sglang-kernel", "flashinfer-python", "transformers"),
)
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


def pairs(caches: Sequence[str], other: str | None) -> Iterator[Pair]:
    for kv in caches:
        ours, theirs = (
            {"kv_cache_dtype": kv, "backend": backend, "decode": "own"}
            for backend in ("flashinfer", other or "triton")
        )
        yield Pair(f"KV cache {kv}", ours, theirs, CALLED)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "", CACHES).parse_args(argv)
    measure(ENGINE, pairs(options.kv or CACHES, options.other), options)


if __name__ == "__main__":
    main()
