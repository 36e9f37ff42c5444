# SPDX-License-Identifier: Apache-2.0
"""The description of a value in one line, and the statistics of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from precast._base.torch import torch
from precast.api_logging._encoding import item_path
from precast.api_logging._memory import opaque

#: Elements that statistics convert to float32 at a time.
_CHUNK = 1 << 24


def tensors_of(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by path, such as ``name.0`` or ``name.key`` in a list or a dict."""
    found: dict[str, torch.Tensor] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif isinstance(value, (list, tuple)):
            for position, item in enumerate(value):
                visit(f"{path}.{position}", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item_path(path, key), item)

    for name, value in values.items():
        visit(name, value)
    return found


def describe(value: Any) -> str:
    """A value in one line; a tensor without reading its elements."""
    if isinstance(value, torch.Tensor):
        kind = type(value).__name__
        word = "" if kind == "Tensor" else f"{kind} "
        try:
            strides = f"strides {list(value.stride())}"
        except RuntimeError:  # a sparse tensor
            strides = f"layout {value.layout}"
        dtype = str(value.dtype).partition(".")[2]
        return f"{word}{dtype}{list(value.shape)} on {value.device}, {strides}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(describe, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)}: {describe(item)}" for k, item in value.items()) + "}"
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _key(key: object) -> str:
    """A key without line breaks, which could look like lines of the log."""
    return key if isinstance(key, str) and key.isprintable() else repr(key)


def statistics(tensor: torch.Tensor) -> str:
    """The number of NaN and Inf; min, max and mean of the finite elements. Waits for the GPU."""
    reason = opaque(tensor)
    if reason is not None:
        return f"[statistics skipped: the tensor {reason}]"
    if tensor.numel() == 0:
        return "empty"
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    with torch.no_grad():
        rows = [_chunk_statistics(chunk) for chunk in _chunks(tensor.detach())]
        # One transfer for all chunks.
        columns = torch.stack(rows).cpu().unbind(dim=1)
    nan, inf, count, total = (float(column.sum()) for column in columns[:4])
    text = f"nan {nan:.0f}, inf {inf:.0f}"
    if count == 0:
        return f"no finite element, {text}"
    low, high = float(columns[4].min()), float(columns[5].max())
    return f"min {low:.6g}, max {high:.6g}, mean {total / count:.6g}, {text}"


def _chunk_statistics(chunk: torch.Tensor) -> torch.Tensor:
    """float64 [6]: the number of NaN, Inf and finite elements; sum, min and max of the finite."""
    exact = not chunk.is_floating_point() and chunk.element_size() >= 4
    values = chunk.to(torch.float64 if exact or chunk.dtype == torch.float64 else torch.float32)
    nan, inf = values.isnan(), values.isinf()
    bad = nan | inf
    infinite = float("inf")
    return torch.stack(
        [
            nan.sum().double(),
            inf.sum().double(),
            (~bad).sum().double(),
            values.masked_fill(bad, 0).sum(dtype=torch.float64),
            values.masked_fill(bad, infinite).min().double(),
            values.masked_fill(bad, -infinite).max().double(),
        ]
    )


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in chunks, so that the statistics of a large tensor need little memory."""
    if tensor.numel() <= _CHUNK:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK)
    else:
        rows = _CHUNK * tensor.shape[0] // tensor.numel()
        for part in tensor.split(rows) if rows else tensor.unbind():
            yield from (part,) if rows else _chunks(part)


def is_capturing(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a CUDA graph is captured on the current stream of any of the tensors' devices."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False
