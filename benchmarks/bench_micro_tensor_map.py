# SPDX-License-Identifier: Apache-2.0
"""The CPU time to encode a tensor map, which launchers of TMA kernels do at every call."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from _micro import LAUNCHES, POOLS, Row, kernel, pool, script

CALLS = 20_000


def rows() -> Iterator[Row]:
    data = pool(POOLS["L2"])
    for dims in (2, 3, 4, 5):
        times = [kernel("encode_time")(data, dims, CALLS) for _ in range(LAUNCHES)]
        yield Row(f"dimensions {dims}", {"ns": statistics.median(times)})


def main(argv: Sequence[str] | None = None) -> None:
    script(__doc__ or "", rows, argv)


if __name__ == "__main__":
    main()
