"""Hardware described in a file, so that a training can be planned for a machine that is not there.

One TOML file describes one machine: its devices, the host memory they share, the links, the disk. Every name carries its unit.
`Hardware.machine` turns it into what the planner reads (profiles.py) for one of the devices: what devices share is divided
evenly. The files that ship lie in protrain/machines; any other is given by its path.

    name = "..."
    n_devices = 4
    [device]                                # what computes
    memory_bytes, reserved_bytes            # of one; what the driver and libraries keep for themselves
    memory_bytes_per_second
    operation_seconds                       # between the ends of two operations, beside their work
    flops_share                             # of the peaks below that whole steps reach on large matrix products; 0 to 1
    [device.flops_per_second]               # by type of the operands, as the data sheet says: fp32, bf16, fp16
    [host]                                  # absent: the device computes out of the host's own memory
    memory_bytes, reserved_bytes, memory_bytes_per_second, update_bytes_per_second      # of all devices together
    [link]                                  # with [host]: between it and one device
    upload_bytes_per_second, offload_bytes_per_second
    overlap                                 # 1: both directions share the time; 2: neither slows the other
    [gather]                                # with several devices: what one receives from the others
    bytes_per_second
    [disk]                                  # absent: no disk is used
    read_bytes_per_second, write_bytes_per_second, overlap, capacity_bytes              # of all devices together
    [drag]                                  # compute lost to each byte that a lane carries beside it
    upload_seconds_per_byte, offload_..., gather_..., disk_read_..., disk_write_..., update_..., stash_seconds_per_byte
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..base.reading import MOST_INT, open_file, shown
from ..errors import PlanError
from .profiles import Machine, Speed

#: The types whose peaks a file may give.
DTYPES = ("fp32", "bf16", "fp16")
Table = TypeVar("Table")


@dataclass(frozen=True)
class Device:
    """What computes: one of n_devices that are alike."""

    memory_bytes: int
    reserved_bytes: int
    memory_bytes_per_second: float
    operation_seconds: float
    flops_share: float
    flops_per_second: dict[str, float]

    def flops(self, dtype: str, where: str) -> float:
        """What whole steps reach in operations of this type, a multiply-add being two.

        Raises:
            PlanError: the file gives no peak for it; `where` names the file.
        """
        peak = self.flops_per_second.get(dtype)
        if peak is None:
            known = ", ".join(sorted(self.flops_per_second))
            raise PlanError(f"{where}: [device.flops_per_second] has no {dtype}, only {known}; add it, or use another precision")
        return peak * self.flops_share


@dataclass(frozen=True)
class Host:
    """Memory beside the devices. update: bytes of parameters and optimizer state that all its cores update."""

    memory_bytes: int
    reserved_bytes: int
    memory_bytes_per_second: float
    update_bytes_per_second: float


@dataclass(frozen=True)
class Link:
    """Between the host and one device."""

    upload_bytes_per_second: float
    offload_bytes_per_second: float
    overlap: float


@dataclass(frozen=True)
class Gather:
    """Between devices: what one receives while all gather a chunk, or reduce gradients."""

    bytes_per_second: float


@dataclass(frozen=True)
class Disk:
    """Shared by all devices."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    overlap: float
    capacity_bytes: int


@dataclass(frozen=True)
class Drag:
    """Seconds of compute lost for each byte that a lane carries; stash: beside the lane's, for bytes of activations."""

    upload_seconds_per_byte: float
    offload_seconds_per_byte: float
    gather_seconds_per_byte: float
    disk_read_seconds_per_byte: float
    disk_write_seconds_per_byte: float
    update_seconds_per_byte: float
    stash_seconds_per_byte: float


def _speed(bytes_per_second: float, drag_seconds_per_byte: float) -> Speed:
    """Of a lane that is as fast while compute waits."""
    return Speed(bytes_per_second, bytes_per_second, drag_seconds_per_byte)


