# SPDX-License-Identifier: Apache-2.0
"""Find which tokens of a draft the target model takes over, and draw the next one."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_rank
from precast._ops.sampling._arguments import DERIVED, check_random, check_vocabulary, kinds
from precast._ops.sampling._docs import DRAW, ROWS
from precast._ops.sampling._formula import draw
from precast._ops.sampling._philox import uniforms
from precast._ops.sampling._trace import OFFSET, SEED, VOCABULARY
from precast.api_logging import precast_api
from precast.trace import Tensor, TraceTemplate, Var

FIRST_TEST = 2  # The draw number of a draft's first position; that of the last token is 0.


def chain_speculative_sampling_reference(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`chain_speculative_sampling` in plain PyTorch, counters from 0: the same tokens."""
    batch, count, size = draft_probs.shape
    device = draft_probs.device
    draft, target = draft_probs.float(), target_probs.float()
    ids = draft_token_ids.long()
    at = ids.clamp(0, size - 1)[:, :, None]
    q, p = draft.gather(2, at)[:, :, 0], target[:, :count].gather(2, at)[:, :, 0]
    tests = [uniforms(seed, offset, batch, FIRST_TEST + i, device)[:, 0] for i in range(count)]
    u = torch.stack(tests, dim=1) if tests else q
    passes = (u * q < p) & (ids >= 0) & (ids < size)
    prefix = passes.to(torch.int32).cumprod(dim=1)
    emitted = prefix.sum(dim=1)
    rows = torch.arange(batch, device=device)
    last = target[rows, emitted]
    if count > 0:
        left = (last - draft[rows, emitted.clamp(max=count - 1)]).clamp(min=0)
        has_mass = left.amax(dim=1) > 0
        last = torch.where(((emitted < count) & has_mass)[:, None], left, last.clamp(min=0))
    token, _ = draw(last.clamp(min=0), seed=seed, offset=offset)
    places = torch.arange(count + 1, device=device)
    tokens = torch.nn.functional.pad(ids, (0, 1)).where(places < emitted[:, None], -1)
    tokens[rows, emitted] = token
    accepted = passes.sum(dim=1)
    return tokens.to(draft_token_ids.dtype), accepted.to(torch.int32), emitted.to(torch.int32)


def _check(export: str, draft_probs: torch.Tensor, random: tuple[Any, ...]) -> None:
    check_vocabulary(export, "draft_probs", draft_probs)
    check_random(export, "draft_probs", draft_probs, random, len(draft_probs))


def _write(out: torch.Tensor, **given: Any) -> None:
    names = ("draft_probs", "draft_token_ids", "target_probs", "seed", "offset")
    tokens, passed, prefix = chain_speculative_sampling_reference(*(given[n] for n in names))
    out.copy_(tokens)
    given["maybe_output_accepted_token_num"] += passed
    given["maybe_output_emitted_draft_token_num"] += prefix


_CHAIN = Export(
    "sampling",
    "chain_speculative_sampling",
    "draft_probs:T=f32|f16|bf16[batch,count,vocab] draft_token_ids:i32|i64[batch,count] "
    "target_probs:T[batch,count+1,vocab] maybe_output_accepted_token_num!:i32[batch] "
    "maybe_output_emitted_draft_token_num!:i32[batch] random:random "
    "out!:i32|i64[batch,count+1] enable_pdl:pdl_on",
    check=_check,
    write=_write,
    derived={name: DERIVED[name] for name in ("seed", "offset")},
    kinds=kinds("chain_speculative_sampling", "draft_probs"),
)

