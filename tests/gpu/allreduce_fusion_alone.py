# SPDX-License-Identifier: Apache-2.0
"""Run by test_gpu_allreduce_fusion.py, and under compute-sanitizer: one rank without its peers.

What the peers would send lies in the receive buffer before the call, so that no kernel waits for
another one, which the sanitizer might hold back. Arguments: calls for each number of ranks.
"""

from __future__ import annotations

import random
import sys

import torch
from allreduce_cases import Call, Case, draw, make_input, of_rank
from allreduce_fusion_streams import CTAS_WORD, Ranks
from ranks_support import run_rank

from precast._ops.comm.workspace import CONTROL_BYTES
from precast.comm import allreduce_fusion_reference

CHUNK = 32  # vectors that a warp takes
THREADS, VECS = 64, 2  # of the pseudo-rows of an all-reduce alone
REGION = 4 << 20


def vectors(tensor: torch.Tensor, rows: int, row_vecs: int) -> torch.Tensor:
    """Rows as padded vectors of 16 bytes: ``[rows, row_vecs, 16]``."""
    size = 16 // tensor.itemsize
    flat = tensor.new_zeros(rows * row_vecs * size)
    if tensor.dim() == 1:
        flat[: tensor.numel()] = tensor
    else:
        flat.view(rows, -1)[:, : tensor.shape[1]] = tensor
    return flat.view(torch.uint8).view(rows, row_vecs, 16)


def fill(ranks: Ranks, case: Case, inputs: list[torch.Tensor]) -> None:
    """Put what the peers of rank 0 would send into its receive buffer."""
    world, buffer = ranks.world, ranks.buffers[0]
    size = 16 // case.dtype.itemsize
    if case.pattern == 0:
        row_vecs = THREADS * VECS
        rows = -(-case.shape[0] // (row_vecs * size))
    else:
        rows, row_vecs = case.shape[0], -(-case.shape[1] // size)
    epoch = int(buffer[:4].view(torch.int32))
    region = buffer[CONTROL_BYTES:].view(2, REGION)[epoch % 2]
    sent = [vectors(x, rows, row_vecs) for x in inputs]
    if world == 2 or case.use_oneshot:
        taken = region[: (world - 1) * rows * row_vecs * 16]
        taken.view(world - 1, rows, row_vecs, 16).copy_(torch.stack(sent[1:]))
        return
    (total,) = allreduce_fusion_reference(inputs)
    index = torch.arange(row_vecs, device="cuda")
    owner = index // CHUNK % world
    chunks = (row_vecs + CHUNK - 1) // CHUNK
    part_vecs = (chunks + world - 1) // world * CHUNK
    place = index // (CHUNK * world) * CHUNK + index % CHUNK
    count = (world - 1) * rows * part_vecs * 16
    parts = region[:count].view(world - 1, rows, part_vecs, 16)
    results = region[count : count + rows * row_vecs * 16].view(rows, row_vecs, 16)
    own = owner == 0
    for peer, data in enumerate(sent[1:]):
        parts[peer][:, place[own]] = data[:, own]
    results[:, ~own] = vectors(total, rows, row_vecs)[:, ~own]


def main() -> None:
    """Run all."""
    count = int(sys.argv[1])
    random.seed(7)
    for world in (2, 4, 8):
        ranks = Ranks(world, torch.bfloat16, REGION)
        workspace = ranks.workspaces[0]
        for number in range(count):
            case = of_rank(draw(random, (torch.bfloat16,), 1 << 16), 1)._replace(special="")
            if world > 2 and case.use_oneshot is None:
                case = case._replace(use_oneshot=False)
            if case.pattern == 0:  # fill() knows how long the rows are
                case = case._replace(cut=(VECS, 0))
            generators = [torch.Generator("cuda") for _ in range(world)]
            for rank, generator in enumerate(generators):
                generator.manual_seed(number * 8 + rank)
            inputs = [make_input(case, generator) for generator in generators]
            common = torch.Generator("cuda")
            common.manual_seed(number)
            call = Call(case, inputs[0], common)
            inputs = [x.clone() for x in inputs]
            fill(ranks, case, inputs)
            workspace.block[7] = THREADS if case.pattern == 0 else 0
            # 0: as many CTAs as the launcher takes on a GPU of its own
            workspace.block[CTAS_WORD] = random.choice((8, 16, 0))
            workspace.block[5] = 0
            call.run(workspace)
            torch.cuda.synchronize()
            wrong = call.check(inputs)
            assert not wrong, (world, number, case, wrong)
            assert bool((ranks.buffers[0][CONTROL_BYTES:] == 255).all()), (world, number, case)
            for peer in ranks.buffers[1:]:
                assert not bool((peer[CONTROL_BYTES:] == 255).all()), "nothing was sent"
                peer[CONTROL_BYTES:] = 255
        ranks.close()
        print(f"rank 0 of {world}: {count} calls", flush=True)


if __name__ == "__main__":
    run_rank(main, 280)
