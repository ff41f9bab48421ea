# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a job: `bps run` on one machine, `bpslaunch` for BytePS's roles."""
