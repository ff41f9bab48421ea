# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's driver and /sys say of the GPUs of this machine, for `bps doctor`. Nothing runs on them.

CUDA's driver is opened as the core opens it, by name and at run time. cuInit() makes no context.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bps_rdma import _core

_NO_DEVICE = 100  # CUDA's number for: there is a driver, and no GPU
_SYSTEM_NOT_READY = 802
_OF_DEVICE_DMA_BUF = 124  # attributes of a device, and of a pair
_OF_PAIR_ATOMICS = 3
_NVIDIA = "0x10de"
_OF_DISPLAYS = "0x03"  # the class of PCI that GPUs have, too
_SYS = Path("/sys")
_PATIENCE_S = 20.0


_ORDER = ("switch", "root", "node", "far")


@dataclass
class Near:
    """A NIC, as a GPU sees it.

    Attributes:
        how: "switch": both are behind one bridge or switch; "root": at one root complex; "node": at one NUMA node;
            "far": none of these, or nobody knows.
        bridges: how many both are behind; more are nearer.
    """

    name: str
    how: str
    bridges: int


@dataclass
class Gpu:
    """A GPU: its number for CUDA, its PCI address, and the NICs by their distance from it.

    Attributes:
        nics: those that are nearest to it.
        near: how near they are; "": no NIC is nearer than others.
        by_distance: all of them, the nearest ones first.
    """

    ordinal: int
    name: str
    memory_bytes: int
    address: str
    has_dma_buf: bool
    node: int = -1
    nics: list[str] = field(default_factory=list)
    near: str = ""
    by_distance: list[Near] = field(default_factory=list)


@dataclass
class Gpus:
    """The GPUs of a machine.

    Attributes:
        kernel_driver: version of NVIDIA's kernel module; "": it is not loaded.
        cuda: the newest version of CUDA that the driver has; "": it cannot be used.
        why_not, hint: what is wrong with it, and what to do.
        on_bus: how many GPUs of NVIDIA there are, whether the driver shows them or not.
        has_peermem: the kernel module nvidia_peermem is loaded.
        pairs, linked: of two GPUs, how many reach each other's memory; and those that have atomics, as over NVLink.
    """

    kernel_driver: str = ""
    cuda: str = ""
    why_not: str = ""
    hint: str = ""
    on_bus: int = 0
    has_peermem: bool = False
    found: list[Gpu] = field(default_factory=list)
    pairs: int = 0
    linked: int = 0


def look(library: str, sysfs: Path = _SYS) -> Gpus:
    """Looks for GPUs.

    Args:
        library: name or path of CUDA's driver.
        sysfs: where the kernel shows devices.
    """
    gpus = _answer(library)
    gpus.kernel_driver = _text(sysfs / "module/nvidia/version")
    gpus.on_bus = sum(_is_gpu(device) for device in _entries(sysfs / "bus/pci/devices"))
    gpus.has_peermem = (sysfs / "module/nvidia_peermem").exists()
    nics = _nics(sysfs)
    for gpu in gpus.found:
        place = sysfs / "bus/pci/devices" / gpu.address
        gpu.node = _node(place)
        gpu.by_distance = _by_distance(place, nics)
        nearest = _nearest(gpu.by_distance)
        gpu.nics, gpu.near = [one.name for one in nearest], nearest[0].how if nearest else ""
    return gpus


# ---- CUDA's driver


class DriverError(Exception):
    """The driver has refused a call."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(f"{words} (CUDA error {number})")
        self.number = number


class Driver:
    """CUDA's driver, opened by name or path. Raises DriverError where it refuses a call."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def call(self, function: str, *args: Any) -> None:
        """Calls it."""
        number = getattr(self._library, function)(*args)
        if number != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(number, ctypes.byref(text))
            raise DriverError(number, (text.value or b"an unknown error").decode())

    def number(self, function: str, *args: Any) -> int:
        """The number that it puts where its first argument points."""
        found = ctypes.c_int()
        self.call(function, ctypes.byref(found), *args)
        return found.value

    def text(self, function: str, *args: Any) -> str:
        """The text that it puts there."""
        found = ctypes.create_string_buffer(128)
        self.call(function, found, len(found), *args)
        return found.value.decode(errors="replace")

    def bytes_of(self, device: int) -> int:
        """The memory of a GPU."""
        found = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(found), device)
        return found.value


