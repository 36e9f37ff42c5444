# SPDX-License-Identifier: Apache-2.0
"""Attention: plans, kernels, wrappers and their references."""
