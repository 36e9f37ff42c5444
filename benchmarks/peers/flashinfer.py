# SPDX-License-Identifier: Apache-2.0
"""FlashInfer: the function of the same name, called the same way."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

PACKAGE = "flashinfer"

#: Functions whose kernels are empty below compute capability 10.0: they return what was in memory.
BLACKWELL_ONLY = {"fp4_quantize", "nvfp4_quantize", "mxfp4_quantize", "mxfp8_quantize"}
#: Functions that wait for the GPU, or copy to the CPU, so that no CUDA graph can hold them.
NOT_IN_GRAPHS = {"segment_packbits", "mxfp4_dequantize", "e2m1_and_ufp8sf_scale_to_float"}


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if case.op in NOT_IN_GRAPHS:
        return None
    if case.op in BLACKWELL_ONLY and torch.cuda.get_device_capability() < (10, 0):
        return None
    for place in ("flashinfer", f"flashinfer.{family}"):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:  # FlashInfer itself is broken: say so
                raise
            continue
        function = getattr(module, case.op, None)
        if callable(function):
            return case.bind(function)
    return None
