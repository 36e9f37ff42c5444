# SPDX-License-Identifier: Apache-2.0
"""Draws from distributions that one filter cuts down."""

from __future__ import annotations

from precast._torch import torch, torch_ops
from precast.api_logging import precast_api
from precast.decorators import backend_requirement, served_by
from precast.sampling._arguments import Real, Whole, draw_arguments
from precast.sampling._filters import weights_of_probs
from precast.sampling._formula import chosen
from precast.sampling._kernels import draw_kernel
from precast.sampling._trace import draw_trace


def top_k_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`top_k_sampling_from_probs` in plain PyTorch: the same tokens, bit for bit.

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16, any device.
    top_k : torch.Tensor or int
        A number, or ``[rows]``.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row of each output.
    seed, offset : torch.Tensor or int
        Key and counter of the random numbers.

    Returns
    -------
    torch.Tensor
        ``[outputs]``, int32 or the dtype of ``indices``.

    Examples
    --------
    >>> import torch
    >>> top_k_sampling_from_probs_reference(torch.tensor([[0.2, 0.7, 0.1]]), 1).tolist()
    [1]
    """
    tokens, _ = chosen(weights_of_probs(probs), indices, top_k=top_k, seed=seed, offset=offset)
    return tokens.to(torch.int32 if indices is None else indices.dtype)


def top_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`top_p_sampling_from_probs` in plain PyTorch: the same tokens, bit for bit.

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16, any device.
    top_p : torch.Tensor or float
        A number, or ``[rows]``.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row of each output.
    seed, offset : torch.Tensor or int
        Key and counter of the random numbers.

    Returns
    -------
    torch.Tensor
        ``[outputs]``, int32 or the dtype of ``indices``.

    Examples
    --------
    >>> import torch
    >>> top_p_sampling_from_probs_reference(torch.tensor([[0.2, 0.7, 0.1]]), 0.5).tolist()
    [1]
    """
    tokens, _ = chosen(weights_of_probs(probs), indices, top_p=top_p, seed=seed, offset=offset)
    return tokens.to(torch.int32 if indices is None else indices.dtype)


