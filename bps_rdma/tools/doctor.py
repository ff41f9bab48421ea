# SPDX-License-Identifier: Apache-2.0
"""`bps doctor`: checks this machine under the current settings, and says how to fix what is missing."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import bps_rdma
from bps_rdma import _core
from bps_rdma.errors import AuthenticationError, BpsError, DeadlineError, UnreachableError
from bps_rdma.terminal import wide_console
from bps_rdma.tools import gpus
from bps_rdma.tools.bench.memory import available

if TYPE_CHECKING:
    from rich.console import Console

State = Literal["ok", "note", "bad"]
_MARKS = {"ok": "[green]✓[/green]", "note": "[yellow]![/yellow]", "bad": "[red]✗[/red]"}
# With less than this, a tensor of ordinary size cannot be registered.
_ENOUGH_LOCKED = 1 << 30
_TRANSFER_BYTES = 64 << 20
_NO_DOCTOR = (
    "start `bps doctor --serve` on one machine, and meanwhile the command that it prints on the other; if both run, a "
    "firewall between them closes the port"
)


@dataclass
class Check:
    """One line of the report: what was checked, what was found, and one action that fixes it."""

    name: str
    state: State
    fact: str
    hint: str = ""


@dataclass
class Findings:
    """All findings.

    Attributes:
        rdma: the devices, ports and GIDs that the native module found, and its choice.
        gpus: what the driver and the kernel say of GPUs.
    """

    checks: list[Check] = field(default_factory=list)
    rdma: dict[str, Any] = field(default_factory=dict)
    gpus: gpus.Gpus = field(default_factory=gpus.Gpus)

    def add(self, name: str, state: State, fact: str, hint: str = "") -> None:
        """Append a line."""
        self.checks.append(Check(name, state, fact, hint))

    @property
    def healthy(self) -> bool:
        """True if nothing is bad; notes do not count."""
        return all(check.state != "bad" for check in self.checks)


def examine(*, transfer: bool = True, timeout_s: float = 30.0) -> Findings:
    """Check this machine under the current settings; `transfer`: also send 64 MiB to this process over each rail.

    Raises:
        InvalidArgumentError: a setting is invalid.
    """
    report = Findings()
    config = _core.Config()
    config.check()
    wanted = config.text("BPS_TRANSPORT")
    try:
        report.rdma = _core.rdma_report(config)
    except BpsError as error:  # such as an interface that does not exist
        report.add("settings", "bad", error.message, error.hint)
        return report
    _look_at_host(report)
    _look_at_libraries(report, needed=wanted in {"rdma", "1", "ibverbs"})
    _look_at_devices(report)
    _look_at_choice(report, needed=wanted in {"rdma", "1", "ibverbs"})
    report.gpus = gpus.look(config.text("BPS_CUDA_LIB"))
    by_core = config.text("BPS_DEVICE_ROUTE") == "1"
    direct = by_core and config.text("BPS_GPUDIRECT") == "1"
    look_at_gpus(report, by_core=by_core, direct=direct, near_gpu=config.text("BPS_RDMA_NEAR_GPU"))
    if report.rdma["rails"]:
        _look_at_memory(report, config.text("BPS_RDMA_MEMORY"))
    if transfer:
        for number, rail in enumerate(report.rdma["rails"]):
            _transfer(report, config, number, rail, timeout_s)
    return report


def _look_at_host(report: Findings) -> None:
    report.add("system", "ok", f"bps_rdma {bps_rdma.__version__}, Linux {platform.release()}, {platform.machine()}")
    limit = _core.locked_memory_limit()
    if limit is None or limit >= _ENOUGH_LOCKED:
        report.add("locked memory", "ok", "no limit" if limit is None else f"{limit >> 20} MiB")
    else:
        report.add(
            "locked memory",
            "note",
            f"limited to {limit >> 10} KiB; RDMA locks the memory of tensors (root has no limit)",
            "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity in a systemd unit",
        )
    report.add(
        "shared memory", "ok", f"anonymous (memfd), of which {available() >> 20} MiB are free; /dev/shm is not used"
    )


def _look_at_libraries(report: Findings, *, needed: bool) -> None:
    rdma = report.rdma
    if rdma["libraries"]:
        report.add("verbs libraries", "ok", f"{rdma['verbs_library']}, {rdma['cm_library']}")
    else:
        report.add("verbs libraries", "bad" if needed else "note", rdma["why_not"], rdma["hint"])


def _look_at_devices(report: Findings) -> None:
    for device in report.rdma["devices"]:
        for port in device["ports"]:
            fact = (
                f"{port['state']}, {port['link']}, MTU {port['mtu']}, {len(port['gids'])} GIDs, "
                f"messages up to {port['largest_message'] >> 20} MiB"
            )
            hint = "" if port["active"] else "bring the link up: ip link set <interface> up"
            report.add(f"{device['name']} port {port['number']}", "ok" if port["active"] else "note", fact, hint)


def _speed(mbit: int) -> str:
    """The speed of a rail in parentheses; nothing when it is unknown."""
    return f" ({mbit / 1000:g} Gbit/s)" if mbit else ""


def _look_at_choice(report: Findings, *, needed: bool) -> None:
    rdma = report.rdma
    for rail in rdma["tcp_rails"]:
        report.add("tcp will use", "ok", f"{rail['interface']} {rail['address']}".strip() + _speed(rail["speed"]))
    for rail in rdma["rails"]:
        where = f"{rail['device']} port {rail['port']}{_speed(rail['speed'])}, GID {rail['gid_index']}"
        report.add("rdma will use", "ok", f"{where}: {rail['reason']}")
    if not rdma["rails"] and rdma["libraries"]:
        report.add("rdma will use", "bad" if needed else "note", f"nothing: {rdma['why_not']}", rdma["hint"])


_NEAR = {
    "switch": "behind the same PCIe switch",
    "root": "at the same PCIe root",
    "node": "at the same NUMA node",
    "far": "farther",
}


def look_at_gpus(report: Findings, *, by_core: bool, direct: bool = False, near_gpu: str = "") -> None:
    """Says what was found of GPUs, and how their tensors travel.

    Args:
        by_core: with BPS_DEVICE_ROUTE=1.
        direct: and with BPS_GPUDIRECT=1.
        near_gpu: BPS_RDMA_NEAR_GPU.
    """
    found = report.gpus
    if not found.found:
        if found.on_bus == 0 and not (found.why_not and (by_core or found.kernel_driver)):
            report.add("GPUs", "ok", "none")
            return
        why = found.why_not or "CUDA's driver shows none of them"
        hint = found.hint or "see CUDA_VISIBLE_DEVICES and nvidia-smi"
        report.add("GPUs", "bad" if by_core else "note", f"{found.on_bus} of NVIDIA on the PCI bus; {why}", hint)
        return
    version = f"{found.kernel_driver}, " if found.kernel_driver else ""
    report.add("GPUs", "ok", f"{len(found.found)}, driver {version}CUDA {found.cuda}")
    for gpu in found.found:
        where = f"{gpu.name}, {gpu.memory_bytes >> 30} GiB, PCI {gpu.address}"
        node = f", NUMA node {gpu.node}" if gpu.node >= 0 else ""
        near = f"; {_nics_of(gpu)}" if gpu.nics else "; no NIC is near"
        report.add(f"GPU {gpu.ordinal}", "ok", where + node + near)
    _look_at_nics_of_gpus(report, chooses=near_gpu != "")
    if len(found.found) > 1:
        pairs = len(found.found) * (len(found.found) - 1) // 2
        fact = f"{found.pairs} of {pairs} pairs reach each other's memory, {found.linked} with atomics, as over NVLink"
        report.add("GPU to GPU", "ok", fact)
    able = sum(gpu.has_dma_buf for gpu in found.found)
    peermem = "nvidia_peermem is loaded" if found.has_peermem else "nvidia_peermem is not loaded"
    use = "used to reach servers by RDMA" if direct else "not used without BPS_DEVICE_ROUTE=1 and BPS_GPUDIRECT=1"
    report.add("GPUDirect", "ok", f"dma-buf on {able} of {len(found.found)} GPUs, {peermem}; {use}")
    who = "the core (BPS_DEVICE_ROUTE=1)" if by_core else "threads of Python (BPS_DEVICE_ROUTE=0)"
    but = ", but for what RDMA devices take themselves" if direct else ""
    report.add("CUDA tensors", "ok", f"copied to pinned memory of this machine and back, by {who}{but}")


def _nics_of(gpu: gpus.Gpu) -> str:
    """All NICs, by their distance from it."""
    near: dict[str, dict[int, list[str]]] = {}
    for nic in gpu.by_distance:
        near.setdefault(nic.how, {}).setdefault(nic.bridges, []).append(nic.name)
    return "; ".join(
        f"{_NEAR[how]}: {', then '.join(', '.join(names) for names in groups.values())}" for how, groups in near.items()
    )


def _look_at_nics_of_gpus(report: Findings, *, chooses: bool) -> None:
    """Says which RDMA devices ranks use, where some are nearer to a GPU than others."""
    known = {device["name"] for device in report.rdma.get("devices", [])}
    lists = {gpu.ordinal: gpu.nics for gpu in report.gpus.found if gpu.nics and len(gpu.nics) < len(gpu.by_distance)}
    if not any(known.intersection(nics) for nics in lists.values()):
        return
    use = "a rank uses those that are nearest to its GPU" if chooses else "a rank uses all, wherever its GPU is"
    hint = (
        ""
        if chooses
        else "with a rank for each GPU, set BPS_RDMA_NEAR_GPU=auto, or for each rank what its GPU says here"
    )
    lines = "; ".join(f"GPU {number}: BPS_RDMA_HCA=={','.join(nics)}" for number, nics in lists.items())
    report.add("NICs of GPUs", "ok" if chooses else "note", f"{use}; {lines}", hint)


def _look_at_memory(report: Findings, rule: str) -> None:
    """Says which tensors a card uses directly."""
    what, hint = _core.memory_watch_obstacle()
    if rule == "trusted":
        fact = "used directly (BPS_RDMA_MEMORY=trusted): a program that gives memory back gets wrong sums"
        report.add("memory of tensors", "note", fact, "unset BPS_RDMA_MEMORY")
    elif rule == "staged":
        report.add("memory of tensors", "ok", "copied, unless it is that of bps_rdma.empty() (BPS_RDMA_MEMORY=staged)")
    elif what:
        fact = f"{what}: tensors are copied on their way to and from the card, unless they are in bps_rdma.empty()"
        report.add("memory of tensors", "note", fact, hint)
    else:
        report.add("memory of tensors", "ok", "used directly; the kernel tells when it is given back")


def _transfer(report: Findings, config: _core.Config, number: int, rail: dict[str, Any], timeout_s: float) -> None:
    name = f"transfer over {rail['device']}"
    try:
        done = _core.rdma_self_transfer(config, number, _TRANSFER_BYTES, timeout_s)
    except BpsError as error:
        report.add(name, "bad", error.message, error.hint)
        return
    report.add(
        name,
        "ok",
        f"{done['bytes'] >> 20} MiB sent to this process and verified: {done['gigabytes_per_second']:.2f} GB/s, "
        f"round trip of a message {done['round_trip_us']:.0f} us",
    )


def check_peer(
    report: Findings, *, peer: str | None, code: str | None, port: int, wait_s: float, timeout_s: float
) -> None:
    """Sum 64 MiB with a doctor on another machine: the one at `peer`, or the first that connects within `wait_s`."""
    from bps_rdma.tools.doctor_peer import Rendezvous, transfer

    try:
        if peer is not None:
            done = transfer(Rendezvous.from_options(peer, code), timeout_s)
        else:
            rendezvous = Rendezvous.create(_core.Config(), port)
            rendezvous.print_command(wait_s)
            done = transfer(rendezvous, wait_s)
    except (UnreachableError, DeadlineError) as error:
        where = f"no doctor answers at {peer}" if peer is not None else f"no doctor came within {wait_s:.0f} s"
        # Its words about a scheduler and its variables concern jobs.
        report.add("peer", "bad", f"{where}{_reason(error)}", _NO_DOCTOR)
        return
    except AuthenticationError as error:
        hint = "give --code as the doctor at --peer printed it; each start of it has a new one"
        report.add("peer", "bad", error.message, hint)
        return
    except BpsError as error:
        report.add("peer", "bad", error.message, error.hint)
        return
    report.add(
        "peer",
        "ok",
        f"{done.nbytes >> 20} MiB summed with it over {done.transport} and verified: "
        f"{done.nbytes / done.seconds / 1e9:.2f} GB/s; 8 bytes in {done.small_seconds * 1e6:.0f} us",
    )


def _reason(error: BpsError) -> str:
    """The system's words about a connection, in parentheses."""
    return error.message[error.message.index(" (") :] if error.message.endswith(")") else ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    transfer: Annotated[bool, typer.Option(help="Send 64 MiB to this process over the NIC and verify them.")] = True,
    timeout: Annotated[float, typer.Option(min=1.0, help="Time limit of each transfer in seconds.")] = 30.0,
    serve: Annotated[bool, typer.Option("--serve", help="Wait for another doctor and sum 64 MiB with it.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for --serve. Default: a free one.")] = 0,
    wait: Annotated[float, typer.Option(min=1.0, help="Seconds that --serve waits.")] = 300.0,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Sum 64 MiB with the doctor that serves there.")
    ] = None,
    code: Annotated[str | None, typer.Option(help="The code that the doctor at --peer printed.")] = None,
) -> int:
    """Check this machine: RDMA libraries, devices, ports, GIDs and the choice among them, GPUs, and verified transfers.

    The exit status is 1 when the settings ask for something that does not work, 2 when a setting is invalid.
    """
    if peer is not None:
        from bps_rdma.tools.doctor_peer import Rendezvous

        Rendezvous.from_options(peer, code)  # raises before anything is measured
    report = examine(transfer=transfer, timeout_s=timeout)
    if serve or peer is not None:
        check_peer(report, peer=peer, code=code, port=port, wait_s=wait, timeout_s=timeout)
    if as_json:
        checks = [asdict(check) for check in report.checks]
        found = {"checks": checks, "rdma": report.rdma, "gpus": asdict(report.gpus)}
        print(json.dumps({"healthy": report.healthy, **found}, indent=1))
    else:
        _show(report, wide_console(markup=True))
    return 0 if report.healthy else 1


def _show(report: Findings, console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in report.checks:
        hint = f"\n[cyan]{escape(check.hint)}[/cyan]" if check.hint else ""
        table.add_row(_MARKS[check.state], check.name, escape(check.fact) + hint)
    console.print(table)
    chosen = {
        (rail["device"], rail["port"], rail["gid_index"]): rail["reason"] for rail in report.rdma.get("rails", [])
    }
    gids = Table(box=SIMPLE_HEAD)
    for heading in ("device", "port", "GID", "type", "address", "interface", ""):
        gids.add_column(heading, overflow="fold")
    for device in report.rdma.get("devices", []):
        for port in device["ports"]:
            for gid in port["gids"]:
                reason = chosen.get((device["name"], port["number"], gid["index"]), "")
                gids.add_row(
                    device["name"], str(port["number"]), str(gid["index"]), gid["type"], gid["address"] or "-",
                    gid["interface"] or "-", f"[bold]chosen[/bold]: {escape(reason)}" if reason else "",
                )  # fmt: skip
    if gids.row_count:
        console.print(gids)
