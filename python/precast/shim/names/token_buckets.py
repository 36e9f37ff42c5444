# SPDX-License-Identifier: Apache-2.0
"""The numbers of tokens that FlashInfer's autotuner measures."""

from __future__ import annotations

from itertools import takewhile


def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """Return numbers of tokens up to a largest one, at distances that grow with them.

    Powers of two of ``min_num_tokens`` up to 256, then multiples of 256 up to 2048 and of 512 up to
    4096, then powers of two, and ``max_num_tokens`` itself.

    Parameters
    ----------
    max_num_tokens : int
        The last number.
    min_num_tokens : int
        The first number, at least 1. Numbers above 256 do not depend on it.

    Returns
    -------
    tuple of int
        In order, none twice. precast tunes nothing; engines log them.

    Examples
    --------
    >>> get_hybrid_num_tokens_buckets(600)
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600)
    """
    first = max(min_num_tokens, 1)
    small = takewhile(lambda count: count <= 256, (first << shift for shift in range(9)))
    steps = [*range(512, 2049, 256), *range(2560, 4097, 512)]
    large = (1 << shift for shift in range(13, max(max_num_tokens, 1).bit_length()))
    fitting = {count for count in [*small, *steps, *large] if count <= max_num_tokens}
    return tuple(sorted({*fitting, max_num_tokens}))
