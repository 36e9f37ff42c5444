# SPDX-License-Identifier: Apache-2.0
"""vLLM on precast's ``flashinfer``, beside vLLM's own attention: tokens, start-up and speed.

Each engine runs in a fresh process with the same weights and prompts: 32 prompts of 1 to 2000
tokens that share prefixes, prefill in chunks, a prefix cache and CUDA graphs. Greedy tokens must be
equal up to the first tie of each prompt, and the tokens drawn by precast's sampler must be among
those that ``top_k`` leaves. docs/engines.md says what has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from _engines import Engine, Pair, measure, parser

ENGINE = Engine(
    "vllm",
    Path(__file__).with_name("_vllm_engine.py"),
    ("vllm", "flashinfer-python", "transformers"),
    forbidden=("nvcc", "ninja", "cicc"),
)
#: Of a KV cache in 16 bits and in FP8, vLLM's own backend: FLASH_ATTN is its choice on Hopper, and
#: TRITON_ATTN keeps queries in 16 bits over a cache of 8, as precast does.
OTHERS = {"auto": "FLASH_ATTN", "fp8": "TRITON_ATTN"}
#: What decodes, by the option --decode.
DECODES = {"xqa": "trtllm_batch_decode_with_kv_cache", "wrapper": "fast_decode_plan"}
#: What vLLM's attention backend and its sampler call beside that.
CALLED = (
    "BatchPrefillWithPagedKVCacheWrapper.run",
    "top_k_sampling_from_probs",
    "top_p_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
)


def pairs(caches: Sequence[str], decodes: Sequence[str], other: str | None) -> Iterator[Pair]:
    for kv in caches:
        for decode in decodes:
            yield Pair(
                f"KV cache {kv}, decode by {decode}",
                {"kv_cache_dtype": kv, "backend": "FLASHINFER", "decode": decode},
                {"kv_cache_dtype": kv, "backend": other or OTHERS[kv], "decode": "own"},
                (DECODES[decode], *CALLED),
            )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__ or "", OTHERS)
    arguments.add_argument(
        "--decode",
        action="append",
        choices=[*DECODES],
        help="without a plan, as vLLM chooses on Hopper, or by a wrapper (default: xqa)",
    )
    options = arguments.parse_args(argv)
    found = pairs(options.kv or [*OTHERS], options.decode or ["xqa"], options.other)
    measure(ENGINE, found, options)


if __name__ == "__main__":
    main()
