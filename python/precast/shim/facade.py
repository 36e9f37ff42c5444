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
    "prefill": ("precast.prefill",),
    "quantization": ("precast.quantization",),
    "quantization.fp4_quantization": ("precast.quantization",),
    "quantization.fp8_quantization": ("precast.quantization",),
    "rope": ("precast.rope",),
    "sampling": ("precast.sampling",),
    "testing": ("precast.testing",),
    "tllm_enums": ("precast.tllm_enums",),
    "topk": ("precast.topk",),
    "utils": ("precast.utils",),
}


def facade(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of the module ``name`` of a package of :data:`MODULES`.

    Each name is looked up once, and is then an attribute of the module.
    """
    module = sys.modules[name]
    root, _, path = name.partition(".")
    homes = MODULES[path]

    def get(attribute: str) -> Any:
        below = f"{path}.{attribute}".lstrip(".")
        if below in MODULES:
            return importlib.import_module(f"{root}.{below}")
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        for home in homes:
            value = getattr(importlib.import_module(home), attribute, module)
            if value is not module:
                setattr(module, attribute, value)
                return value
        raise AttributeError(
            f"module {name!r} has no attribute {attribute!r}: precast stands in for FlashInfer "
            f"here, and {' and '.join(homes)} have no such name"
        )

    def names() -> list[str]:
        below = path and f"{path}."
        children = {key[len(below) :].partition(".")[0] for key in MODULES if key.startswith(below)}
        known = {
            key
            for home in homes
            for key in dir(importlib.import_module(home))
            if not key.startswith("__")
        }
        return sorted({*vars(module), *known, *children} - {""})

    return get, names
