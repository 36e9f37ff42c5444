# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's operators as finished parts: CUDA kernels that are compiled ahead of time.

``__init__.pyi`` lists the public names.
"""

from precast._base.lazy import lazy_package
from precast._base.version import __version__ as __version__
from precast._runtime import loader as _loader  # noqa: F401 (reads plan and manifests)

__getattr__, __dir__ = lazy_package(__name__, __file__)
