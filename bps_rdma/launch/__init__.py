"""Starts the processes of a job: `bps run` on one machine, `bpslaunch` for BytePS's roles."""
