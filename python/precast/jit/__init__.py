# SPDX-License-Identifier: Apache-2.0
"""Compile kernels just in time, by the same plan that the prebuilt ones are made from.

``__init__.pyi`` lists the public names.
"""

from precast._base.lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__, __file__)
