# SPDX-License-Identifier: Apache-2.0
"""``sample`` in plain PyTorch."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.sampling._filters import parameter, weights_of_logits
from precast._ops.sampling._formula import chosen
from precast._ops.sampling._fused_formula import penalized, top_of, with_mask
from precast._ops.sampling._inverse_cdf import row_sums


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
    """:func:`sample` in plain PyTorch, tokens too but where ``exp`` rounds.

    Parameters
    ----------
    logits : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16, any device.
    temperature, top_p, min_p : torch.Tensor or float
        A number, or ``[rows]``.
    top_k : torch.Tensor or int
        A number, or ``[rows]``.
    repetition_penalty, frequency_penalty, presence_penalty : torch.Tensor or float
        A number, or ``[rows]``.
    prompt_mask, bitmask : torch.Tensor, optional
        ``[rows, ceil(vocabulary / 32)]``, int32.
    output_counts : torch.Tensor, optional
        ``[rows, vocabulary]``, int32.
    filter_apply_order : str
        ``"top_k_first"`` or ``"joint"``.
    seed, offset : torch.Tensor or int
        Key and counter of the random numbers.
    top_logprobs : int
        How many of the likeliest tokens.

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
    x = penalized(
        *(logits, repetition_penalty, frequency_penalty, presence_penalty),
        *(prompt_mask, output_counts),
    )
    x = with_mask(x, bitmask)
    heat = parameter(temperature, x.shape[0], torch.float32, x.device)
    greedy = heat == 0
    heat = heat.masked_fill(greedy, 1)
    weights = weights_of_logits(x, heat)
    joint = filter_apply_order == "joint"
    tokens, valid = chosen(weights, None, top_k, top_p, min_p, joint, seed, offset)
    first = (x == x.amax(dim=1, keepdim=True)).to(torch.int32).argmax(dim=1)
    tokens = torch.where(greedy[:, 0] & valid, first, tokens)
    scale = 1 / heat
    logs = (x - x.max(dim=1, keepdim=True).values) * scale - row_sums(weights)[:, None].log()
    logs = logs.masked_fill(~valid[:, None], torch.nan)
    top_tokens, top_logs = top_of(x, logs, valid, top_logprobs)
    return (
        tokens.to(torch.int32),
        logs.gather(1, tokens[:, None])[:, 0],
        top_tokens,
        top_logs,
        valid,
    )


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
    """The tokens alone, which is what a trace describes."""
    penalties = repetition_penalty, frequency_penalty, presence_penalty
    masks = prompt_mask, output_counts, bitmask
    filters = temperature, top_k, top_p, min_p
    rest = filter_apply_order, seed, offset
    return sample_reference(logits, *filters, *penalties, *masks, *rest)[0]
