# SPDX-License-Identifier: Apache-2.0
"""Norm and 3-D rotation of video models: one read of the projection, one write of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.norm import fused_qk_rmsnorm_rope_reference
from precast.testing import Tolerance, poison

DTYPES = ("bf16",)
#: Heads of each kind and patches: models of 1536 and 3072 columns, one image and two videos.
SHAPES = ((12, (1, 32, 32)), (12, (21, 30, 52)), (24, (21, 30, 52)), (24, (21, 45, 80)))
HEAD_DIM = 128
CHANNELS = {"num_frame_channels": 44, "num_height_channels": 42, "num_width_channels": 42}
#: A norm that rounds to the other neighbour is a step of bfloat16 at its size, which is below 16.
CLOSE = Tolerance(2.0**-7, 2.0**-3)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for heads, patches in SHAPES:
        tokens = patches[0] * patches[1] * patches[2]
        sizes: dict[str, Any] = {
            **dict(zip(("ppf", "pph", "ppw"), patches)),
            **CHANNELS,
            **{f"num_heads_{letter}": heads for letter in "qkv"},
            "head_dim": HEAD_DIM,
        }
        for form, fp8 in (("bf16", False), ("e4m3", True)):
            out_dtype = torch.float8_e4m3fn if fp8 else dtype

            def make(
                heads: int = heads, tokens: int = tokens, out_dtype: torch.dtype = out_dtype
            ) -> tuple[Any, ...]:
                qkv = torch.randn(tokens, 3 * heads * HEAD_DIM, dtype=dtype, device="cuda")
                weights = 1 + torch.randn(2, heads * HEAD_DIM, device="cuda").to(dtype) / 8
                outputs = torch.empty(3, tokens, heads, HEAD_DIM, dtype=out_dtype, device="cuda")
                return (qkv, *weights, *(poison(out) for out in outputs))

            def bind(function: Any, sizes: dict[str, Any] = sizes, fp8: bool = fp8) -> Any:
                def run(qkv: Any, q_weight: Any, k_weight: Any, q: Any, k: Any, v: Any) -> None:
                    function(
                        *(qkv, q_weight, k_weight),
                        **sizes,
                        output_fp8=fp8,
                        q_out=q,
                        k_out=k,
                        v_out=v,
                    )

                return run

            def eager(*args: Any, sizes: dict[str, Any] = sizes, fp8: bool = fp8) -> None:
                results = fused_qk_rmsnorm_rope_reference(*args[:3], **sizes, output_fp8=fp8)
                for out, result in zip(args[3:], results):
                    out.copy_(result)

            yield Case(
                "fused_qk_rmsnorm_rope",
                f"{tokens} tokens, 3 x {heads} heads of {HEAD_DIM}, {form}",
                tokens * 3 * heads * HEAD_DIM * (2 + out_dtype.itemsize),
                make,
                bind=bind,
                eager=eager,
                tolerances={} if fp8 else dict.fromkeys((3, 4), CLOSE),
            )


if __name__ == "__main__":
    script(__file__)
