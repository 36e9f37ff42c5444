# SPDX-License-Identifier: Apache-2.0
"""Pipelines of logits processors."""
