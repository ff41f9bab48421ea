# SPDX-License-Identifier: Apache-2.0
"""Reads the traces that BPS_TRACE has written: `bps trace merge` and `bps trace summary`."""
