# SPDX-License-Identifier: Apache-2.0
"""The operators, one folder a family."""
