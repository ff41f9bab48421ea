# SPDX-License-Identifier: Apache-2.0
"""The variables of each process of a job on several hosts, and which of the caller's go with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.environment import IDENTITY, LocalJob
from bps_rdma.launch.remote.plan import Plan
from bps_rdma.launch.remote.routes import Routes

# Settings of the job, which every process must know.
_FORWARDED = ("BPS_", "BYTEPS_", "DMLC_", "NCCL_")
# These variables describe the launcher or one host, and are not forwarded.
_KEPT = (*IDENTITY, "BPS_RSH", "BPS_NODE_HOST", "DMLC_NODE_HOST", "BPS_HOST_ID")


def forwarded(env: Mapping[str, str], exported: Sequence[str]) -> dict[str, str]:
    """The variables of the caller that processes on other hosts get.

    Args:
        env: of the caller.
        exported: `NAME` or `NAME=VALUE`, as `-x` has them.

    Raises:
        InvalidArgumentError: a variable of `exported` is not set, or has no name.
    """
    found = {name: value for name, value in env.items() if name.startswith(_FORWARDED) and name not in _KEPT}
    for word in exported:
        name, has_value, value = word.partition("=")
        if not name or (not has_value and name not in env):
            raise InvalidArgumentError(f"-x {word}: there is no such variable", "set it, or write -x NAME=VALUE")
        found[name] = value if has_value else env[name]
    return found


@dataclass(frozen=True)
class ClusterJob(LocalJob):
    """A job on the hosts of `plan`. What a process gets is added to the environment that its agent has."""

    plan: Plan = field(default_factory=lambda: Plan({}))
    routes: Routes = field(default_factory=lambda: Routes({}))

    def binary(self, name: str) -> str:
        """The name: each agent looks for it on its host."""
        return name

    def worker(self, rank: int) -> dict[str, str]:
        """The variables of worker `rank`."""
        label = self.label(rank)
        return self._common() | {
            "RANK": str(rank),
            "LOCAL_RANK": str(self.plan.local_ranks[label]),
            "LOCAL_WORLD_SIZE": str(len(self.plan.ranks_on(self.plan.places[label]))),
        }

    def role(self, label: str) -> dict[str, str]:
        """The variables of the dedicated member `label`."""
        # Here a machine counts as one worker: hosts may have different numbers of them.
        return super().role(label) | {"BPS_NUM_WORKERS": str(self.workers)}

    def _common(self) -> dict[str, str]:
        env = {
            "WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.routes.addresses[self.plan.places["rank 0"]],
            "MASTER_PORT": str(self.master_port),
            "BPS_JOB_ID": self.name,
            "BPS_ROOT_URI": self.routes.addresses[self.plan.root],
            "BPS_ROOT_PORT": str(self.scheduler_port),
        }
        return env | self._settings()
