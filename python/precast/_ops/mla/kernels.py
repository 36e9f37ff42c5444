# SPDX-License-Identifier: Apache-2.0
"""The modules ``mla`` and ``mla_sm90`` export what is declared here; ``attention_plan`` plans."""

from __future__ import annotations

import functools

from precast._op.declaration import Kind
from precast._op.export import Export
from precast._ops.attention.plan import plan_of
from precast._ops.mla import reference_kernels as references

_HEADS, _CKV = "block.shape.num_qo_heads", "block.shape.head_dim_vo"
_KPE = "block.shape.head_dim_qk-block.shape.head_dim_vo"
_PAGE = "block.shape.page_size"


def _export(op: str, name: str) -> Export:
    """Declare a run; ``block`` stands for a plan."""
    return Export(
        op,
        name,
        f"q_nope:T=f16|bf16|f32[rows,{_HEADS},{_CKV}] q_pe?:T[rows,{_HEADS},{_KPE}] "
        f"ckv_cache:U=e4m3|T[pages,{_PAGE},{_CKV}] kpe_cache?:U[pages,{_PAGE},{_KPE}] "
        f"out!:T[rows,{_HEADS},{_CKV}] lse!?:f32[rows,{_HEADS}] sinks?:f32[{_HEADS}] block "
        f"sm_factor:float out_scale:float(finite) qk_scale?:f32[.] v_scale?:f32[.] "
        f"kpe_ratio:float(finite) kpe_scale?:f32[.] "
        f"ckv_scale_arr?:f32[pages,{_PAGE},{_CKV}//128] lse_base_e:bool enable_pdl:pdl",
        kinds={"block": Kind("Tensor{w} {name}", decode=functools.partial(plan_of, name))},
        key="q_nope.shape[-1], 0 if q_pe is None else q_pe.shape[-1], q_nope.get_device()",
        write=references.run,
        check=references.check_run,
        function="BatchMLAPagedAttentionWrapper",
        error_name=name,
        traced=False,  # What plan() was given is not among the arguments.
        reads_host=True,  # The params block.
    )


run_mla = _export("mla", "run_mla")
run_mla_sm90 = _export("mla_sm90", "run_mla_sm90")
