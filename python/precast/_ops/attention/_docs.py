# SPDX-License-Identifier: Apache-2.0
"""The arguments of attention that mean the same in several functions, for ``documented``."""

#: What the wrapper of a batch is made of.
WRAPPER = """
Parameters
----------
float_workspace_buffer : torch.Tensor
    uint8 or int8 on the device of the tensors, contiguous, 16-byte aligned: place for partial
    results; 128 MB is always enough for decode, ``workspace_size`` of the wrappers of pages says
    what is. May hold anything. Runs that share it, and runs of one plan, follow one another: never
    on two streams at once.
use_cuda_graph : bool
    Whether :meth:`run` is captured; then the batch size is that of the buffers below, and
    :meth:`plan` copies into them.
custom_mask_buf, mask_indptr_buf : torch.Tensor, optional
    uint8 and int32 ``[batch_size + 1]``, needed for masks with ``use_cuda_graph``.
jit_args : list, optional
    Those of the variant ``AttentionSink``, with which :meth:`run` takes ``sink`` and ``sm_scale``
    by position. Kernels are compiled ahead of time, so no other code can be added to them.
jit_kwargs : dict, optional
    What that variant is compiled for. Not read: :meth:`plan` says it.
variant_owns_mask : bool
    False, or a ``ValueError``: it says that such code masks.

Raises
------
precast.errors.BackendSupportedError
    Another backend, or ``fa3`` on a GPU that is not of compute capability 9.0.
precast.errors.CacheLayoutError
    Another layout (a ``KeyError`` and a ``ValueError``).
NotImplementedError
    ``jit_args`` of other code.
ValueError
    A workspace that is not aligned; with ``use_cuda_graph``, a missing buffer, or one that does not
    fit the others.
"""

#: What the attention of a batch, or of one request, is told before it runs.
PLAN = """
Parameters
----------
kv_layout : str
    ``NHD`` or ``HND``.
num_qo_heads, num_kv_heads : int
    Heads; the first is a multiple of the second.
head_dim_qk, head_dim_vo : int
    Both 64, 80, 96, 128, 256 or 512, or 192 and 128. Default of the second: the first.
page_size : int
    Tokens of a page, at least 1.
custom_mask : torch.Tensor, optional
    ``[sum of qo_len * kv_len]``, bool, request after request: True where a query (row) attends to a
    key (column). Takes the place of ``causal``.
packed_custom_mask : torch.Tensor, optional
    The same as bits, uint8, the lowest of a byte first; each request starts a byte.
causal : bool
    Whether a query sees only itself and what is before it. The last query of a request is its last
    token.
pos_encoding_mode : str
    ``NONE``, ``ROPE_LLAMA`` (queries and keys are rotated on the fly in float32 and rounded once,
    to the dtype of queries, or keys of 8 bits to float16) or ``ALIBI``.
use_fp16_qk_reduction : bool
    Without effect: logits are summed in float32.
sm_scale : float, optional
    Multiplies the logits. Default: ``1 / sqrt(head_dim)``, that of queries and keys.
window_left : int
    A query sees its own token and this many before it, with any mask; -1 is all.
logits_soft_cap : float, optional
    Logits ``s`` become ``cap * tanh(s / cap)``; None or 0 is off.
rope_scale, rope_theta : float, optional
    Of ``ROPE_LLAMA``. Default: 1 and 1e4.
q_data_type, kv_data_type, o_data_type : torch.dtype or str, optional
    Of queries (float16, bfloat16, float8_e4m3fn or float8_e5m2), of keys and values (float16 or
    bfloat16 as queries, of 8 bits, or uint8 for NVFP4 in pages with a head dimension of 64, 128 or
    256; default: as queries), of outputs (float16, bfloat16 or float32; default: as queries, so it
    must be given for queries of 8 bits). Kernels for Hopper multiply queries, keys and values that
    are all float8_e4m3fn, and round probabilities to it, too. Elsewhere, for short requests and
    with ``ROPE_LLAMA``, each run converts queries of 8 bits to 16, by one more launch and into a
    new tensor.
non_blocking : bool
    Whether lengths on the host are copied without waiting.
prefix_len_ptr : torch.Tensor, optional
    ``[batch_size]``, uint32 or int32: multi-item scoring. Tokens behind the prefix of a request are
    items, which see the prefix and themselves.
token_pos_in_items_ptr : torch.Tensor, optional
    uint16, for each request ``token_pos_in_items_len`` positions, of each token behind the prefix
    in its item, 0 for a delimiter, which only sees the prefix and which no token sees. Tokens of a
    request that is longer are delimiters, too.
token_pos_in_items_len : int
    The length of that, the same for every request. Default: all of it, for every request.
max_item_len_ptr : torch.Tensor, optional
    ``[batch_size]``, uint16: the longest item of each request.
seq_lens : torch.Tensor, optional
    For other backends; lengths are those above.
seq_lens_q : torch.Tensor, optional
    For other backends, as ``seq_lens``.
block_tables : torch.Tensor, optional
    For other backends; the pages above are what counts.
max_token_per_sequence : int, optional
    A bound of the queries of a request. It only saves time, and only if ``qo_indptr`` is on the
    device, where the host cannot know it.
max_sequence_kv : int, optional
    A bound of the tokens of a request, for callers that read ``_max_kv_len``.
fixed_split_size : int, optional
    Pages (tokens, where there are no pages) of a part of a request that one CTA takes. With it the
    bits of a result do not depend on the rest of the batch, if the workspaces have room for all
    parts, which ``workspace_size`` of the wrappers of pages says. Lengths on the host that need
    more are an error; those on the device cannot be checked, and make all parts longer. Default:
    what balances the work.
disable_split_kv : bool
    One CTA takes all the tokens of some queries; results do not depend on the batch, either.
uniform_q_len : int, optional
    Queries of every request, as ``max_token_per_sequence``.
backend : str
    ``fa2``: the kernels of every GPU. ``fa3``, on compute capability 9.0 alone: those for Hopper,
    where they have what a plan asks for. ``auto``: the faster ones.
o_dtype : torch.dtype, optional
    Of the output. Default: that of ``q``.
"""

