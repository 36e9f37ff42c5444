# SPDX-License-Identifier: Apache-2.0
"""Run by test_gpu_allreduce_fusion.py: a peer that does not come, or comes with another shape.

The ranks are streams of one GPU. Argument: ``late`` or ``shapes``.
"""

from __future__ import annotations

import os
import sys

os.environ["PRECAST_COMM_TIMEOUT"] = "0.5"

import pytest
import torch
from allreduce_fusion_streams import Ranks
from ranks_support import run_rank

from precast.comm import allreduce_fusion


def main() -> None:
    """Run one."""
    ranks = Ranks(2, torch.bfloat16)
    ranks.limit(8)
    x = torch.ones(16, 1024, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(ranks.streams[0]):
        allreduce_fusion(x, ranks.workspaces[0], 0, output=out)
    if sys.argv[1] == "shapes":
        with torch.cuda.stream(ranks.streams[1]):
            allreduce_fusion(x[:8], ranks.workspaces[1], 0)
    with pytest.raises(RuntimeError):
        torch.cuda.synchronize()
    words = {
        "late": "rank 0 waited longer than PRECAST_COMM_TIMEOUT=0.5 s .* from rank 1",
        "shapes": "ranks [01] and [01] called allreduce_fusion with different shapes",
    }[sys.argv[1]]
    told = [str(one.explain_failure()) for one in ranks.workspaces]
    print(told)
    with pytest.raises(RuntimeError, match=words):
        ranks.workspaces[0 if "rank 0" in told[0] or "ranks" in told[0] else 1].destroy()
    print("found", flush=True)
    os._exit(0)  # the context is lost, so nothing can be freed


if __name__ == "__main__":
    run_rank(main, 280)
