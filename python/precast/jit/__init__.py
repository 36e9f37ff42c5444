# SPDX-License-Identifier: Apache-2.0
"""Compile kernels at run time (JIT), from the same plan as the prebuilt ones.

``__init__.pyi`` lists the public names.
"""

from precast._base.lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__, __file__)
