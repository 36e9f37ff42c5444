#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw a result file: bars with peers, shares of the ceiling, the roofline. Needs no GPU.

python benchmarks/plot.py benchmarks/results/nvidia-h200/57e8760/norm_bf16.json norm.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from precast.testing import plots
from precast.testing.results import load_run


def main(argv: Sequence[str] | None = None) -> int:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("plot.py", description=__doc__, formatter_class=text)
    parser.add_argument("result", type=Path, help="a file that run.py --json wrote")
    parser.add_argument("picture", type=Path, help="a .png, .svg or .pdf file")
    options = parser.parse_args(argv)
    try:
        run = load_run(options.result)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not run.measures_ops or not run.records:
        parser.error(f"{options.result} has no times of ops")
    plots.save_run(run, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
