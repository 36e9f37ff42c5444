# SPDX-License-Identifier: Apache-2.0
"""Definitions describe the call that was made: each documented option, shapes and values."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trace_support import run_of

import precast
from precast import trace
from precast.trace.registry import read_call

BF16 = torch.bfloat16
LAYOUTS = [*precast.SfLayout]
ONE = torch.tensor([0.5])
FLAGS = [{}, {"is_sf_8x4_layout": True}, {"is_sf_swizzled_layout": False}]


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def data(*shape: int) -> torch.Tensor:
    made = torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(2))
    return made.to(torch.uint8)


INPUTS = [(5, 96), (2, 3, 64), (128, 48 * 2), (2, 1, 3, 32)]


def _calls() -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def add(name: str, *args: Any, **options: Any) -> None:
        calls.append((name, args, options))

    for shape in INPUTS:
        x = numbers(*shape)
        rows = x.numel() // shape[-1]
        for layout in LAYOUTS:
            add("nvfp4_quantize", x, ONE, layout)
            add("nvfp4_quantize", x, torch.rand(rows), layout)
            add("mxfp4_quantize", x, sfLayout=layout)
            add("mxfp8_quantize", x, sf_swizzle_layout=layout)
            add("mxfp8_quantize", x, alignment=128, sf_swizzle_layout=layout)
        for flag in (True, False):
            add("mxfp8_quantize", x, flag)
            add("mxfp8_quantize", x.half(), flag, 256)
        for flags in FLAGS:
            add("fp4_quantize", x, ONE, **flags)
            add("fp4_quantize", x, torch.rand(rows), is_global_scale_inversed=True, **flags)
            add("fp4_quantize", x, None, 32, True, **flags)
            add("fp4_quantize", x.half(), ONE, 32, True, **flags)
        packed = data(*shape[:-1], shape[-1] // 2)
        eights = x.to(torch.float8_e4m3fn)
        with precast.reference_mode():
            for layout in LAYOUTS:
                scales = precast.mxfp4_quantize(x, sfLayout=layout)[1]
                add("mxfp4_dequantize", packed, scales, layout)
                add("mxfp4_dequantize", packed, scales.flatten(), layout)
                for dtype in (None, torch.float32, torch.float16, BF16):
                    add("mxfp8_dequantize", eights, scales, layout, dtype)
            for flags in FLAGS:
                of_16 = precast.fp4_quantize(x, ONE, **flags)[1]
                of_32 = precast.fp4_quantize(x, None, 32, True, **flags)[1]
                to_float = "e2m1_and_ufp8sf_scale_to_float"
                add(to_float, packed, of_16, ONE, **flags)
                add(to_float, packed, of_32, ONE[0], 32, **flags)
                add(to_float, packed, of_32, None, 32, 0, **flags)
                add(to_float, packed, of_16, ONE, 16, 0, **flags)
        scales = data(*shape[:-1], shape[-1] // 16)
        for of in (x, x.half()):
            add("nvfp4_kv_quantize", of, ONE)
            add("nvfp4_kv_quantize", of, ONE[0])
        add("nvfp4_kv_dequantize", packed, scales, ONE)
        for dtype in (torch.float32, torch.float16, BF16):
            add("nvfp4_kv_dequantize", packed, scales, ONE, dtype)
            add("nvfp4_kv_dequantize", packed, scales.flatten(), ONE[0], dtype)
    for scales in (data(5, 6), data(3, 130, 6), data(5, 6).to(BF16)):
        add("block_scale_interleave", scales)
    for order in ("big", "little"):
        for truth in (data(77) > 50, data(77), numbers(77)):
            add("packbits", truth, order)
            for dtype in (torch.int32, torch.int64):
                add("segment_packbits", truth, torch.tensor([0, 3, 50, 77], dtype=dtype), order)
    return calls


CALLS = _calls()


def _id(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> str:
    name, args, options = call
    shapes = ["x".join(map(str, a.shape)) if hasattr(a, "shape") else str(a) for a in args]
    return "-".join([name, *shapes, *(f"{k}={v}" for k, v in options.items())])


@pytest.mark.parametrize("call", CALLS, ids=map(_id, CALLS))
def test_a_definition_is_of_the_call_that_was_made(call: Any) -> None:
    name, args, options = call
    function = getattr(precast, name)
    definition = trace.fi_trace(function, *args, **options)
    _, template, reading = read_call(function, args, options)
    import inspect

    bound = inspect.signature(function).bind(*args, **options)
    bound.apply_defaults()
    values = template.values(bound.arguments)
    with precast.reference_mode():
        result = function(*args, **options)
    results = result if isinstance(result, tuple) else (result,)
    alone = run_of(definition)(*values)
    alone = alone if isinstance(alone, tuple) else (alone,)
    assert len(definition["outputs"]) == len(results) == len(alone)
    for (key, output), mine, other in zip(definition["outputs"].items(), results, alone):
        for axis, size in zip(output["shape"], mine.shape, strict=True):
            assert reading.sizes.get(axis, size) == size, (key, axis)
            assert axis in reading.sizes or definition["axes"][axis] == {
                "type": "var",
                "description": "The sum of ceil(length / 8) of the segments.",
            }
        assert output["dtype"] == str(mine.dtype).removeprefix("torch."), key
        torch.testing.assert_close(other, mine, rtol=0, atol=0, equal_nan=True)
    for row, value in zip(definition["inputs"].values(), values):
        if isinstance(value, torch.Tensor):
            assert [reading.sizes[axis] for axis in row["shape"]] == [*value.shape]
    sizes = {**template.whole_numbers(bound.arguments), **reading.sizes}
    for constraint in definition["constraints"]:
        assert eval(constraint, {}, sizes) is True, constraint


@pytest.mark.parametrize("name", sorted({name for name, _, _ in CALLS}))
def test_calls_in_one_process_have_different_names(name: str) -> None:
    """Two definitions of one name would lose the second one."""
    of_name: dict[str, Any] = {}
    for op, args, options in CALLS:
        if op == name and not any(t is not None and _is_wide(t) for t in args):
            _, template, reading = read_call(getattr(precast, op), args, options)
            key = template.key(reading)
            assert of_name.setdefault(template.name(reading), key) == key


def _is_wide(value: Any) -> bool:
    return getattr(value, "dtype", None) == torch.int64


def test_orders_and_recipes_have_definitions_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PRECAST_TRACE_DUMP", "1")
    monkeypatch.setenv("PRECAST_TRACE_DUMP_DIR", str(tmp_path))
    x = numbers(6, 160)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (precast.packbits, (data(29), "big")),
        (precast.packbits, (data(29), "little")),
        (precast.fp4_quantize, (x, ONE)),
        (precast.fp4_quantize, (x, None, 32, True)),
        (precast.fp4_quantize, (x, ONE, 16, False, False)),
    ]
    with caplog.at_level(logging.WARNING), precast.reference_mode():
        for function, args in calls:
            function(*args)
            trace.on_call(function, args, {})
    assert not caplog.records
    texts = [json.loads(p.read_text()) for p in tmp_path.rglob("*.json")]
    found = {text["name"]: text["description"] for text in texts}
    assert len(found) == len(calls)
    assert "lowest" in found["packbits_little_n29_u8"]
    assert "highest" in found["packbits_n29_u8"]


def test_column_major_calls_have_no_definition() -> None:
    with pytest.raises(ValueError, match="rows of stride 1 have a definition"):
        precast.fi_trace(precast.fp4_quantize, numbers(32, 6).T, ONE)