@dataclass(frozen=True)
class Hardware:
    """A machine as its file describes it. `source` names the file, for messages."""

    name: str
    n_devices: int
    device: Device
    drag: Drag
    host: Host | None = None
    link: Link | None = None
    gather: Gather | None = None
    disk: Disk | None = None
    source: str = ""

    @property
    def device_bytes(self) -> int:
        """What one device has for training."""
        return self.device.memory_bytes - self.device.reserved_bytes

    @property
    def host_bytes(self) -> int:
        """What the host has for training, for all devices together; 0 where the device is its own host."""
        return self.host.memory_bytes - self.host.reserved_bytes if self.host else 0

    def machine(self, param_bytes: int, state_bytes: int) -> Machine:
        """What the planner reads, for one device of them all. An update reads gradients, parameters and state and writes the last
        two, so memory carries more than twice the bytes that count as updated.

        Args:
            param_bytes, state_bytes: of one parameter (and of its gradient), and of its optimizer state.
        """
        updated = param_bytes + state_bytes
        device_update = self.device.memory_bytes_per_second * updated / (2 * updated + param_bytes)
        n, drag = self.n_devices, self.drag
        upload = offload = gather = disk_read = disk_write = Speed()
        update = _speed(device_update, drag.update_seconds_per_byte)
        if self.host and self.link:
            share = self.host.memory_bytes_per_second / n
            update = _speed(self.host.update_bytes_per_second / n, drag.update_seconds_per_byte)
            upload = _speed(min(self.link.upload_bytes_per_second, share), drag.upload_seconds_per_byte)
            offload = _speed(min(self.link.offload_bytes_per_second, share), drag.offload_seconds_per_byte)
        if self.gather and n > 1:
            gather = _speed(self.gather.bytes_per_second, drag.gather_seconds_per_byte)
        if self.disk:
            disk_read = _speed(self.disk.read_bytes_per_second / n, drag.disk_read_seconds_per_byte)
            disk_write = _speed(self.disk.write_bytes_per_second / n, drag.disk_write_seconds_per_byte)
        return Machine(
            upload=upload,
            offload=offload,
            gather=gather,
            disk_read=disk_read,
            disk_write=disk_write,
            update=update,
            disk_overlap=self.disk.overlap if self.disk else 1.0,
            link_overlap=self.link.overlap if self.link else 2.0,
            stash_drag_seconds_per_byte=drag.stash_seconds_per_byte,
            step_update_bytes_per_second=device_update,
        )

    def with_devices(self, n_devices: int) -> Hardware:
        """The same machine of which only so many devices are used; they share all of its host and disk.

        Raises:
            PlanError: it has not so many.
        """
        if isinstance(n_devices, bool) or not isinstance(n_devices, int) or not 1 <= n_devices <= self.n_devices:
            possible = f"1 to {self.n_devices}" if self.n_devices > 1 else "1"
            raise PlanError(f"n_devices is {n_devices!r}; {self.source or self.name} has {self.n_devices}, give {possible}")
        return replace(self, n_devices=n_devices)


# ---- reading ----

#: What a number may be where "1 or more" is not the rule.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "reserved_bytes": (lambda value: value >= 0, "0 or more"),
    "operation_seconds": (lambda value: value >= 0, "0 or more"),
    "flops_share": (lambda value: 0 < value <= 1, "more than 0 and at most 1"),
    "overlap": (lambda value: 1 <= value <= 2, "1 to 2"),
}
_COUNT = (lambda value: value >= 1, "1 or more")
#: The planner takes no more: a core that looks at each byte for a microsecond (csrc/plan/request.c).
_DRAG = (lambda value: 0 <= value <= 1e-6, "0 or more, at most 1e-06")


