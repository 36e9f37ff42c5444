# SPDX-License-Identifier: Apache-2.0
"""Every public name of :mod:`precast.jit`; each is imported at its first use."""

from precast.errors import MissingJITCacheError as MissingJITCacheError
from precast.errors import MissingKernelError as MissingKernelError
from precast.jit.custom import gen_jit_spec as gen_jit_spec
from precast.jit.policy import freeze as freeze
from precast.jit.spec import JitSpec as JitSpec
