# SPDX-License-Identifier: Apache-2.0
"""Pipes of logits processors: said one by one, run in as few launches as can be."""

from __future__ import annotations

import importlib
import sys

from precast._ops.logits_processor.compiler import Compiler, compile_pipeline
from precast._ops.logits_processor.fusion_rules import FusionRule
from precast._ops.logits_processor.legalization import LegalizationError, legalize_processors
from precast._ops.logits_processor.op import Op, ParameterizedOp
from precast._ops.logits_processor.pipeline import LogitsPipe
from precast._ops.logits_processor.processors import (
    LogitsProcessor,
    MinP,
    Sample,
    Softmax,
    Temperature,
    TopK,
    TopP,
)
from precast._ops.logits_processor.types import TaggedTensor, TensorType
from precast._ops.logits_processor.validators import CompileError

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

# FlashInfer has these modules too, and engines import from them.
for _name in (
    "compiler",
    "fusion_rules",
    "legalization",
    "op",
    "operators",
    "pipeline",
    "processors",
    "types",
    "validators",
):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(
        f"precast._ops.logits_processor.{_name}"
    )