class _Reader:
    """Reads one file; every message names it and the key."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, where: str, problem: str) -> PlanError:
        return PlanError(f"{self.source}: {where} {problem}")

    def number(self, value: Any, kind: type, name: str, where: str, of: type) -> int | float:
        allowed, words = _DRAG if of is Drag else _RANGES.get(name, _COUNT)
        wanted = "a whole number" if kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            raise self.fail(where, f"is {shown(value)}; give {wanted}, {words}")
        if not (abs(value) < MOST_INT and allowed(value)):
            most = "" if abs(value) < MOST_INT else f", and less than {MOST_INT}"
            raise self.fail(where, f"is {shown(value)}; it must be {words}{most}")
        return value if kind is int else float(value)

    def rates(self, value: Any, where: str) -> dict[str, float]:
        if not isinstance(value, dict) or not value:
            raise self.fail(f"[{where}]", f"is {shown(value)}; give a table of one or more of {', '.join(DTYPES)}")
        for name in value:
            if name not in DTYPES:
                raise self.fail(f"[{where}]", f"has an unknown key {shown(name)}; known are {', '.join(DTYPES)}")
        return {name: float(self.number(rate, float, name, f"[{where}] {name}", Device)) for name, rate in value.items()}

    def field(self, kind: Any, value: Any, name: str, where: str, of: type) -> Any:
        place = f"[{where}] {name}" if where else name
        inner = f"{where}.{name}" if where else name
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(one for one in get_args(kind) if one is not type(None))
        if get_origin(kind) is dict:
            return self.rates(value, inner)
        if kind is str:
            if not isinstance(value, str) or not value:
                raise self.fail(place, f"is {shown(value)}; give a name in quotes")
            return value
        if kind in (int, float):
            return self.number(value, kind, name, place, of)
        return self.table(kind, value, inner)

    def table(self, kind: type[Table], values: Any, where: str) -> Table:
        """A dataclass of a table: every key known, every value of its type and range, none missing."""
        table = f"[{where}]" if where else "the file"
        if not isinstance(values, dict):
            raise self.fail(table, f"is {shown(values)}; it must be a table")
        hints = get_type_hints(kind)
        wanted = [f for f in fields(kind) if f.name != "source"]  # type: ignore[arg-type]
        names = [f.name for f in wanted]
        for name in values:
            if name not in names:
                raise self.fail(table, f"has an unknown key {shown(name)}; known are {', '.join(names)}")
        for f in wanted:
            if f.default is MISSING and f.name not in values:
                raise self.fail(table, f"lacks {f.name}; known keys are {', '.join(names)}")
        return kind(**{name: self.field(hints[name], value, name, where, kind) for name, value in values.items()})


def _check_whole(hardware: Hardware, read: _Reader) -> Hardware:
    """What holds between tables."""
    device, host = hardware.device, hardware.host
    if (host is None) != (hardware.link is None):
        there, missing = ("[host]", "[link]") if host else ("[link]", "[host]")
        raise read.fail(there, f"is there without {missing}; give both, or none where the device is its own host")
    if host is None and hardware.n_devices > 1:
        raise read.fail("n_devices", f"is {hardware.n_devices} without [host]; several devices need a host")
    if hardware.n_devices > 1 and hardware.gather is None:
        raise read.fail("the file", f"lacks [gather], which {hardware.n_devices} devices need")
    if device.reserved_bytes >= device.memory_bytes:
        raise read.fail("[device] reserved_bytes", f"is {device.reserved_bytes}; it must be less than memory_bytes")
    if slow := [dtype for dtype, peak in device.flops_per_second.items() if peak * device.flops_share < 1]:
        share = f"is {device.flops_share}; of the peak of {slow[0]} that is less than 1 a second: give more"
        raise read.fail("[device] flops_share", share)
    if host and host.reserved_bytes >= host.memory_bytes:
        raise read.fail("[host] reserved_bytes", f"is {host.reserved_bytes}; it must be less than memory_bytes")
    return hardware


def shipped_hardware() -> list[str]:
    """The names of the machines that ship."""
    folder = resources.files("protrain") / "machines"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_hardware(name: str | Path, *, n_devices: int | None = None) -> Hardware:
    """A machine from its file.

    Args:
        name: of one that ships, or the path of a TOML file.
        n_devices: use so many of its devices; None: all.

    Raises:
        PlanError: no such file, or it is not a description as above; the message names file and key.
    """
    shipped = shipped_hardware()
    text = str(name)
    if text in shipped:
        content, source = (resources.files("protrain") / "machines" / f"{text}.toml").read_bytes(), f"{text}.toml"
    else:
        try:
            with open_file(text) as file:
                content, source = file.read(), text
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise PlanError(
                f"hardware is {text!r}, which cannot be read: {reason}; give the path of a TOML file, "
                f"or one of {', '.join(shipped)}"
            ) from None
    try:
        values = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source}: it is not TOML: {str(error)[:200]}") from None
    read = _Reader(source)
    found = _check_whole(replace(read.table(Hardware, values, ""), source=source), read)
    return found if n_devices is None else found.with_devices(n_devices)
