# SPDX-License-Identifier: Apache-2.0
"""The arguments of MLA that mean the same in several functions, for ``documented``."""

#: What a plan is told, of the wrapper and of its reference.
PLAN = """
Parameters
----------
num_heads : int
    Heads of queries, at least 1.
head_dim_ckv : int
    Columns of a compressed row, 512 or 256; values have as many.
head_dim_kpe : int
    Columns of a rotary row, 64, or 0 without any.
page_size : int
    Tokens of a page, at least 1.
causal : bool
    Whether a query sees only itself and what is before it. The last query of a request is its last
    token.
sm_scale : float
    Multiplies the logits. A model has ``1 / sqrt(head_dim)`` of its keys before they are
    compressed, such as ``1 / sqrt(128 + 64)``.
q_data_type, kv_data_type : torch.dtype or str
    Of queries (float16 or bfloat16), which is that of outputs, too, and of the cache (that of the
    queries, or float8_e4m3fn).
backend : str
    ``fa2``: the kernels of every GPU. ``fa3``, on compute capability 9.0 alone: those for Hopper,
    where they have what a plan asks for. ``auto``: the faster ones.
"""

#: What a run is told.
RUN = """
Parameters
----------
q_nope, q_pe : torch.Tensor
    ``[qo_indptr[-1], num_heads, head_dim_ckv]`` and ``[..., head_dim_kpe]``; stride 1 in the last
    dimension, others that are multiples of 16 bytes, so slices of one tensor of both will do. The
    second is None, or has no columns, with ``head_dim_kpe`` 0.
ckv_cache, kpe_cache : torch.Tensor
    ``[pages, page_size, head_dim_ckv]`` and ``[..., head_dim_kpe]``, strides as of the queries.
query, kv_cache : torch.Tensor or tuple of torch.Tensor
    The same two in one tensor, with the columns of both, or as a tuple. A tuple of that tensor and
    that tuple is read as the latter.
out, lse : torch.Tensor, optional
    Where to write: the shape of ``q_nope``, and float32 ``[tokens, num_heads]``. Default: new ones.
return_lse : bool
    Whether to return the log-sum-exp of the logits, too.
return_lse_base_on_e : bool
    Whether that is natural; by default it is in base 2.
o_scale : float, optional
    With ``output_scale='per-tensor'`` of :meth:`plan`: outputs are divided by it, rounded to 8 bits
    and saturated.
ckv_scale, kpe_scale : float or torch.Tensor, optional
    What compressed and rotary rows of 8 bits are multiplied by. A tensor on the device is one
    positive float32 and is read there.
ckv_scale_arr : torch.Tensor, optional
    In the place of ``ckv_scale``: float32 ``[pages, page_size, head_dim_ckv // 128]``, contiguous:
    what each 128 columns of a token's compressed row are multiplied by.
sinks : torch.Tensor, optional
    With ``use_sinks=True`` of :meth:`plan`: ``[num_heads]``, float32, a logit (base e, not scaled)
    that takes its share of each softmax and has no value.
bmm1_scale, bmm2_scale : float, optional
    With ``scale_mode='bmm-scalar'`` of :meth:`plan`: in the place of ``sm_scale``, and a factor of
    outputs.
"""

#: Functions over a block table.
FUNCTIONAL = """
Parameters
----------
query : torch.Tensor
    ``[batch_size, q_len, num_heads, kv_lora_rank + qk_rope_head_dim]``, float16 or bfloat16: the
    newest ``q_len`` tokens of each request.
kv_cache : torch.Tensor
    ``[pages, page_size, kv_lora_rank + qk_rope_head_dim]``, or with a dimension of 1 behind the
    first; of the dtype of the queries, or float8_e4m3fn. Any page size; stride 1 in the last
    dimension, others that are multiples of 16 bytes.
workspace_buffer : torch.Tensor
    uint8 or int8 on the device, contiguous, 16-byte aligned: place for the plan of the call and
    partial results; 128 MB is always enough. It may hold anything, and all calls on one stream may
    share it: nothing is kept in it between calls.
qk_nope_head_dim : int
    Not read: the columns of a key before it was compressed.
kv_lora_rank, qk_rope_head_dim : int
    Columns of a compressed row, 512 or 256, and of a rotary row, 64 or 0.
block_tables : torch.Tensor
    ``[batch_size, max_pages]``, int32, on the device: the pages of each request, as many as its
    length needs; what is behind them is not read. Rows may have gaps between them.
seq_lens : torch.Tensor
    ``[batch_size]``, int32 or uint32, on the device: tokens of each request in the cache, those of
    its queries among them. A length beyond the row of the table ends with the row.
max_seq_len : int
    Not read: the width of ``block_tables`` is the bound.
out : torch.Tensor, optional
    Where to write: ``[batch_size, q_len, num_heads, kv_lora_rank]``, or without the second
    dimension where ``q_len`` is 1, contiguous. Default: a new tensor.
bmm1_scale : float or torch.Tensor
    Multiplies the logits: the softmax scale and the scales of queries and keys in one. A tensor is
    one positive float32 on the device and is read there.
bmm2_scale : float or torch.Tensor
    Multiplies the output in float32, before it is rounded. A tensor is as above.
sinks : torch.Tensor, optional
    ``[num_heads]``, float32, or a list of one: a logit (base e, not scaled) that takes its share of
    each softmax and has no value.

Raises
------
precast.errors.UnsupportedConfigError
    A head dimension or dtype that no kernel is for (a ``ValueError``).
NotImplementedError
    An option that no kernel here has.
ValueError
    A tensor that is not on a CUDA device; shapes, dtypes or strides other than above; a workspace
    that is too small or not aligned.

Notes
-----
Two launches: one divides the work by the lengths on the device, one computes. Nothing is copied to
the host or waited for, and nothing else but a missing output is allocated, so a call may be
captured in a CUDA graph, whose replays read the lengths and tables of their time. A query that sees
nothing has output 0 and log-sum-exp minus infinity; rows that belong to no request are left as they
are. Not differentiable. Source: arXiv:2405.04434, arXiv:2501.01005, arXiv:2309.06180.
"""
