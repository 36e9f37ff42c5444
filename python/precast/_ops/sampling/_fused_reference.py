# SPDX-License-Identifier: Apache-2.0
"""The reference of ``sample``, in plain PyTorch."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.sampling._formula import draw, parameter, weights_of_logits
from precast._ops.sampling._inverse_cdf import row_sums


def unpacked(mask: torch.Tensor, size: int) -> torch.Tensor:
    """Unpack the bits of int32 words, the lowest first, to ``[rows, size]`` bools."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask[:, :, None] >> bits & 1).flatten(1)[:, :size].bool()


def penalized(
    logits: torch.Tensor,
    repetition: torch.Tensor | float,
    frequency: torch.Tensor | float,
    presence: torch.Tensor | float,
    prompt_mask: torch.Tensor | None,
    output_counts: torch.Tensor | None,
) -> torch.Tensor:
    """Lower logits of tokens of the prompt and of the output; float32."""
    x = logits.float()
    rows, size = x.shape
    seen = torch.zeros_like(x, dtype=torch.bool)
    if prompt_mask is not None:
        seen |= unpacked(prompt_mask, size)
    if output_counts is not None:
        seen |= output_counts > 0
    r, f, s = (
        parameter(penalty, rows, torch.float32, x.device)
        for penalty in (repetition, frequency, presence)
    )
    x = torch.where(seen, torch.where(x > 0, x / r, x * r), x)
    if output_counts is not None:
        x = x - f * output_counts.float()
        x = x - s * (output_counts > 0).float()
    return x


def top_of(
    x: torch.Tensor, logs: torch.Tensor, valid: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the ``count`` largest of each row, equal ones by their number, and their logarithms."""
    size = min(count, x.shape[1])
    order = x.sort(dim=1, descending=True, stable=True).indices[:, :size]
    top = logs.gather(1, order)
    order = order.where((top > -torch.inf) & valid[:, None], -1)
    missing = count - size
    order = torch.nn.functional.pad(order, (0, missing), value=-1)
    top = torch.nn.functional.pad(top, (0, missing), value=-torch.inf)
    top = top.masked_fill(~valid[:, None], -torch.inf)
    return order.to(torch.int32), top


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor | float = 1.0,
    top_k: torch.Tensor | int = 0,
    top_p: torch.Tensor | float = 1.0,
    min_p: torch.Tensor | float = 0.0,
    repetition_penalty: torch.Tensor | float = 1.0,
    frequency_penalty: torch.Tensor | float = 0.0,
    presence_penalty: torch.Tensor | float = 0.0,
    prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
    top_logprobs: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`sample` in plain PyTorch on any device; ``exp`` may round differently.

    Returns
    -------
    tuple of torch.Tensor
        Tokens, their log-probabilities, the likeliest tokens, theirs, and validity.

    Examples
    --------
    >>> import torch
    >>> sample_reference(torch.tensor([[0.0, 2.0, 1.0]]), temperature=0.0)[0].tolist()
    [1]
    """
    penalties = repetition_penalty, frequency_penalty, presence_penalty
    x = penalized(logits, *penalties, prompt_mask, output_counts)
    if bitmask is not None:
        x = x.masked_fill(~unpacked(bitmask, x.shape[1]), -torch.inf)
    divisor = parameter(temperature, x.shape[0], torch.float32, x.device)
    greedy = divisor == 0
    divisor = divisor.masked_fill(greedy, 1)
    weights = weights_of_logits(x, divisor)
    joint = filter_apply_order == "joint"
    tokens, valid = draw(weights, None, top_k, top_p, min_p, joint, seed, offset)
    first = (x == x.amax(dim=1, keepdim=True)).to(torch.int32).argmax(dim=1)
    tokens = torch.where(greedy[:, 0] & valid, first, tokens)
    logs = (x - x.max(dim=1, keepdim=True).values) * (1 / divisor) - row_sums(weights)[
        :, None
    ].log()
    logs = logs.masked_fill(~valid[:, None], torch.nan)
    top_tokens, top_logs = top_of(x, logs, valid, top_logprobs)
    token_logs = logs.gather(1, tokens[:, None])[:, 0]
    return tokens.to(torch.int32), token_logs, top_tokens, top_logs, valid


def sampled_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | float = 1.0,
    top_k: torch.Tensor | int = 0,
    top_p: torch.Tensor | float = 1.0,
    min_p: torch.Tensor | float = 0.0,
    repetition_penalty: torch.Tensor | float = 1.0,
    frequency_penalty: torch.Tensor | float = 0.0,
    presence_penalty: torch.Tensor | float = 0.0,
    prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Return the tokens alone, which are what a trace describes."""
    penalties = repetition_penalty, frequency_penalty, presence_penalty
    masks = prompt_mask, output_counts, bitmask
    filters = temperature, top_k, top_p, min_p
    rest = filter_apply_order, seed, offset
    return sample_reference(logits, *filters, *penalties, *masks, *rest)[0]
