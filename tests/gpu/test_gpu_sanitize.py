# SPDX-License-Identifier: Apache-2.0
"""The sample that ci/sanitize.sh runs under compute-sanitizer: every operator, few small calls.

Each tensor is an allocation of its own there, so that the first byte past it counts as outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from code_params import E5M2_PARAM
from mla_pages import Batch
from moe_few_support import two_launches
from moe_support import draw
from sanitize_calls import PAIRS, calls, copied, expected, shifted

import precast
from precast.trace import TraceTemplate

__all__ = ["two_launches"]
#: What racecheck and synccheck report of MLA on Hopper they report of correct kernels of twenty
#: lines, too: "Racecheck and synccheck" in docs/decisions.md. memcheck runs these calls.
TOOL_KNOWS_MLA = os.environ.get("PRECAST_SANITIZER") not in ("racecheck", "synccheck")


def skip_what_the_tool_mistakes(template: TraceTemplate) -> None:
    is_mla = template.op_type == "mla_paged" and not template.name_prefix.startswith("concat")
    if is_mla and not TOOL_KNOWS_MLA and torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("a false report of this tool")


templates = pytest.mark.parametrize(
    ("function", "template"),
    [
        pytest.param(
            function,
            template,
            id=template.name_prefix,
            marks=E5M2_PARAM.marks if template.name_prefix.endswith("e5m2") else (),
        )
        for function, template in PAIRS
    ],
)


@templates
def test_a_call_stays_inside_its_tensors(
    function: Callable[..., Any], template: TraceTemplate
) -> None:
    skip_what_the_tool_mistakes(template)
    for words, call in calls(function, template):
        want = expected(function, template, call)
        there = copied(call, template, "cuda")
        if want is None:
            assert words != "small"
            with pytest.raises(ValueError, match=function.__name__):
                function(**there)
            continue
        got = template.results(there, function(**there))
        torch.cuda.synchronize()
        assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want], words


@templates
def test_a_call_on_addresses_without_alignment(
    function: Callable[..., Any], template: TraceTemplate
) -> None:
    """It stays inside its tensors, or says that it needs the alignment."""
    skip_what_the_tool_mistakes(template)
    for _, call in calls(function, template):
        if expected(function, template, call) is None:
            continue
        there = shifted(call, template, "cuda")
        try:
            function(**there)
        except ValueError as error:
            assert "multiple of" in str(error) or "aligned" in str(error)
        torch.cuda.synchronize()


HOPPER_DIMS = [
    *((64, 64), (128, 128), (192, 128), (256, 256)),
    pytest.param((96, 96), marks=pytest.mark.jit),
]
HOPPER_DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
@pytest.mark.parametrize("page_size", [0, 1, 4, 5, 16])
@pytest.mark.parametrize("dtypes", HOPPER_DTYPES, ids=str)
@pytest.mark.parametrize("dims", HOPPER_DIMS, ids=str)
def test_attention_for_hopper(
    dims: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], page_size: int, generator: Any
) -> None:
    """The calls of traces are too short for it.

    Tiles of three warpgroups have no splits here: with them racecheck reports the word that thread
    0 hands to the others of its CTA, as it does in any kernel that has used bar.arrive before: see
    "Racecheck" in docs/decisions.md.
    """
    workspace = torch.full((32 << 20,), 0xFF, dtype=torch.uint8, device="cuda")
    of_queries, of_keys = dtypes
    has_turns = dims[0] == 64 and of_queries == of_keys
    options = {"disable_split_kv": has_turns, "causal": True}
    options |= {"q_data_type": of_queries, "kv_data_type": of_keys}
    is_fp8 = of_queries == torch.float8_e4m3fn
    if is_fp8:
        options["o_data_type"] = torch.bfloat16
    rows, lens = [0, 70, 103], [150, 200]

    def tokens(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    q = tokens(of_queries, rows[-1], 4, dims[0])
    sizes = 4, 2, dims[0]
    bounds = torch.tensor(rows).int()
    wrapper: Any
    if page_size:
        pages = [-(-n // page_size) for n in lens]
        table = torch.tensor([0, *pages]).cumsum(0).int(), torch.arange(sum(pages)).int().cuda()
        last = torch.tensor([(n - 1) % page_size + 1 for n in lens]).int()
        caches = [tokens(of_keys, sum(pages), page_size, 2, d) for d in dims]
        wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa3")
        wrapper.plan(bounds, *table, last, *sizes, page_size, head_dim_vo=dims[1], **options)
        out = wrapper.run(q, tuple(caches))
    else:
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        caches = [tokens(of_keys, sum(lens), 2, d) for d in dims]
        wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa3")
        wrapper.plan(bounds, starts, *sizes, head_dim_vo=dims[1], **options)
        out = wrapper.run(q, *caches)
    torch.cuda.synchronize()
    assert wrapper._plan.shape.sm90
    assert wrapper._plan.multiplies_fp8 == (is_fp8 and dims != (96, 96))
    assert out.isfinite().all()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
@pytest.mark.skipif(not TOOL_KNOWS_MLA, reason="a false report of this tool")
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("dtypes", HOPPER_DTYPES[:3], ids=str)
@pytest.mark.parametrize("head_dims", [(512, 64), (512, 0)], ids=str)
def test_mla_for_hopper(
    head_dims: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    page_size: int,
    generator: Any,
) -> None:
    """Odd and even numbers of KV blocks, ends of blocks, splits, and several tiles of a CTA."""
    lens = [*range(60, 460, 3), 3000]
    queries = [1] * (len(lens) - 1) + [5]
    batch = Batch(queries, lens, generator, 16, head_dims, *dtypes)
    wrapper, arguments = batch.wrapper(page_size, generator, "fa3", True)
    out = wrapper.run(**arguments)
    torch.cuda.synchronize()
    assert wrapper._plan.shape.sm90
    assert out.isfinite().all()


@pytest.mark.usefixtures("two_launches")
@pytest.mark.parametrize("mode", ["half", "blocks"])
def test_experts_of_few_tokens(mode: str, generator: torch.Generator) -> None:
    """The sizes of traces are no multiples of 128."""
    for tokens, slots in ((1, 1), (3, 2), (8, 5)):
        out = draw(tokens, slots, 6, 384, 256, generator, mode=mode).run()
        torch.cuda.synchronize()
        assert out.isfinite().all()
