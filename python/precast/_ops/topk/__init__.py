# SPDX-License-Identifier: Apache-2.0
"""The k largest elements of rows."""
