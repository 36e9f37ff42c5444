# SPDX-License-Identifier: Apache-2.0
"""Prefills of engines besides those of ``attention``: other masks, heads, pages and lengths.

Appended tokens, lengths that plan() gets on the GPU, full attention, a sliding window, pages of 1
and 64 tokens, the heads of other models, queries in e4m3. On Hopper most of them run on kernels of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _attention import Batch
from _harness import Case
from _script import script
from bench_attention import paged, ragged

#: Requests, and tokens of each.
SIZES = ((1, 1024), (1, 4096), (1, 16384), (8, 2048), (32, 512))
#: The same for the plainest rows alone.
MORE_SIZES = ((1, 8192), (1, 32768))
#: A server's step of prefills.
MIXED = (17, 9000, 300, 4000, 1200, 64, 7000, 2500)
#: Query heads, KV heads, and both head dimensions of other models, with one size each.
MODELS = ((64, 8, 128, 128), (28, 4, 128, 128), (32, 8, 64, 64), (16, 8, 256, 256))
MORE_MODELS = ((16, 16, 192, 128),)  # DeepSeek's prefill; there are no such pages
WINDOW = 1023
#: Requests, new tokens and all tokens of each.
APPENDS = (
    *((16, 1, 8192), (16, 8, 8192), (16, 16, 8192), (16, 64, 8192)),
    *((8, 64, 32768), (4, 64, 65536), (1, 512, 65536)),
)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Queries, keys and values of ``dtype``."""

    def batch(count: int, tokens: int, heads: tuple[int, ...] = (32, 8, 128), **more: int) -> Batch:
        lengths = [tokens] * count
        return Batch(lengths, lengths, *heads, dtype, dtype, **more)  # type: ignore[arg-type]

    for count, tokens in SIZES:
        shape = f"{count} x {tokens}"
        for on_device in (False, True):
            yield ragged(batch(count, tokens, on_device=on_device), shape)
            yield paged(batch(count, tokens, on_device=on_device), shape)
        for page in (1, 64):
            yield paged(batch(count, tokens, page=page), shape)
    for count, tokens in MORE_SIZES:
        yield ragged(batch(count, tokens), f"{count} x {tokens}")
        yield paged(batch(count, tokens), f"{count} x {tokens}")
    mixed = Batch(MIXED, MIXED, dtype=dtype, kv_dtype=dtype)
    for made in (mixed, mixed._replace(on_device=True)):
        yield ragged(made, f"{len(MIXED)} of {min(MIXED)} to {max(MIXED)}")
        yield paged(made, f"{len(MIXED)} of {min(MIXED)} to {max(MIXED)}")
    for *heads, dim_vo in MODELS + MORE_MODELS:
        more = {"dim_vo": dim_vo} if dim_vo != heads[2] else {}
        for count, tokens in ((1, 8192), (8, 2048)):
            yield ragged(batch(count, tokens, tuple(heads), **more), f"{count} x {tokens}")
            if not more:
                yield paged(batch(count, tokens, tuple(heads)), f"{count} x {tokens}")
    for count, tokens in SIZES:
        in_e4m3 = batch(count, tokens)._replace(kv_dtype=torch.float8_e4m3fn)
        yield ragged(in_e4m3, f"{count} x {tokens}")
        yield paged(in_e4m3, f"{count} x {tokens}")
    if dtype is torch.bfloat16:
        yield from _fp8_cases()
    yield ragged(batch(1, 8192, is_full=True), "1 x 8192")
    yield paged(batch(1, 8192, is_full=True), "1 x 8192")
    yield ragged(batch(1, 16384, window_left=WINDOW), "1 x 16384")
    yield paged(batch(1, 16384, window_left=WINDOW), "1 x 16384")
    for count, new, tokens in APPENDS:
        for on_device in (False, True):
            appended = Batch(
                [new] * count, [tokens] * count, dtype=dtype, kv_dtype=dtype, on_device=on_device
            )
            yield paged(appended, f"{count} x {new} of {tokens}")
            yield ragged(appended, f"{count} x {new} of {tokens}")


def _fp8_cases() -> Iterator[Case]:
    """Queries, keys and values that are all e4m3, with outputs in bfloat16."""
    e4m3 = torch.float8_e4m3fn

    def batch(count: int, tokens: int, heads: tuple[int, ...] = (32, 8, 128), **more: int) -> Batch:
        lengths = [tokens] * count
        return Batch(lengths, lengths, *heads, e4m3, e4m3, **more)  # type: ignore[arg-type]

    for count, tokens in SIZES:
        yield ragged(batch(count, tokens), f"{count} x {tokens}")
    for count, tokens in ((1, 16384), (8, 2048)):
        for page in (16, 1):
            yield paged(batch(count, tokens, page=page), f"{count} x {tokens}")
    yield ragged(batch(1, 8192, is_full=True), "1 x 8192")
    for *heads, dim_vo in MODELS + MORE_MODELS:
        more = {"dim_vo": dim_vo} if dim_vo != heads[2] else {}
        yield ragged(batch(1, 8192, tuple(heads), **more), "1 x 8192")


if __name__ == "__main__":
    script(__file__)
