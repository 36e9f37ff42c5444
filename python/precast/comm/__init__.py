# SPDX-License-Identifier: Apache-2.0
"""All-reduce between the GPUs of one host, alone and fused with what follows it.

Process groups, rendezvous and memory handles are those of torch.distributed and of its symmetric
memory; NCCL does what the kernels here do not.

``__init__.pyi`` lists the public names.
"""

from precast._base.lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__, __file__)
