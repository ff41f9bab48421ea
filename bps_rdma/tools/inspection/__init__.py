# SPDX-License-Identifier: Apache-2.0
"""What a running job is doing: `bps why`, `bps top` and `bps dump`."""
