# SPDX-License-Identifier: Apache-2.0
"""Megatron's own parser, where megatron-core has it (0.17 and later): the flags, a YAML file, and what is refused."""

import contextlib
import io
from pathlib import Path
from typing import Any

import cpu
import harness
import pytest

pytestmark = pytest.mark.core
FLAG = "--use-dpu-reduce"


def parse(bps: Any, folder: str, arguments: list[str]) -> tuple[int, str, str]:
    """What `-m bps_rdma.megatron` makes of a script that parses as Megatron's do: status, output, errors."""
    from bps_rdma.megatron import __main__

    cpu.install()
    script = Path(folder) / "parses.py"
    script.write_text(
        "from megatron.core.distributed import DistributedDataParallel\n"
        "from megatron.training.arguments import parse_args\n"
        "args = parse_args()\n"
        "function, names = DistributedDataParallel.__init__, []\n"
        "while hasattr(function, '__wrapped__'):\n"
        "    names.append(function.__code__.co_name)\n"
        "    function = function.__wrapped__\n"
        "enabled = 'initialise_and_attach' in names  # others only warn\n"
        "print(getattr(args, 'use_dpu_reduce', None), getattr(args, 'use_dpu_tp_reduce', None), enabled)\n"
    )
    status, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            __main__.main([str(script), *arguments])
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.getvalue(), err.getvalue()


def outcome(tmp_path: Path, *arguments: object) -> tuple[int, str, str]:
    (found,) = harness.run(parse, str(tmp_path), list(map(str, arguments)), workers=1, init=False)
    return found


def test_the_flags_are_parsed(tmp_path):
    assert outcome(tmp_path)[:2] == (0, "None None False\n")
    status, out, err = outcome(tmp_path, FLAG, "--num-layers", 2)
    assert (status, out.splitlines()[-1]) == (0, "True False True"), err
    status, out, err = outcome(tmp_path, "--use-dpu-tp-reduce")
    assert (status, out.splitlines()[-1]) == (0, "False True False"), err


@pytest.mark.parametrize("flag", ["--use-bps", "--use-bps-tp"])
def test_the_other_names_of_the_flags(tmp_path, flag):
    status, out, err = outcome(tmp_path, flag)
    gradients = flag == "--use-bps"
    assert (status, out.splitlines()[-1]) == (0, f"{gradients} {not gradients} {gradients}"), err


def test_a_yaml_file(tmp_path):
    """It replaces the command line in Megatron's eyes; the flags hold in either place."""
    pytest.importorskip("yaml")
    config = tmp_path / "config.yaml"
    config.write_text("enable_msc: false\ndisable_msc_deprecated: false\nuse_dpu_reduce: true\n")
    status, out, err = outcome(tmp_path, "--yaml-cfg", config)
    assert (status, out.splitlines()[-1]) == (0, "True None True"), err
    config.write_text("enable_msc: false\ndisable_msc_deprecated: false\n")
    assert outcome(tmp_path, "--yaml-cfg", config)[1].splitlines()[-1] == "None None False"
    assert outcome(tmp_path, f"--yaml-cfg={config}", FLAG)[1].splitlines()[-1] == "True None True"
    config.write_text("enable_msc: false\ndisable_msc_deprecated: false\nuse_bps: true\n")
    assert outcome(tmp_path, "--yaml-cfg", config)[1].splitlines()[-1] == "None None True"
    config.write_text("use_dpu_reduce: true\nuse_megatron_fsdp: true\n")
    status, _, err = outcome(tmp_path, "--yaml-cfg", config)
    assert status == 1
    assert "error: use_megatron_fsdp cannot be combined with use_bps" in err


@pytest.mark.parametrize(
    "option",
    [
        ["--use-megatron-fsdp"],
        ["--use-torch-fsdp2"],
        ["--ddp-reduce-scatter-with-fp32-accumulation"],
        ["--overlap-param-gather"],
        ["--overlap-param-gather", "--use-distributed-optimizer", "--optimizer", "dist_muon"],
    ],
    ids=" ".join,
)
def test_what_is_not_supported_is_refused_when_it_is_parsed(tmp_path, option):
    status, out, err = outcome(tmp_path, FLAG, *option)
    assert (status, out) == (1, "")
    assert err.splitlines()[-2].startswith("error: ")
    assert "cannot be combined with use_bps" in err
    assert err.splitlines()[-1].startswith("hint: ")
    assert outcome(tmp_path, *option)[0] == 0, "without the flag it is Megatron's own affair"


def test_a_flag_with_a_mistake_in_it(tmp_path):
    status, _, err = outcome(tmp_path, FLAG, "--use-dpu-tp-redcue")
    assert status == 2
    assert "unrecognized arguments: --use-dpu-tp-redcue" in err
