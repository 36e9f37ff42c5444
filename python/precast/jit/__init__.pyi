# SPDX-License-Identifier: Apache-2.0
"""Every public name of :mod:`precast.jit`; each is imported at its first use."""

from precast._base.errors import MissingJITCacheError as MissingJITCacheError
from precast._base.errors import MissingKernelError as MissingKernelError
from precast._jit.policy import freeze as freeze
from precast._runtime.custom import gen_jit_spec as gen_jit_spec
from precast._runtime.jit_spec import JitSpec as JitSpec
