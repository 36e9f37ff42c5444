# SPDX-License-Identifier: Apache-2.0
"""Buffers: those made once a process (ranges, slopes of ALiBi), and those that graphs keep."""

from __future__ import annotations

from collections.abc import Callable

from precast._base.torch import torch

#: Buffers that are made once a process, by name and device. Engines look for the range of a device
#: by what they passed for it, a string or a ``torch.device``.
_cache_buf: dict[tuple[str, torch.device | str], torch.Tensor] = {}
_MOST_INT32 = 2**31 - 1


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes a part of a CUDA graph."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def kept_buffer(
    name: str, device: torch.device | str, make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Make a buffer once, but for those of a CUDA graph: their memory is the graph's.

    Compiled code may become one.
    """
    key = (name, device)
    buffer = _cache_buf.get(key)
    if buffer is None:
        buffer = make()
        if not (torch.compiler.is_compiling() or is_capturing(torch.device(device))):
            _cache_buf[key] = buffer
    return buffer


def ceil_pow2(x: int) -> int:
    """Return the least power of two that is not below ``x``."""
    return 1 << (x - 1).bit_length()


_ceil_pow2 = ceil_pow2  # The name by which engines know it.


def _get_range_buf(seq_len: int, device: torch.device | str) -> torch.Tensor:
    """Return ``0, 1, ..., seq_len - 1`` as int32, a part of a buffer that is made once."""
    size = ceil_pow2(seq_len)
    return kept_buffer(
        f"range_{size}", device, lambda: torch.arange(size, device=device, dtype=torch.int32)
    )[:seq_len]


#: The least elements of a range with a step, so that one serves the batches of most engines.
_LEAST_STEPS = 1025
#: Ranges with a step that are kept, 4 KiB each; a graph may read one as long as the process lives.
_MOST_RANGES = 2048
_ranges: dict[tuple[int, int, int], torch.Tensor] = {}
#: The same, cut to the lengths that were asked for.
_parts: dict[tuple[int, int, int], torch.Tensor] = {}


def stepped_range(count: int, step: int, device: torch.device) -> tuple[torch.Tensor, bool]:
    """Return ``0, step, 2 * step, ...`` as int32, and whether it is made once a process.

    What is not kept, because a CUDA graph is captured or there are too many, lives as long as the
    caller has it.
    """
    asked = (count, step, -1 if device.index is None else device.index)
    part = _parts.get(asked)
    if part is not None:
        return part, True
    size = ceil_pow2(max(count, _LEAST_STEPS))
    if step * (size - 1) > _MOST_INT32:
        size = count
    key = (size, step, -1 if device.index is None else device.index)
    kept = _ranges.get(key)
    if kept is None:
        i32 = {"dtype": torch.int32, "device": device}
        # A range takes no step of 0.
        kept = (
            torch.arange(0, (size - 1) * step + 1, step, **i32)
            if step
            else torch.zeros(size, **i32)
        )
        if is_capturing(device) or torch.compiler.is_compiling() or len(_ranges) >= _MOST_RANGES:
            return kept[:count], False
        _ranges[key] = kept
    part = kept[:count]
    if len(_parts) < _MOST_RANGES and not torch.compiler.is_compiling():
        _parts[asked] = part  # A view alone costs a sixth of a plan of a table.
    return part, True


def get_alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    r"""Compute the slope of each head for ALiBi.

    .. math:: m_h = 2^{-8 (h + 1) / n}

    for the largest power of two :math:`n` that is not above ``n_heads``; the heads behind it have
    every other slope of :math:`2n` heads.

    Parameters
    ----------
    n_heads : int
        Heads, at least 1.
    device : torch.device, optional
        Where the result is made.

    Returns
    -------
    torch.Tensor
        ``[n_heads]``, float32.

    Notes
    -----
    Source: Press et al., Train Short, Test Long, arXiv:2108.12409.

    Examples
    --------
    >>> get_alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    n = 1 << (n_heads.bit_length() - 1)
    # Made on the device: a CUDA graph that is captured takes no copy from the host.
    heads = torch.arange(n_heads, dtype=torch.float64, device=device)
    exponents = torch.where(heads < n, -8.0 * (heads + 1) / n, -4.0 * (2 * (heads - n) + 1) / n)
    return torch.exp2(exponents).float()


def alibi_slopes(num_qo_heads: int, device: torch.device) -> torch.Tensor:
    """Return the slopes, which are made once a process."""
    return kept_buffer(
        f"alibi_slopes_{num_qo_heads}", device, lambda: get_alibi_slopes(num_qo_heads, device)
    )


def table_source(
    buffer: torch.Tensor | None, table: torch.Tensor | None, non_blocking: bool
) -> torch.Tensor | None:
    """Return what the launch of a plan copies into a buffer; None if the table is in it.

    The caller has put it there, or it is copied now: from the host, or from another dtype.
    """
    if buffer is None or table is None:
        return None
    if table.dtype is torch.int32 and table.device == buffer.device and table.is_contiguous():
        return None if table.data_ptr() == buffer.data_ptr() else table
    copy_to_start(buffer, table, non_blocking)
    return None


def copy_to_start(buffer: torch.Tensor, values: torch.Tensor, non_blocking: bool) -> None:
    """Copy to the first elements of a buffer of CUDA graphs."""
    # Why: the source of a part may change before an asynchronous copy has read it.
    whole = values.numel() == buffer.numel()
    part = buffer if whole else buffer[: values.numel()]
    part.copy_(values, non_blocking=non_blocking and whole)
