# SPDX-License-Identifier: Apache-2.0
"""Compile kernels on the spot, by the same plan that the prebuilt ones are made from."""

from __future__ import annotations

from precast.errors import MissingJITCacheError, MissingKernelError
from precast.jit.custom import gen_jit_spec
from precast.jit.policy import freeze
from precast.jit.spec import JitSpec

__all__ = ["JitSpec", "MissingJITCacheError", "MissingKernelError", "freeze", "gen_jit_spec"]
