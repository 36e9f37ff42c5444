# SPDX-License-Identifier: Apache-2.0
"""Products of matrices; :mod:`precast.gemm` exports them."""
