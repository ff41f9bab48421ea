# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a job: `bps run`, here or on several hosts (remote), and `bpslaunch` for BytePS's roles."""
