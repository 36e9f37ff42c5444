# SPDX-License-Identifier: Apache-2.0
"""Apply penalties, mask, temperature and filters to logits, and draw tokens, in one launch."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, accepted, op
from precast._ops.sampling._arguments import (
    DERIVED,
    FILTERS,
    Real,
    Whole,
    check_rows,
    explain_draw,
    kinds,
    reject_nan,
)
from precast._ops.sampling._docs import DRAW, ROWS
from precast._ops.sampling._formula import draw, parameter, weights_of_logits
from precast._ops.sampling._inverse_cdf import row_sums
from precast._ops.sampling._trace import draw_trace
from precast.api_logging import precast_api

MAX_TOP_LOGPROBS = 32


class Sampled(NamedTuple):
    """What :func:`sample` returns; what was not asked for is None.

    Attributes
    ----------
    tokens : torch.Tensor
        ``[rows]``, int32.
    logprobs : torch.Tensor or None
        ``[rows]``, float32: the log-probability of each token.
    top_tokens, top_logprobs : torch.Tensor or None
        ``[rows, n]``, int32 and float32: the likeliest tokens, descending.
    valid : torch.Tensor or None
        ``[rows]``, bool.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    valid: torch.Tensor | None = None


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
    top = top.masked_fill(~valid[:, None], -torch.inf)
    order = order.where(top > -torch.inf, -1)
    missing = 0, count - size
    order = torch.nn.functional.pad(order, missing, value=-1)
    return order.to(torch.int32), torch.nn.functional.pad(top, missing, value=-torch.inf)


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
    filters = top_k, top_p, min_p, filter_apply_order
    tokens, valid = draw(weights, None, *filters, seed, offset)
    first = (x == x.amax(dim=1, keepdim=True)).to(torch.int32).argmax(dim=1)
    tokens = torch.where(greedy[:, 0] & valid, first, tokens)
    logs = (x - x.max(dim=1, keepdim=True).values) * (1 / divisor)
    logs = (logs - row_sums(weights)[:, None].log()).masked_fill(~valid[:, None], torch.nan)
    top_tokens, top_logs = top_of(x, logs, valid, top_logprobs)
    token_logs = logs.gather(1, tokens[:, None])[:, 0]
    return tokens.to(torch.int32), token_logs, top_tokens, top_logs, valid


def sampled_tokens(logits: torch.Tensor, **given: Any) -> torch.Tensor:
    """Return the tokens alone, which are what a trace describes."""
    return sample_reference(logits, **given)[0]


# What a template passes on is checked against the signature.
sampled_tokens.__signature__ = inspect.signature(sample_reference)  # type: ignore[attr-defined]


