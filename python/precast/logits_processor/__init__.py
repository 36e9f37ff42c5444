# SPDX-License-Identifier: Apache-2.0
"""Pipes of logits processors: said one by one, run in as few launches as can be."""

from __future__ import annotations

import importlib
import sys

from precast._ops.logits_processor.compiler import (
    CompileError,
    Compiler,
    FusionRule,
    compile_pipeline,
)
from precast._ops.logits_processor.op import Op, ParameterizedOp, TaggedTensor, TensorType
from precast._ops.logits_processor.pipeline import LogitsPipe
from precast._ops.logits_processor.processors import (
    LegalizationError,
    LogitsProcessor,
    MinP,
    Sample,
    Softmax,
    Temperature,
    TopK,
    TopP,
    legalize_processors,
)

__all__ = [
    "CompileError",
    "Compiler",
    "FusionRule",
    "LegalizationError",
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Op",
    "ParameterizedOp",
    "Sample",
    "Softmax",
    "TaggedTensor",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
    "compile_pipeline",
    "legalize_processors",
]

# FlashInfer has these modules too, and engines import from them; some of them are one module here.
for _name, _home in {
    "compiler": "compiler",
    "fusion_rules": "compiler",
    "legalization": "processors",
    "op": "op",
    "operators": "operators",
    "pipeline": "pipeline",
    "processors": "processors",
    "types": "op",
    "validators": "compiler",
}.items():
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(
        f"precast._ops.logits_processor.{_home}"
    )
