#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""List the wheels of modules of a release: CUDA major x machine x target, as GitHub's matrix.

::

    python ci/matrix.py                                     # all of them
    python ci/matrix.py --cuda 13 --machine x86_64 --arch sm90a
    python ci/matrix.py --cuda newest --arch sm90a
    python ci/matrix.py --names                             # one distribution a line
    python ci/matrix.py --newest                            # the newest CUDA major alone

CUDA majors and targets are those of ``aot_configs/build.toml``, machines those of
``ci/images.toml``. A target that the toolkit of a major cannot compile is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "python")]
import images  # noqa: E402

from precast._base.names import provider_name  # noqa: E402
from precast._plan.planner import Plan  # noqa: E402


def rows(
    plan: Plan,
    cuda: Sequence[str] = (),
    machines: Sequence[str] = (),
    archs: Sequence[str] = (),
) -> list[dict[str, str]]:
    """One row a wheel; empty selections mean all, and ``newest`` is a CUDA major, too.

    Raises
    ------
    ValueError
        If something selected does not exist, or nothing is left.
    """
    known = images.machines()
    cuda = [str(plan.build.newest_cuda) if major == "newest" else major for major in cuda]
    legal = {
        "CUDA major": (cuda, list(map(str, plan.build.cuda))),
        "machine": (machines, list(known)),
        "target": (archs, list(plan.build.archs)),
    }
    for what, (selected, all_of_them) in legal.items():
        for value in selected:
            if value not in all_of_them:
                legal = ", ".join(map(str, all_of_them))
                raise ValueError(f"{value} is not a {what}; legal: {legal}")
    found = []
    for major in plan.build.cuda:
        toolkit = images.toolkit(major)["toolkit"]
        version = tuple(map(int, toolkit.split(".")))
        for arch in plan.build.archs.values():
            for machine, row in known.items():
                wanted = (
                    (not cuda or str(major) in cuda)
                    and (not machines or machine in machines)
                    and (not archs or arch.name in archs)
                )
                if wanted and arch.cuda <= version:
                    found.append(
                        {
                            "cuda": str(major),
                            "toolkit": toolkit,
                            "arch": arch.name,
                            "machine": machine,
                            "runner": row["runner"],
                            "distribution": provider_name(major, arch.name),
                        }
                    )
    if not found:
        raise ValueError("no CUDA major of the selection compiles for its targets")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print the wheels to build.")
    parser.add_argument("--cuda", default="", help="CUDA majors, or newest (default: all)")
    parser.add_argument("--machine", default="", help="such as 'x86_64' (default: all)")
    parser.add_argument("--arch", default="", help="targets, such as 'sm80 sm90a' (default: all)")
    parser.add_argument("--names", action="store_true", help="distributions instead of JSON")
    parser.add_argument("--newest", action="store_true", help="only say the newest CUDA major")
    args = parser.parse_args(argv)
    if args.newest:
        print(Plan.load(ROOT).build.newest_cuda)
        return 0
    try:
        majors = args.cuda.split()
        found = rows(Plan.load(ROOT), majors, args.machine.split(), args.arch.split())
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    if args.names:
        print("\n".join(dict.fromkeys(row["distribution"] for row in found)))
    else:
        print(json.dumps({"include": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