def _tokens_and_valid(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    results = sample_reference(**accepted(sample_reference, given))
    return results[0], results[-1]


_LOGITS = (
    "logits:T=f32|f16|bf16[rows,vocab] temperature:temperature top_k:top_k top_p:top_p min_p:min_p "
    "filter_apply_order:order"
)
_SAMPLE = Export(
    "sampling_fused",
    "sample",
    f"{_LOGITS} repetition_penalty:repetition frequency_penalty:frequency "
    "presence_penalty:presence prompt_mask?:i32[rows,(vocab+31)//32] "
    "output_counts?:i32[rows,vocab] bitmask?:i32[rows,(vocab+31)//32] random:random out!:i32[rows] "
    "logprobs!?:f32[rows] top_tokens!?:i32[rows,count] top_token_logprobs!?:f32[rows,count] "
    "valid!?:bool[rows] enable_pdl:pdl",
    reference=sample_reference,
    check=check_rows,
    derived={
        **DERIVED,
        "return_logprobs": lambda logprobs: logprobs is not None,
        "top_logprobs": lambda top_tokens: (
            0 if top_tokens is None or not top_tokens.dim() else top_tokens.shape[1]
        ),
    },
    kinds=kinds("sample", "logits"),
)

# Without penalties, masks and log-probabilities, this kernel draws the same tokens in less time.
_SAMPLE_TOKENS = Export(
    "sampling",
    "sample_tokens",
    f"{_LOGITS} random:random out!:i32[rows] valid!?:bool[rows] enable_pdl:pdl",
    reference=_tokens_and_valid,
    check=check_rows,
    derived=DERIVED,
    kinds=kinds("sample", "logits"),
    function="sample",
)


@precast_api(trace=draw_trace("sample", "logits", ("temperature", *FILTERS), sampled_tokens))
@op("sampling_fused", explain=explain_draw)
@documented(DRAW, ROWS)
def sample(
    logits: torch.Tensor,
    temperature: Real = 1.0,
    top_k: Whole = 0,
    top_p: Real = 1.0,
    min_p: Real = 0.0,
    repetition_penalty: Real = 1.0,
    frequency_penalty: Real = 0.0,
    presence_penalty: Real = 0.0,
    prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    generator: torch.Generator | None = None,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
    return_logprobs: bool = False,
    top_logprobs: int = 0,
    return_valid: bool = False,
    check_nan: bool = False,
    enable_pdl: bool | None = None,
) -> Sampled:
    r"""Draw a token from each row of logits, after all that a request may ask for, in one launch.

    In this order: penalties, allowed tokens, temperature, the filters, the draw:

    .. math::

        y_t &= x_t / r \text{ if } x_t > 0 \text{ else } x_t r,
            \quad t \text{ in the prompt or the output} \\
        z_t &= y_t - f \, count_t - s \, [count_t > 0], \quad
            z_t = -\infty \text{ for what is not allowed} \\
        P(out = t) &\propto \exp(z_t / T), \quad t \text{ kept by top-k, top-p and min-p}

    Rows, filters and random numbers are as :mod:`precast.sampling` says.

    Parameters
    ----------
    temperature : float or torch.Tensor
        :math:`T`, or float32 ``[rows]``; from 0 on. 0 is greedy: the first of the largest, no draw.
        A negative one in a tensor is not checked, and its row means nothing.
    top_k : int or torch.Tensor
        How many are kept, or int32 ``[rows]``; below 1 all. Tokens whose weights are equal at the
        temperature count as equal.
    repetition_penalty : float or torch.Tensor
        :math:`r`, or float32 ``[rows]``; 1 is none. Needs ``prompt_mask`` or ``output_counts``.
    frequency_penalty : float or torch.Tensor
        :math:`f`, or float32 ``[rows]``; 0 is none. Needs ``output_counts``.
    presence_penalty : float or torch.Tensor
        :math:`s`, or float32 ``[rows]``; 0 is none. Needs ``output_counts``.
    prompt_mask : torch.Tensor, optional
        ``[rows, ceil(vocabulary / 32)]``, int32: bit ``t % 32`` of word ``t // 32`` is set for each
        token ``t`` of the prompt.
    output_counts : torch.Tensor, optional
        ``[rows, vocabulary]``, int32: how often each token is in the output so far.
    bitmask : torch.Tensor, optional
        ``[rows, ceil(vocabulary / 32)]``, int32, bits as in ``prompt_mask``: the tokens that are
        allowed, as grammar engines (XGrammar, llguidance) make it. Default: all.
    return_logprobs : bool
        Return the log-probability of each token.
    top_logprobs : int
        How many of the likeliest tokens to return with their log-probabilities; 0 to 32.

    Returns
    -------
    Sampled
        ``(tokens, logprobs, top_tokens, top_logprobs, valid)``; what was not asked for is None. A
        row with a NaN or plus infinity, or where no token is left, has token 0, NaN as
        log-probability, and is not valid. Among the likeliest, equal ones come by their number;
        where fewer tokens are possible, or none, -1 and minus infinity follow.

    Raises
    ------
    ValueError
        Arguments that do not fit; a temperature below 0; a penalty without the counts or the mask
        that it needs; ``top_logprobs`` above 32; a NaN that ``check_nan`` finds.

    Notes
    -----
    Log-probabilities are those after penalties, allowed tokens and temperature (1 where it is 0)
    and before the filters. Reads logits, masks and counts once.

    Examples
    --------
    >>> import torch, precast
    >>> logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]])
    >>> allowed = torch.tensor([[0b101], [0b111]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     out = precast.sample(logits, 0.0, bitmask=allowed, return_logprobs=True)
    >>> out.tokens.tolist(), [round(x, 4) for x in out.logprobs.tolist()]
    ([2, 0], [-0.3133, -0.0134])
    """
    # Without the counts or the mask that it needs, a penalty would have no effect.
    if output_counts is None:
        penalties = ("frequency_penalty", frequency_penalty), ("presence_penalty", presence_penalty)
        for name, penalty in penalties:
            if not isinstance(penalty, (int, float)) or penalty != 0:
                raise ValueError(f"sample: {name} needs output_counts, got None")
        repeats = not isinstance(repetition_penalty, (int, float)) or repetition_penalty != 1
        if repeats and prompt_mask is None:
            raise ValueError(
                "sample: repetition_penalty needs prompt_mask or output_counts, got None"
            )
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(
            f"sample: top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {top_logprobs}"
        )
    if check_nan:
        reject_nan(logits, "logits")
    rows, device = logits.shape[0], logits.device
    top = rows, top_logprobs
    f32, i32 = torch.float32, torch.int32
    result = Sampled(
        torch.empty(rows, dtype=i32, device=device),
        torch.empty(rows, dtype=f32, device=device) if return_logprobs else None,
        torch.empty(top, dtype=i32, device=device) if top_logprobs else None,
        torch.empty(top, dtype=f32, device=device) if top_logprobs else None,
        torch.empty(rows, dtype=torch.bool, device=device) if return_valid else None,
    )
    random = generator, seed, offset
    filters = temperature, top_k, top_p, min_p, filter_apply_order
    masked = prompt_mask is not None or output_counts is not None or bitmask is not None
    if not (masked or return_logprobs or top_logprobs):
        # The penalties are none, or have been rejected.
        _SAMPLE_TOKENS.launch(logits, *filters, random, result.tokens, result.valid, enable_pdl)
        return result
    by_token = repetition_penalty, frequency_penalty, presence_penalty
    masks = prompt_mask, output_counts, bitmask
    _SAMPLE.launch(logits, *filters, *by_token, *masks, random, *result, enable_pdl)
    return result
