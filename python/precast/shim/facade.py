# SPDX-License-Identifier: Apache-2.0
"""The modules of ``flashinfer`` that precast stands behind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

PACKAGE = "flashinfer"

#: The modules of FlashInfer, without its name in front, and those with their names, for any engine.
MODULES: dict[str, tuple[str, ...]] = {
    "": ("precast", "precast.autotuner", "precast.tllm_enums"),
    "activation": ("precast.activation",),
    "attention": ("precast.attention",),
    "autotuner": ("precast.autotuner",),
    "cascade": ("precast.cascade",),
    "comm": ("precast.comm",),
    "comm.allreduce": ("precast.comm.allreduce",),
    "comm.comm_backend": ("precast.comm.comm_backend",),
    "comm.cuda_ipc": ("precast.comm.cuda_ipc",),
    "comm.mapping": ("precast.comm.mapping",),
    "comm.mnnvl": ("precast.comm.mnnvl",),
    "comm.trtllm_ar": ("precast.comm.trtllm_ar",),
    "comm.vllm_ar": ("precast.comm.vllm_ar",),
    "compilation_context": ("precast.compilation_context",),
    "concat_ops": ("precast.concat_ops",),
    "decode": ("precast.decode", "precast.shim.names.mla_decode"),
    "diffusion_ops": ("precast.shim.names.diffusion_ops",),
    "dsv3_ops": ("precast.shim.names.dsv3_ops",),
    "fp4_quantization": ("precast.quantization",),
    "fp8_quantization": ("precast.quantization",),
    "fused_moe": ("precast.fused_moe", "precast.shim.names.fused_moe", "precast.tllm_enums"),
    "fused_moe.core": ("precast.shim.names.fused_moe", "precast.tllm_enums"),
    "fused_moe.fused_routing_dsv3": ("precast.fused_moe",),
    "fused_moe.monomoe": ("precast.fused_moe",),
    "fused_moe.utils": ("precast.shim.names.token_buckets",),
    "gemm": ("precast.gemm",),
    "gemm.routergemm": ("precast.gemm",),
    "grouped_mm": ("precast.grouped_mm",),
    "jit": ("precast.jit", "precast.shim.names.tinygemm2"),
    "jit.core": ("precast.jit.core",),
    "jit.env": ("precast.jit.env",),
    "logits_processor": ("precast.logits_processor",),
    "mhc": ("precast.mhc",),
    "mla": ("precast.mla",),
    "mla_kv_pack": ("precast.concat_ops",),
    "norm": ("precast.norm",),
    "page": ("precast.page",),
    "pod": ("precast.pod",),
    "prefill": ("precast.prefill",),
    "quantization": ("precast.quantization",),
    "quantization.fp4_quantization": ("precast.quantization",),
    "quantization.fp8_quantization": ("precast.quantization",),
    "rope": ("precast.rope",),
    "sampling": ("precast.sampling",),
    "sparse": ("precast.sparse",),
    "testing": ("precast.testing",),
    "tllm_enums": ("precast.tllm_enums",),
    "topk": ("precast.topk",),
    "topk_varlen": ("precast.topk",),
    "utils": ("precast.utils", "precast.shim.names.utils"),
    "xqa": ("precast.xqa",),
}

#: The modules that one engine gets before these: an engine takes another path where a name is
#: missing, so a name that cannot work is there only for an engine that does not start without it.
ENGINE_MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "": ("precast.shim.names.vllm_mla",),
        "mla": ("precast.shim.names.vllm_mla",),
    },
    "sglang": {
        "": ("precast.shim.names.sglang_gemm",),
        "fused_moe": ("precast.shim.names.sglang_moe",),
        "gemm": ("precast.shim.names.sglang_gemm",),
    },
}


def modules(engine: str) -> dict[str, tuple[str, ...]]:
    """The modules of FlashInfer that an engine finds, and those with their names."""
    own = ENGINE_MODULES[engine]
    return {path: (*own.get(path, ()), *MODULES.get(path, ())) for path in [*MODULES, *own]}


def of_precast() -> tuple[str, ...]:
    """Those of :data:`MODULES` that a module of precast stands behind, and not the shim alone."""
    return tuple(p for p, homes in MODULES.items() if not homes[0].startswith("precast.shim."))


def look_up(path: str, attribute: str, engine: str) -> Any:
    """A name of a module of FlashInfer.

    Raises
    ------
    AttributeError
        If precast does not have it for this engine.
    """
    homes = modules(engine)[path]
    for home in map(importlib.import_module, homes):
        if hasattr(home, attribute):
            return getattr(home, attribute)
    name = f"{PACKAGE}.{path}".rstrip(".")
    raise AttributeError(
        f"module {name!r} has no attribute {attribute!r}: precast stands in for FlashInfer here, "
        f"and there is none in {' or '.join(homes) or 'any module'}"
    )


def modules_below(path: str, engine: str) -> set[str]:
    """The names of the modules right below one of :func:`modules`."""
    above = path and f"{path}."
    below = (key[len(above) :] for key in modules(engine) if key and key.startswith(above))
    return {key.partition(".")[0] for key in below}


def facade(name: str, engine: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of the module ``name`` of the package for an engine.

    Each name is looked up once, and is then an attribute of the module.
    """
    module = sys.modules[name]
    path = name.partition(".")[2]
    below = modules_below(path, engine)

    def get(attribute: str) -> Any:
        if attribute in below:
            return importlib.import_module(f"{name}.{attribute}")
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        value = look_up(path, attribute, engine)
        setattr(module, attribute, value)
        return value

    def names() -> list[str]:
        homes = map(importlib.import_module, modules(engine)[path])
        known = {key for home in homes for key in dir(home) if not key.startswith("__")}
        return sorted({*vars(module), *known, *below})

    return get, names
