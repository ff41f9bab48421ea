# SPDX-License-Identifier: Apache-2.0
"""`bps run -H`: one command for several hosts.

The launcher starts one agent (agent.py) on each host, over ssh or another program like it, and keeps what is decided to
itself: which rank runs where (plan.py), by which addresses the hosts meet (routes.py), and what the loss of a process
means (launch/run.py, as on one host). An agent starts processes, passes their output on, tells of their ends, and ends
them when its standard input ends. The secret and the environment travel over that standard input only.
"""
