# SPDX-License-Identifier: Apache-2.0
"""Independent second implementations of what the product computes or speaks, which tests compare it with."""
