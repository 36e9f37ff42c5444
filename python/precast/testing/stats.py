# SPDX-License-Identifier: Apache-2.0
"""Statistics of a list of timings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Timing(NamedTuple):
    """Median, 20th and 80th percentile and standard deviation of one measurement, in seconds."""

    median: float
    p20: float
    p80: float
    std: float
    samples: int

    @classmethod
    def of_milliseconds(cls, samples: Sequence[float]) -> Timing:
        """Summarise the lists that the ``bench_gpu_time_with_*`` functions return.

        Raises
        ------
        ValueError
            If there is no sample.
        """
        if not samples:
            raise ValueError("samples is empty: nothing was measured")
        seconds = sorted(sample * 1e-3 for sample in samples)
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 0.0, 1)
        fifths = statistics.quantiles(seconds, n=5, method="inclusive")
        return cls(
            statistics.median(seconds),
            fifths[0],
            fifths[3],
            statistics.pstdev(seconds),
            len(seconds),
        )

    def bandwidth(self, bytes_moved: int) -> float:
        """GB/s (1e9 bytes a second) at the median."""
        return bytes_moved / self.median * 1e-9
