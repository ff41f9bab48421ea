# SPDX-License-Identifier: Apache-2.0
"""Shows what a running job is doing: `bps why`, `bps top` and `bps dump`."""
