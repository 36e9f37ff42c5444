# SPDX-License-Identifier: Apache-2.0
"""Quantisation and dequantisation."""
