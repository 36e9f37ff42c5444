# SPDX-License-Identifier: Apache-2.0
"""What decode and prefill share: words, checks, plans, kernels and the formula in plain PyTorch."""
