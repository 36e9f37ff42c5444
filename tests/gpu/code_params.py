# SPDX-License-Identifier: Apache-2.0
"""8-bit types as parameters of tests. Modules for e5m2 are in no profile but full."""

from __future__ import annotations

import pytest
import torch

E4M3_PARAM = pytest.param(torch.float8_e4m3fn, id="e4m3")
E5M2_PARAM = pytest.param(torch.float8_e5m2, id="e5m2", marks=pytest.mark.jit)
FP8 = [E4M3_PARAM, E5M2_PARAM]
CODES = [*FP8, pytest.param(torch.int8, id="i8")]
