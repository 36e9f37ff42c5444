# SPDX-License-Identifier: Apache-2.0
"""The logger of precast, and whether the GPUs here are known: engines ask at this path."""

from __future__ import annotations

from precast._base.log import get_logger
from precast._plan.compilation_context import check_cuda_arch
from precast._runtime.custom import gen_jit_spec

#: The logger of precast.
logger = get_logger()

__all__ = ["check_cuda_arch", "gen_jit_spec", "logger"]
