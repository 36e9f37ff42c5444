# SPDX-License-Identifier: Apache-2.0
"""Measure and test kernels with the tools that precast's own benchmarks and tests use.

Imports torch. :func:`bench_gpu_time` answers most questions; each module documents the rest.
"""

from __future__ import annotations

from precast._base.tolerances import (
    TOLERANCES,
    Tolerance,
    assert_close,
    tolerance,
    tolerance_of_scales,
)
from precast.testing.attention import (
    attention_flops,
    attention_flops_with_actual_seq_lens,
    attention_tb_per_sec,
    attention_tb_per_sec_with_actual_seq_lens,
    attention_tflops_per_sec,
    attention_tflops_per_sec_with_actual_seq_lens,
)
from precast.testing.ceilings import (
    Ceiling,
    Ceilings,
    measure_ceilings,
    measure_matmul_ceiling,
)
from precast.testing.cpu_time import bench_cpu_time
from precast.testing.environment import environment
from precast.testing.gpu_time import (
    bench_gpu_time,
    bench_gpu_time_with_cuda_event,
    bench_gpu_time_with_cudagraph,
    bench_gpu_time_with_cupti,
)
from precast.testing.inputs import (
    ODD_HIDDEN_SIZES,
    Guarded,
    packed_slice,
    poison,
    random_tensor,
    row_strided,
)
from precast.testing.stats import Timing
from precast.testing.timing import bench_side_by_side

__all__ = [
    "ODD_HIDDEN_SIZES",
    "TOLERANCES",
    "Ceiling",
    "Ceilings",
    "Guarded",
    "Timing",
    "Tolerance",
    "assert_close",
    "attention_flops",
    "attention_flops_with_actual_seq_lens",
    "attention_tb_per_sec",
    "attention_tb_per_sec_with_actual_seq_lens",
    "attention_tflops_per_sec",
    "attention_tflops_per_sec_with_actual_seq_lens",
    "bench_cpu_time",
    "bench_gpu_time",
    "bench_gpu_time_with_cuda_event",
    "bench_gpu_time_with_cudagraph",
    "bench_gpu_time_with_cupti",
    "bench_side_by_side",
    "environment",
    "measure_ceilings",
    "measure_matmul_ceiling",
    "packed_slice",
    "poison",
    "random_tensor",
    "row_strided",
    "tolerance",
    "tolerance_of_scales",
]
