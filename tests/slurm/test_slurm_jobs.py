# SPDX-License-Identifier: Apache-2.0
"""The templates of examples/slurm train a model on two nodes."""

import re

import pytest
from slurm_lab import RANK, TRAIN, Slurm

SHORT = ["--epochs", "2", "--images", "512"]


@pytest.mark.parametrize("template", ["ranks", "nodes", "torchrun", "servers"])
def test_a_template_trains(slurm: Slurm, template: str) -> None:
    job = slurm.submit(template, TRAIN, *SHORT)
    assert job.await_end() == "COMPLETED", job.output
    ranks = 2 if template == "servers" else 4
    losses = re.findall(r"epoch \d: loss (\d+\.\d+)", job.output)
    assert len(losses) == 2, job.output
    assert float(losses[1]) < float(losses[0])
    assert f"the weights are the same on all {ranks} ranks" in job.output
    if template == "servers":
        assert "waiting for 2 workers and 1 server" in job.output


def test_a_step_over_two_components(slurm: Slurm, tmp_path) -> None:
    """Slurm numbers tasks and nodes across the components, and so do we."""
    script = tmp_path / "components.sh"
    script.write_text(f'#!/bin/bash\nsrun --het-group=0,1 python "{RANK}"\n')
    job = slurm.submit_script(script, options=("--nodes=1", "--ntasks=2", ":", "--nodes=1", "--ntasks=1"))
    assert job.await_end() == "COMPLETED", job.output
    found = sorted(re.findall(r"rank (\d) of 3: 3.0 slurm-\S+ \d+ (n\d)", job.output))
    assert found in ([("0", "n1"), ("1", "n1"), ("2", "n2")], [("0", "n2"), ("1", "n2"), ("2", "n1")])


def test_two_steps_at_a_time(slurm: Slurm, tmp_path) -> None:
    """They take their ports, names and ranks from their own step."""
    script = tmp_path / "two.sh"
    step = f'srun --overlap --nodes 2 --ntasks {{}} python "{RANK}" &'
    script.write_text(f"#!/bin/bash\n{step.format(4)}\n{step.format(2)}\nwait\n")
    job = slurm.submit_script(script, options=("--nodes", "2", "--ntasks-per-node", "2"))
    assert job.await_end() == "COMPLETED", job.output
    found = re.findall(r"rank (\d) of (\d): (\S+) (slurm-\S+) (\d+) (n\d)", job.output)
    assert sorted(line[:3] for line in found) == sorted(
        [(str(rank), "4", "6.0") for rank in range(4)] + [(str(rank), "2", "1.0") for rank in range(2)]
    )
    # A name and a port for each of the two, and ranks of both on both nodes.
    assert len({(line[1], line[3], line[4]) for line in found}) == len({line[3] for line in found}) == 2
    assert len({line[4] for line in found}) == 2
    assert len({(line[1], line[5]) for line in found}) == 4
