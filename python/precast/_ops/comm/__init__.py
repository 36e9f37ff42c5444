# SPDX-License-Identifier: Apache-2.0
"""All-reduce between the GPUs of one host."""
