# SPDX-License-Identifier: Apache-2.0
"""SGLang's fused MoE in Triton (PyPI ``sglang``, 0.5.17), as its engine calls it.

Its wheel holds the Triton kernels, its table of tiles, and CUDA sources that it compiles at the
first call. The compiled kernels of ``sgl_kernel`` need not load: the sum over experts is SGLang's
in Triton, and sorting is the kernel that it compiles. What an engine decides once (its parallel
groups, its options) has the default.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

PACKAGE = "sglang"


class _Defaults:
    """Groups of options, which are all off."""

    def __getattr__(self, name: str) -> Any:
        return False if name.startswith("enable") else self


@functools.cache
def _fused_experts() -> Callable[..., Any]:
    stub = types.ModuleType("sgl_kernel")
    stub.moe_sum_reduce = None  # type: ignore[attr-defined]
    sys.modules.setdefault("sgl_kernel", stub)
    utils = "sglang.srt.layers.moe.moe_runner.triton_utils"
    module: Any = importlib.import_module(f"{utils}.fused_moe")
    tiles: Any = importlib.import_module(f"{utils}.fused_moe_triton_config")
    kernels: Any = importlib.import_module("sglang.kernels.ops.moe.fused_moe_triton_kernels")
    sorting: Any = importlib.import_module(f"{utils}.moe_align_block_size")
    compiled: Any = importlib.import_module("sglang.kernels.ops.moe.moe_align")
    sorting.sgl_moe_align_block_size = lambda *args: compiled.moe_align_block_size(*args[:8])
    for part in (module, tiles):
        part.get_exec = _Defaults
    module.get_tp_group = lambda: None
    module.is_allocation_symmetric = lambda: False
    module.use_symmetric_memory = lambda *_, **__: contextlib.nullcontext()
    module.moe_sum_reduce = kernels.moe_sum_reduce_triton
    experts: Callable[..., Any] = module.fused_experts_impl
    return experts


@functools.cache
def _swapped() -> Any:
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def _gate_first(weight: Any) -> Any:
    """Return a weight, or its scales, with the gate before the linear half, as SGLang has them."""
    kept = _swapped()
    if weight not in kept:
        up, gate = weight.chunk(2, dim=1)
        kept[weight] = weight.new_empty(weight.shape)
        kept[weight][:, : gate.shape[1]], kept[weight][:, gate.shape[1] :] = gate, up
    return kept[weight]


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if case.op != "cutlass_fused_moe" or "MXFP4" in case.shape or "int4" in case.shape:
        return None

    def call(x: Any, experts: Any, weights: Any, fc1: Any, fc2: Any, memory: Any, out: Any) -> Any:
        options: dict[str, Any] = {}
        if memory.scales:
            options = {
                "use_fp8_w8a8": True,
                "block_shape": [128, 128],
                "w1_scale": _gate_first(memory.scales[0]),
                "w2_scale": memory.scales[1],
            }
        return _fused_experts()(x, _gate_first(fc1), fc2, weights, experts, **options)

    return call