def min_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`min_p_sampling_from_probs` in plain PyTorch: the same tokens, bit for bit.

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16, any device.
    min_p : torch.Tensor or float
        A number, or ``[rows]``.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row of each output.
    seed, offset : torch.Tensor or int
        Key and counter of the random numbers.

    Returns
    -------
    torch.Tensor
        ``[outputs]``, int32 or the dtype of ``indices``.

    Examples
    --------
    >>> import torch
    >>> min_p_sampling_from_probs_reference(torch.tensor([[0.2, 0.7, 0.1]]), 0.5).tolist()
    [1]
    """
    tokens, _ = chosen(weights_of_probs(probs), indices, min_p=min_p, seed=seed, offset=offset)
    return tokens.to(torch.int32 if indices is None else indices.dtype)


_top_k = draw_kernel(
    "sample_from_probs",
    "top_k_sampling_from_probs",
    lambda x, indices, k, p, m, order, seed, offset, valid: (
        *(x, k, indices, True, None, False, seed, offset, valid),
    ),
)
_TOP_K_TRACE = draw_trace(
    "top_k_sampling_from_probs", "probs", ("top_k",), top_k_sampling_from_probs_reference
)

_top_p = draw_kernel(
    "sample_from_probs",
    "top_p_sampling_from_probs",
    lambda x, indices, k, p, m, order, seed, offset, valid: (
        *(x, p, indices, True, None, False, seed, offset, valid),
    ),
)
_TOP_P_TRACE = draw_trace(
    "top_p_sampling_from_probs", "probs", ("top_p",), top_p_sampling_from_probs_reference
)

_min_p = draw_kernel(
    "sample_from_probs",
    "min_p_sampling_from_probs",
    lambda x, indices, k, p, m, order, seed, offset, valid: (
        *(x, m, indices, True, None, False, seed, offset, valid),
    ),
)
_MIN_P_TRACE = draw_trace(
    "min_p_sampling_from_probs", "probs", ("min_p",), min_p_sampling_from_probs_reference
)


@precast_api(trace=_TOP_K_TRACE)
@backend_requirement({}, common_check=served_by("sampling"))
def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: Whole,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Draw a token among the ``top_k`` likeliest of each distribution.

    .. math:: P(out_i = t) \propto p_{r_i, t} \, [p_{r_i, t} \ge \tau_{r_i}]

    :math:`\tau` is the k-th largest of the row.

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16, rows with unit stride, on a CUDA
        device; vocabulary from 1 to 2^20. Rows need not sum to 1; a negative number has no mass.
    top_k : int or torch.Tensor
        How many are kept, or int32 ``[rows]`` with a number for each row. All tokens that are as
        likely as the last one are kept, too. Below 1, or from the size of the vocabulary on: all.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row that each output draws from; that there is such a row
        is not checked. Default: each row once.
    deterministic : bool
        Taken for compatibility: results never depend on timing.
    generator : torch.Generator, optional
        Where seed and offset come from, as in :func:`sampling_from_probs`.
    check_nan : bool
        Raise if there is a NaN, **for which the call waits for the GPU**.
    seed, offset : int or torch.Tensor, optional
        Key and counter of the random numbers, as in :func:`sampling_from_probs`.
    return_valid : bool
        Return also whether each row was a distribution.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Tokens, ``[outputs]``, int32 or the dtype of ``indices``; with ``return_valid`` also bools
        ``[outputs]``. A row with a NaN, without mass or with infinite mass is not valid, and its
        token is 0.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; another dtype, shape or stride; seed without offset,
        or one a tensor and the other not; a NaN that ``check_nan`` finds.

    Notes
    -----
    The threshold is exact: no token outside the set is ever drawn, and no round of rejection is
    needed. As in :func:`sampling_from_probs`, a token depends on its own row alone.
    Safe in CUDA graphs but for ``check_nan``; not differentiable.

    Source: Fan, Lewis, Dauphin, "Hierarchical neural story generation" (2018).

    Examples
    --------
    >>> import torch, precast
    >>> probs = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.top_k_sampling_from_probs(probs, 1, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """
    args = draw_arguments(
        "top_k_sampling_from_probs",
        "probs",
        probs,
        indices,
        top_k,
        1.0,
        0.0,
        False,
        (),
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
    )
    if torch.compiler.is_compiling():
        torch_ops.top_k_sampling_from_probs(*args)
    else:
        _top_k[probs.dtype, probs.get_device()](*args)
    return args[-3:-1] if return_valid else args[-3]