_TRACE = TraceTemplate(
    op_type="sampling",
    name_prefix="chain_speculative_sampling",
    description="Takes over draft tokens by rejection sampling and draws the next token",
    axes={
        "batch_size": Var("Requests."),
        "num_speculate_tokens": Var("Tokens of a draft."),
        "num_target": Var("With the one that follows.", value="num_speculate_tokens + 1"),
        "vocab_size": VOCABULARY,
    },
    inputs={
        "draft_probs": Tensor(["batch_size", "num_speculate_tokens", "vocab_size"]),
        "draft_token_ids": Tensor(["batch_size", "num_speculate_tokens"], dtype="int32"),
        "target_probs": Tensor(["batch_size", "num_target", "vocab_size"]),
        "seed": SEED,
        "offset": OFFSET,
    },
    outputs={
        "output_token_ids": Tensor(["batch_size", "num_target"], dtype="int32"),
        "output_accepted_token_num": Tensor(["batch_size"], dtype="int32"),
        "output_emitted_draft_token_num": Tensor(["batch_size"], dtype="int32"),
    },
    reference=chain_speculative_sampling_reference,
)


@precast_api(trace=_TRACE)
@op("sampling")
@documented(DRAW, ROWS)
def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: torch.Tensor | int | None = None,
    offset: torch.Tensor | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Take over the draft tokens that the target model would have drawn, and draw one more.

    A token :math:`x_j` of the draft stands with probability :math:`\min(1, p_j(x_j) / q_j(x_j))`,
    for the target's distribution :math:`p` and the draft's :math:`q`. After the tokens that stand
    one more is drawn: at the first that does not, from :math:`\max(p_j - q_j, 0)`; where all stand,
    from the target's last distribution. So all tokens are distributed as the target's. Rows and
    random numbers are as :mod:`precast.sampling` says, with a position for each request.

    Parameters
    ----------
    draft_probs : torch.Tensor
        ``[batch, n, vocabulary]``, float32, float16 or bfloat16: what the draft's tokens were drawn
        from.
    draft_token_ids : torch.Tensor
        ``[batch, n]``, int32 or int64, contiguous. A number outside the vocabulary never stands.
    target_probs : torch.Tensor
        ``[batch, n + 1, vocabulary]``, dtype of ``draft_probs``.
    maybe_output_accepted_token_num : torch.Tensor, optional
        ``[batch]``, int32: how many tokens would stand by themselves is **added** to it, in place.
    maybe_output_emitted_draft_token_num : torch.Tensor, optional
        ``[batch]``, int32: how many do stand is **added** to it, in place; the token that is drawn
        in the end is not among them.
    seed, offset : int or torch.Tensor, optional
        Key and counter of the random numbers: two integers, or int64 or uint64 tensors, ``[1]`` or
        ``[batch]``. Default: a generator's; 0 for a reference.

    Returns
    -------
    tuple of torch.Tensor
        Tokens ``[batch, n + 1]``, the dtype of ``draft_token_ids`` (FlashInfer's are int32), -1
        behind the one that was drawn; and the two counters, which start at 0 where none was given.

    Raises
    ------
    ValueError
        Arguments that do not fit.

    Notes
    -----
    Source: Chen et al., "Accelerating large language model decoding with speculative sampling"
    (2023).

    Examples
    --------
    >>> import torch, precast
    >>> draft = torch.tensor([[[0.5, 0.5]]])
    >>> target = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    >>> ids = torch.tensor([[0]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     tokens, accepted, emitted = precast.chain_speculative_sampling(draft, ids, target)
    >>> tokens.tolist(), accepted.tolist(), emitted.tolist()
    ([[1, -1]], [0], [0])
    """
    accepted, emitted = maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num
    if draft_token_ids.dim() != 2:
        check_rank("chain_speculative_sampling", "draft_token_ids", draft_token_ids, 2, 2)
    batch, count = draft_token_ids.shape
    device, dtype = draft_probs.device, draft_token_ids.dtype
    if accepted is None:
        accepted = torch.zeros(batch, dtype=torch.int32, device=device)
    if emitted is None:
        emitted = torch.zeros(batch, dtype=torch.int32, device=device)
    random = generator, seed, offset
    out = torch.empty((batch, count + 1), dtype=dtype, device=device)
    _CHAIN.launch(draft_probs, draft_token_ids, target_probs, accepted, emitted, random, out)
    return out, accepted, emitted
