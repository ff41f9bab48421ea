# SPDX-License-Identifier: Apache-2.0
"""Bodies of ranks, and the functions around them, that several test files use."""