@precast_api(trace=_TOP_P_TRACE)
@backend_requirement({}, common_check=served_by("sampling"))
def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: Real,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Draw a token from the nucleus of each distribution: the likeliest with a share ``top_p``.

    .. math:: P(out_i = t) \propto p_{r_i, t} \, [p_{r_i, t} \ge \tau_{r_i}], \quad
        \tau = \max \{x : \textstyle\sum_s p_s [p_s \ge x] \ge top\_p \cdot \sum_s p_s\}

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16, rows with unit stride, on a CUDA
        device; vocabulary from 1 to 2^20. Rows need not sum to 1; a negative number has no mass.
    top_p : float or torch.Tensor
        The share of the mass, or float32 ``[rows]`` with one for each row. From 1 on, all tokens
        with mass are kept; at 0 and below, the likeliest. All tokens that are as likely as the last
        one are kept, too.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row that each output draws from; that there is such a row
        is not checked. Default: each row once.
    deterministic : bool
        Taken for compatibility: results never depend on timing.
    generator : torch.Generator, optional
        Where seed and offset come from, as in :func:`sampling_from_probs`.
    check_nan : bool
        Raise if there is a NaN, **for which the call waits for the GPU**.
    seed, offset : int or torch.Tensor, optional
        Key and counter of the random numbers, as in :func:`sampling_from_probs`.
    return_valid : bool
        Return also whether each row was a distribution.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Tokens, ``[outputs]``, int32 or the dtype of ``indices``; with ``return_valid`` also bools
        ``[outputs]``. A row with a NaN, without mass or with infinite mass is not valid, and its
        token is 0.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; another dtype, shape or stride; seed without offset,
        or one a tensor and the other not; a NaN that ``check_nan`` finds.

    Notes
    -----
    The set is exact up to 2^-31 of the mass a token, in which masses are counted. A token is drawn
    from the whole distribution first and stands if it is in the set; otherwise one is drawn from
    the set. As in :func:`sampling_from_probs`, a token depends on its own row alone.
    Safe in CUDA graphs but for ``check_nan``; not differentiable.

    Source: Holtzman et al., "The curious case of neural text degeneration" (2020).

    Examples
    --------
    >>> import torch, precast
    >>> probs = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.top_p_sampling_from_probs(probs, 0.5, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """
    args = draw_arguments(
        "top_p_sampling_from_probs",
        "probs",
        probs,
        indices,
        0,
        top_p,
        0.0,
        False,
        (),
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
    )
    if torch.compiler.is_compiling():
        torch_ops.top_p_sampling_from_probs(*args)
    else:
        _top_p[probs.dtype, probs.get_device()](*args)
    return args[-3:-1] if return_valid else args[-3]


@precast_api(trace=_MIN_P_TRACE)
@backend_requirement({}, common_check=served_by("sampling"))
def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: Real,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Draw a token among those that have ``min_p`` of the largest probability at least.

    .. math:: P(out_i = t) \propto p_{r_i, t} \, [p_{r_i, t} \ge min\_p \cdot \max_s p_{r_i, s}]

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16, rows with unit stride, on a CUDA
        device; vocabulary from 1 to 2^20. Rows need not sum to 1; a negative number has no mass.
    min_p : float or torch.Tensor
        The share of the largest, or float32 ``[rows]`` with one for each row. At 0 and below all
        tokens with mass are kept, from 1 on the likeliest.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row that each output draws from; that there is such a row
        is not checked. Default: each row once.
    deterministic : bool
        Taken for compatibility: results never depend on timing.
    generator : torch.Generator, optional
        Where seed and offset come from, as in :func:`sampling_from_probs`.
    check_nan : bool
        Raise if there is a NaN, **for which the call waits for the GPU**.
    seed, offset : int or torch.Tensor, optional
        Key and counter of the random numbers, as in :func:`sampling_from_probs`.
    return_valid : bool
        Return also whether each row was a distribution.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Tokens, ``[outputs]``, int32 or the dtype of ``indices``; with ``return_valid`` also bools
        ``[outputs]``. A row with a NaN, without mass or with infinite mass is not valid, and its
        token is 0.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; another dtype, shape or stride; seed without offset,
        or one a tensor and the other not; a NaN that ``check_nan`` finds.

    Notes
    -----
    As in :func:`sampling_from_probs`, a token depends on its own row alone.
    Safe in CUDA graphs but for ``check_nan``; not differentiable.

    Source: Nguyen et al., "Turning up the heat: min-p sampling" (2024).

    Examples
    --------
    >>> import torch, precast
    >>> probs = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.min_p_sampling_from_probs(probs, 0.9, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """
    args = draw_arguments(
        "min_p_sampling_from_probs",
        "probs",
        probs,
        indices,
        0,
        1.0,
        min_p,
        False,
        (),
        generator,
        check_nan,
        seed,
        offset,
        return_valid,
    )
    if torch.compiler.is_compiling():
        torch_ops.min_p_sampling_from_probs(*args)
    else:
        _min_p[probs.dtype, probs.get_device()](*args)
    return args[-3:-1] if return_valid else args[-3]
