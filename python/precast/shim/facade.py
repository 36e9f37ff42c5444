# SPDX-License-Identifier: Apache-2.0
"""The modules of ``flashinfer`` that precast stands behind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

#: The modules of FlashInfer, without its name in front, and those of precast with their names.
MODULES: dict[str, tuple[str, ...]] = {
    "": ("precast", "precast.autotuner", "precast.tllm_enums"),
    "activation": ("precast.activation",),
    "attention": ("precast.attention",),
    "autotuner": ("precast.autotuner",),
    "cascade": ("precast.cascade",),
    "compilation_context": ("precast.compilation_context",),
    "concat_ops": ("precast.concat_ops",),
    "decode": ("precast.decode",),
    "fp4_quantization": ("precast.quantization",),
    "fp8_quantization": ("precast.quantization",),
    "jit": ("precast.jit",),
    "jit.core": ("precast.jit.core",),
    "jit.env": ("precast.jit.env",),
    "logits_processor": ("precast.logits_processor",),
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
    "utils": ("precast.utils",),
}


def modules_below(path: str) -> set[str]:
    """The names of the modules right below one of :data:`MODULES`."""
    above = path and f"{path}."
    below = (key[len(above) :] for key in MODULES if key and key.startswith(above))
    return {key.partition(".")[0] for key in below}


def facade(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of the module ``name`` of a package of :data:`MODULES`.

    Each name is looked up once, and is then an attribute of the module.
    """
    module = sys.modules[name]
    path = name.partition(".")[2]
    homes = MODULES[path]

    def get(attribute: str) -> Any:
        if attribute in modules_below(path):
            return importlib.import_module(f"{name}.{attribute}")
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        for home in map(importlib.import_module, homes):
            if hasattr(home, attribute):
                value = getattr(home, attribute)
                setattr(module, attribute, value)
                return value
        raise AttributeError(
            f"module {name!r} has no attribute {attribute!r}: precast stands in for FlashInfer "
            f"here, and there is none in {' or '.join(homes)}"
        )

    def names() -> list[str]:
        known = {key for home in map(importlib.import_module, homes) for key in dir(home)}
        public = {key for key in known if not key.startswith("__")}
        return sorted({*vars(module), *public, *modules_below(path)})

    return get, names
