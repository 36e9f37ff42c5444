# SPDX-License-Identifier: Apache-2.0
"""What every operator is made with: kernels, modes, requirements and validation."""