def _answer(library: str) -> Gpus:
    """What the driver answers. A GPU that hangs may hold up its calls."""
    gpus = Gpus()
    thread = threading.Thread(target=_ask_driver, args=(gpus, library), name="bps_rdma gpus", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if thread.is_alive():
        why_not = f"CUDA's driver has not answered for {_PATIENCE_S:g} s"
        return Gpus(why_not=why_not, hint="see nvidia-smi and the kernel log (dmesg) for the state of the GPUs")
    return gpus


def _ask_driver(gpus: Gpus, library: str) -> None:
    try:
        driver = Driver(library)
        driver.call("cuInit", 0)
        version = driver.number("cuDriverGetVersion")
        gpus.cuda = f"{version // 1000}.{version % 1000 // 10}"
        gpus.found = [_gpu(driver, ordinal) for ordinal in range(driver.number("cuDeviceGetCount"))]
        _ask_pairs(gpus, driver)
    except DriverError as error:
        if error.number == _NO_DEVICE:
            return
        gpus.why_not = f"CUDA's driver cannot be used: {error}"
        gpus.hint = "see nvidia-smi and the kernel log (dmesg) for the state of the GPUs"
        if error.number == _SYSTEM_NOT_READY:
            gpus.hint = "GPUs behind an NVSwitch need its service: systemctl start nvidia-fabricmanager"
    except (OSError, AttributeError) as error:  # there is no library, or it has no such function
        gpus.why_not = f"CUDA's driver cannot be opened: {error}"
        gpus.hint = "install NVIDIA's driver 515 or newer; a container gets it by `docker run --gpus all`"


def _gpu(driver: Driver, ordinal: int) -> Gpu:
    device = driver.number("cuDeviceGet", ordinal)
    return Gpu(
        ordinal=ordinal,
        name=driver.text("cuDeviceGetName", device),
        memory_bytes=driver.bytes_of(device),
        address=driver.text("cuDeviceGetPCIBusId", device).lower(),  # as the kernel writes it
        has_dma_buf=driver.number("cuDeviceGetAttribute", _OF_DEVICE_DMA_BUF, device) != 0,
    )


def _ask_pairs(gpus: Gpus, driver: Driver) -> None:
    devices = [driver.number("cuDeviceGet", gpu.ordinal) for gpu in gpus.found]
    for place, one in enumerate(devices):
        for other in devices[:place]:
            if all(driver.number("cuDeviceCanAccessPeer", *pair) for pair in ((one, other), (other, one))):
                gpus.pairs += 1
                gpus.linked += driver.number("cuDeviceGetP2PAttribute", _OF_PAIR_ATOMICS, one, other) != 0


# ---- /sys


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_gpu(device: Path) -> bool:
    return _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_OF_DISPLAYS)


def _node(device: Path) -> int:
    try:
        return int(_text(device / "numa_node"))
    except ValueError:
        return -1


def _nics(sysfs: Path) -> dict[str, Path]:
    """Where the RDMA devices are; without any, the network interfaces."""
    for kind in ("infiniband", "net"):
        devices = {entry.name: entry / "device" for entry in _entries(sysfs / "class" / kind)}
        found = {name: device for name, device in devices.items() if "pci" in str(device.resolve())}
        if found:
            return found
    return {}


def _by_distance(gpu: Path, nics: dict[str, Path]) -> list[Near]:
    """All NICs, the nearest ones first."""
    found = [Near(name, *_core.distance_of(str(gpu), str(nic))) for name, nic in nics.items()]
    return sorted(found, key=lambda one: (_ORDER.index(one.how), -one.bridges, one.name))


def _nearest(nics: list[Near]) -> list[Near]:
    """Those of them to which a GPU is nearest; none where it is as far from all."""
    return [one for one in nics if (one.how, one.bridges) == (nics[0].how, nics[0].bridges) and one.how != "far"]
