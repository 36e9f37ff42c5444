# SPDX-License-Identifier: Apache-2.0
"""Apply penalties, mask, temperature and filters to logits, and draw tokens, in one launch."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._ops.sampling._arguments import (
    DERIVED,
    Real,
    Whole,
    check_by_row,
    check_random,
    check_vocabulary,
    explain_draw,
    kinds,
    reject_nan,
)
from precast._ops.sampling._docs import DRAW, ROWS
from precast._ops.sampling._fused_reference import sample_reference as sample_reference
from precast._ops.sampling._fused_reference import sampled_tokens
from precast._ops.sampling._trace import draw_trace
from precast.api_logging import precast_api

MAX_TOP_LOGPROBS = 32
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


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


def _check(logits: torch.Tensor, random: tuple[Any, ...], **given: Any) -> None:
    check_vocabulary("sample", "logits", logits)
    by_row = {name: given[name] for name in (*_FILTERS, *_PENALTIES) if name in given}
    check_by_row("sample", logits, "logits", by_row)
    top = given.get("top_tokens")
    if top is not None and top.shape[1] > MAX_TOP_LOGPROBS:
        raise ValueError(
            f"sample: top_tokens must have at most {MAX_TOP_LOGPROBS} columns, got {top.shape[1]}"
        )
    check_random("sample", logits, "logits", logits.shape[0], random[0], random[2])


def _write(out: torch.Tensor, valid: torch.Tensor | None, **given: Any) -> None:
    names = inspect.signature(sample_reference).parameters
    results = sample_reference(**{name: given[name] for name in names if name in given})
    others = (given.get(name) for name in ("logprobs", "top_tokens", "top_token_logprobs"))
    for target, result in zip((out, *others, valid), results):
        if target is not None:
            target.copy_(result)


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
    check=_check,
    write=_write,
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
    check=_check,
    write=_write,
    derived=DERIVED,
    kinds=kinds("sample", "logits"),
    function="sample",
)


@precast_api(trace=draw_trace("sample", "logits", _FILTERS, sampled_tokens))
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
    seed: Whole | None = None,
    offset: Whole | None = None,
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
    _check_penalties(
        *(repetition_penalty, frequency_penalty, presence_penalty), prompt_mask, output_counts
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
    penalties = repetition_penalty, frequency_penalty, presence_penalty
    masks = prompt_mask, output_counts, bitmask
    _SAMPLE.launch(logits, *filters, *penalties, *masks, random, *result, enable_pdl)
    return result


def _check_penalties(
    repetition: Real,
    frequency: Real,
    presence: Real,
    prompt_mask: torch.Tensor | None,
    output_counts: torch.Tensor | None,
) -> None:
    """Raise for a penalty without the mask or counts that it needs; it would have no effect."""
    if output_counts is not None:
        return
    for name, penalty in (("frequency_penalty", frequency), ("presence_penalty", presence)):
        if not isinstance(penalty, (int, float)) or penalty != 0:
            raise ValueError(f"sample: {name} needs output_counts, got None")
    if prompt_mask is None and (not isinstance(repetition, (int, float)) or repetition != 1):
        raise ValueError("sample: repetition_penalty needs prompt_mask or output_counts, got None")
