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
    The same two in one tensor, with the columns of both, or as a tuple.
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
