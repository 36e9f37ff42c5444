# SPDX-License-Identifier: Apache-2.0
"""Prebuilt CUDA modules; precast finds them by entry point and never imports this package."""