#: What a run is told.
RUN = """
Parameters
----------
paged_kv_cache : torch.Tensor or tuple of torch.Tensor
    ``[pages, 2, page_size, num_kv_heads, head_dim]`` in layout ``NHD``,
    ``[pages, 2, num_kv_heads, page_size, head_dim]`` in ``HND``, or a tuple of keys and values
    without the dimension of 2. Page size 1 may be left out of the shape. Stride 1 in the last
    dimension, any in the others.
kv_cache_sf : torch.Tensor or tuple of torch.Tensor, optional
    With ``kv_data_type`` uint8, and only then: the scales of a cache in NVFP4, a scale for each 16
    numbers, in the form of the cache with ``head_dim // 16`` as the last dimension, float8_e4m3fn
    or its bytes as uint8; any strides but in the last dimension. The cache is uint8 with
    ``head_dim // 2`` bytes a row, the first number of a byte in the lower 4 bits, 16-byte aligned;
    numbers are e2m1 times scale, and ``k_scale`` and ``v_scale`` are their factors for all.
*args
    ``sink`` and ``sm_scale``, if the wrapper was made for sinks by ``jit_args``; for queries of 8
    bits, of prefills, the three scales; else none.
q_scale, k_scale : float or torch.Tensor, optional
    Multiply ``sm_scale``. A tensor on the device is one positive float32 and is read there. For
    queries of 8 bits it may have one for each head, ``[num_qo_heads]`` and ``[num_kv_heads]``.
v_scale : float or torch.Tensor, optional
    Multiplies the output in float32, before it is rounded. A tensor is as ``k_scale``; where
    queries are converted, numbers of heads multiply the rounded output.
out, lse : torch.Tensor, optional
    Where to write: ``[tokens, num_qo_heads, head_dim_vo]`` and, float32, the log-sum-exp. Default:
    new ones.
return_lse : bool
    Whether to return the log-sum-exp of the logits, too, in base 2 by default.
lse_base : str
    ``log2`` or ``ln``.
lse_layout : str
    ``NH``, ``[tokens, num_qo_heads]``, or ``HN``, the other way round, by a kernel of its own.
window_left : int, optional
    That of :meth:`plan`, which is the default.
sinks : torch.Tensor, optional
    ``[num_qo_heads]``, float32: a logit (base e, not scaled) that takes its share of each softmax
    and has no value.
"""

#: What a run over pages raises.
PAGED_RUN = """
Raises
------
precast.errors.PlanMismatchError
    No plan, or another ``window_left`` (an ``AssertionError`` and a ``ValueError``).
precast.errors.CacheLayoutError
    A cache that is neither a tensor nor a tuple of two (a ``KeyError`` and a ``ValueError``).
NotImplementedError
    An argument for other backends.
ValueError
    Dtypes, heads, pages or a number of queries that are not those of :meth:`plan`; a shape, dtype,
    device or strides other than above.
"""

#: What the reference of a wrapper is told, and returns.
REFERENCE = """
Parameters
----------
q_scale, k_scale, v_scale : float
    As for ``run``.
sinks : torch.Tensor, optional
    As for ``run``; the attribute ``_sinks`` of a wrapper without pages.

Returns
-------
torch.Tensor or tuple of torch.Tensor
    The output and the base-2 log-sum-exp, float32. Rows of no request are zeros.
"""
