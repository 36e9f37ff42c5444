# SPDX-License-Identifier: Apache-2.0
"""The arguments that functions without a plan have in common, for ``documented``."""

#: Of every function.
FUNCTIONAL = """
Parameters
----------
workspace_buffer : torch.Tensor
    uint8 or int8 on the device, contiguous, 16-byte aligned: place for the plan of the call,
    converted tensors and partial results; 128 MB is always enough for decode. It may hold anything,
    and all calls on one stream may share it: nothing is kept in it between calls, and it is not
    zero afterwards.
bmm1_scale : float or torch.Tensor
    Multiplies the logits: the softmax scale and the scales of queries and keys in one. A tensor is
    one positive float32 on the device and is read there.
bmm2_scale : float or torch.Tensor
    Multiplies the output in float32, before it is rounded: the scale of values, divided by that of
    an output of 8 bits. A tensor is as above.
window_left : int
    A query sees its own token and this many before it; -1 is all.
out : torch.Tensor, optional
    Where to write: ``[tokens, num_qo_heads, head_dim_vo]``, of the dtype of the queries, or
    float16, bfloat16, float8_e4m3fn or float8_e5m2. Default: a new tensor.
out_dtype : torch.dtype or str, optional
    The dtype of the output. Default: that of ``out``, else that of the queries.
sinks : torch.Tensor, optional
    ``[num_qo_heads]``, float32: a logit (base e, not scaled) that takes its share of each softmax
    and has no value.
lse : torch.Tensor, optional
    ``[tokens, num_qo_heads]``, float32, contiguous: the base-2 log-sum-exp of the logits is written
    to it. Default: a new tensor, if ``return_lse``.
return_lse : bool
    Whether to return the log-sum-exp, too.
kv_layout : str
    ``NHD`` or ``HND``.
kv_cache_sf : None
    Scales of NVFP4 keys and values, which no kernel here reads.
skip_softmax_threshold_scale_factor : None or 0
    There is no kernel that leaves out small parts of the softmax.
o_sf_scale, o_sf_vec_size : None
    For NVFP4 outputs, which no kernel here writes.
uses_shared_paged_kv_idx : bool
    True: keys and values have the same pages.
multi_ctas_kv_counter_buffer : torch.Tensor, optional
    For other libraries; not read.
"""

#: Of functions over a block table.
TABLES = """
Parameters
----------
kv_cache : torch.Tensor or tuple of torch.Tensor
    ``[pages, 2, page_size, num_kv_heads, head_dim]`` in layout ``NHD``,
    ``[pages, 2, num_kv_heads, page_size, head_dim]`` in ``HND``, or a tuple of keys and values
    without the dimension of 2; with 1 in its place both are the same. Of the dtype of the queries,
    float8_e4m3fn or float8_e5m2. Any page size; stride 1 in the last dimension, any in the others.
block_tables : torch.Tensor
    ``[batch_size, max_pages]``, int32, on the device: the pages of each request, as many as its
    length needs; what is behind them is not read. Rows may have gaps between them.
seq_lens : torch.Tensor
    ``[batch_size]``, int32 or uint32, on the device: tokens of each request in the cache, those of
    its queries among them. A length beyond the row of the table ends with the row.
max_seq_len : int
    Not read: the width of ``block_tables`` is the bound.

Raises
------
precast.errors.CacheLayoutError
    Another layout, or a cache that is neither a tensor nor a tuple of two (a ``KeyError`` and a
    ``ValueError``).
precast.errors.UnsupportedConfigError
    A head dimension or dtype that no kernel is for (a ``ValueError``).
NotImplementedError
    An option that no kernel here has.
ValueError
    A tensor that is not on a CUDA device; heads that do not divide; shapes, dtypes or strides other
    than above; a workspace that is too small or not aligned.

Notes
-----
Two launches: one divides the work by the lengths on the device, one computes. A decode of up to 256
requests with one number of queries, whose queries times the query heads of a KV head are at most
16, is one launch, unless it has a mask, a scale that is not positive, or less than some MB of
workspace. The first such call with the address of a workspace keeps 4 KiB of counters for it; in a
CUDA graph that is captured before, it is two launches. Nothing is copied to the host or waited for,
and nothing else but a missing output is allocated, so a call may be captured in a CUDA graph, whose
replays read the lengths and tables of their time. A query that sees nothing has
output 0 and log-sum-exp minus infinity; rows that belong to no request are left as they are, but
for an output of another dtype than the queries. Queries of 8 bits are converted to 16 by one more
launch, unless kernels for Hopper multiply them as they are (context attention of e4m3 with keys and
values of e4m3, more than 64 rows), and so is an output of another dtype. A draft mask is read where
it is, by the general kernels, and may change between the replays of a graph. Not differentiable.
Source: arXiv:2501.01005, arXiv:2309.06180.
"""
