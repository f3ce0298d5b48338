"""Disks that are full, read-only or gone, and limits of the system: each with its message, and the model as it was."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TIGHT, Chain, inputs, steps
from twins import adamw, bits

import protrain
from protrain.base import sizes
from protrain.base.sizes import cgroup_free_bytes

MIB = 1 << 20


def state_of(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: bits(value) for name, value in model.state_dict().items()}


def wrap(disk: Path, **options: Any) -> tuple[Any, Any]:
    model: Any = Chain()
    return protrain.wrap(model, adamw(model), memory=TIGHT, disk=disk, **options)


def plain(count: int) -> list[Any]:
    """Losses of so many steps in plain torch."""
    model = Chain()
    return steps(inputs(count))(model, adamw(model), True)


@contextlib.contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def address_bytes() -> int:
    """What this process has of its address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def refused(error: Any, number: int, path: Path, words: str) -> None:
    assert error.errno == number, f"{error.errno}: {error}"
    assert str(error.filename).startswith(str(path))
    assert str(path) in str(error)
    assert re.search(words, str(error)), str(error)
    assert "\n" not in str(error)


# ---- limits of the process ----


def test_a_limit_of_file_sizes(fresh_disk: Path) -> None:
    """In wrap and in save: told each time; when the limit is gone all goes on."""
    expected = plain(3)
    with limited(resource.RLIMIT_FSIZE, MIB), pytest.raises(protrain.DiskError) as caught:
        wrap(fresh_disk)
    refused(caught.value, errno.EFBIG, fresh_disk, r"\d+ bytes.*limit")
    assert caught.value.asked_bytes > 0
    model, optimizer = wrap(fresh_disk)
    assert steps(inputs(1))(model, optimizer, False) == expected[:1]
    target = fresh_disk / "checkpoint"
    protrain.save(model, optimizer, target)
    saved = {path.name: path.read_bytes() for path in target.iterdir()}
    assert steps(inputs(2)[1:])(model, optimizer, False) == expected[1:2]
    with limited(resource.RLIMIT_FSIZE, MIB), pytest.raises(protrain.DiskError, match="File too large") as caught:
        protrain.save(model, optimizer, target)
    refused(caught.value, errno.EFBIG, target, "saving to")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == saved
    assert os.listdir(fresh_disk) == ["checkpoint"]
    assert steps(inputs(3)[2:])(model, optimizer, False) == expected[2:]
    protrain.unwrap(model)


def store_bytes(folder: Path) -> int:
    """The size of the store's file in folder, which has no name."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if re.fullmatch(rf"{folder}/\S+ \(deleted\)", os.readlink(f"/proc/self/fd/{name}")):
                return os.stat(f"/proc/self/fd/{name}").st_size
    raise AssertionError(f"no store in {folder}")


@pytest.mark.parametrize("modes", [None, ["swap"] * 8], ids=["planned", "swap"])
def test_a_limit_of_file_sizes_in_a_step_that_needs_more_room(modes: list[str] | None, fresh_disk: Path) -> None:
    """For updates, and for what blocks save: told each time it is attempted, and made when the limit is gone."""
    batches, reference = inputs(2, rows=512), Chain()
    expected = steps(batches)(reference, adamw(reference), True)
    model, optimizer = wrap(fresh_disk, block_modes=modes)
    size = store_bytes(fresh_disk)
    for _ in range(2):
        with limited(resource.RLIMIT_FSIZE, size), pytest.raises(protrain.DiskError) as caught:
            steps(batches[:1])(model, optimizer, False)
        refused(caught.value, errno.EFBIG, fresh_disk, r"cannot reserve \d+ bytes more.*limit")
        assert caught.value.asked_bytes > 0
        assert protrain.status(model).steps == 0
        del caught  # it holds the frames, and so the graph, of what failed
        optimizer.zero_grad()
    assert steps(batches)(model, optimizer, False) == expected
    assert store_bytes(fresh_disk) > size
    protrain.unwrap(model)


def test_a_limit_of_descriptors(fresh_disk: Path) -> None:
    """No descriptor is left for the store's file: nothing was changed, and nothing stays open."""
    model: Any = Chain()
    before = state_of(model)
    optimizer, wrap_now = adamw(model), protrain.wrap  # both import what they need
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    with limited(resource.RLIMIT_NOFILE, free), pytest.raises(protrain.DiskError) as caught:
        wrap_now(model, optimizer, memory=TIGHT, disk=fresh_disk)
    refused(caught.value, errno.EMFILE, fresh_disk, "Too many open files")
    assert state_of(model) == before
    again = os.open("/dev/null", os.O_RDONLY)
    os.close(again)
    assert again == free
    model, _ = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    protrain.unwrap(model)
    assert state_of(model) == before


@pytest.mark.parametrize("free", range(3))
def test_a_save_without_descriptors_leaves_nothing(free: int, fresh_disk: Path) -> None:
    """So many are left when it begins: what it had written is removed with them, and the checkpoint that was there stays."""
    model, optimizer = wrap(fresh_disk)
    target = fresh_disk / "checkpoint"
    protrain.save(model, optimizer, target)
    before = {path.name: path.stat().st_ino for path in target.iterdir()}
    steps(inputs(1))(model, optimizer, False)
    first = os.open("/dev/null", os.O_RDONLY)
    os.close(first)
    with limited(resource.RLIMIT_NOFILE, first + free), pytest.raises(protrain.DiskError) as caught:
        protrain.save(model, optimizer, target)
    refused(caught.value, errno.EMFILE, fresh_disk, "Too many open files")
    assert {path.name: path.stat().st_ino for path in target.iterdir()} == before
    assert os.listdir(fresh_disk) == ["checkpoint"]
    protrain.unwrap(model)


def test_no_locked_memory_is_needed(fresh_disk: Path) -> None:
    with limited(resource.RLIMIT_MEMLOCK, 0):
        model, optimizer = wrap(fresh_disk)
        found = steps(inputs(2))(model, optimizer, False)
        protrain.unwrap(model)
    assert found == plain(2)


def test_a_limit_of_address_space_in_wrap(fresh_disk: Path) -> None:
    """Not every lane can start its thread: one line, nothing was changed, no thread stays; then it can be wrapped."""
    first, optimizer = wrap(fresh_disk)  # what is made once in a process is there
    steps(inputs(1))(first, optimizer, False)
    model: Any = Chain()
    before, threads = state_of(model), len(os.listdir("/proc/self/task"))
    words = "cannot start the thread ptn-.*Resource temporarily unavailable; raise the limit .*ulimit -u"
    with pytest.raises(protrain.OutOfMemoryError, match=words) as caught, limited(resource.RLIMIT_AS, address_bytes() + 4 * MIB):
        protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    assert "\n" not in str(caught.value)
    assert not getattr(caught.value, "__notes__", None)
    assert state_of(model) == before
    assert len(os.listdir("/proc/self/task")) == threads
    protrain.unwrap(first)
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    assert steps(inputs(2))(model, optimizer, False) == plain(2)
    protrain.unwrap(model)


ASKED_BYTES = 1 << 42


class Greedy(torch.autograd.Function):
    """Asks for too much in backward, where it is told to."""

    asks = False

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Greedy.asks:
            torch.empty(ASKED_BYTES, dtype=torch.uint8)
        return gradient


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_limit_of_address_space_in_a_step(where: str, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no memory although the budget would allow it: one line, and without the limit the same step is made."""

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = Greedy.apply(model(x))  # type: ignore[no-untyped-call]
        if where == "forward" and Greedy.asks:
            torch.empty(ASKED_BYTES, dtype=torch.uint8)
        return loss

    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=4 * ASKED_BYTES, disk=fresh_disk)
    losses = steps(inputs(1), loss_of)(model, optimizer, False)
    monkeypatch.setattr(Greedy, "asks", True)
    words = r"the system refuses \d+ bytes of addresses \(Cannot allocate memory\): raise the limit on addresses \(ulimit -v\)"
    with limited(resource.RLIMIT_AS, address_bytes() + 64 * MIB), pytest.raises(protrain.OutOfMemoryError, match=words) as caught:
        steps(inputs(2)[1:], loss_of)(model, optimizer, False)
    assert "\n" not in str(caught.value)
    assert protrain.status(model).steps == 1
    monkeypatch.undo()
    optimizer.zero_grad()
    losses += steps(inputs(2)[1:], loss_of)(model, optimizer, False)
    protrain.unwrap(model)
    assert losses == plain(2)


SECOND, FIRST = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_budgets_know_control_groups(tmp_path: Path) -> None:
    """The smallest room of the process's own group and of those above, in both versions; caches of files are no use of memory."""

    def group(path: str, limit: str, usage: int, cache: int, names: tuple[str, str], stat: str) -> None:
        folder = tmp_path / "fs" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{stat} {cache}\n")

    def room(listing: str) -> int | None:
        (tmp_path / "cgroup").write_text(listing)
        return cgroup_free_bytes(str(tmp_path / "cgroup"), str(tmp_path / "fs"))

    group("a.slice/b.scope", "max", 10, 0, SECOND, "inactive_file")
    group("a.slice", str(8 * MIB), 5 * MIB, MIB, SECOND, "inactive_file")
    assert room("0::/a.slice/b.scope\n") == 4 * MIB
    assert room("0::/\n") is None
    assert room("0::/elsewhere\n") is None
    assert room("0::/../../a.slice\n") == 4 * MIB
    group("a.slice/b.scope", str(3 * MIB), 5 * MIB, 0, SECOND, "inactive_file")
    assert room("0::/a.slice/b.scope\n") == 0
    group("memory/jobs/one", str(6 * MIB), 2 * MIB, 0, FIRST, "total_inactive_file")
    group("memory", str(1 << 62), 0, 0, FIRST, "total_inactive_file")
    assert room("5:cpu,cpuacct:/jobs/one\n4:memory:/jobs/one\n0::/\n") == 4 * MIB
    assert room("4:memory:/\n") is None
    assert room("") is None
    assert cgroup_free_bytes(str(tmp_path / "missing")) is None


@pytest.mark.parametrize("names", [SECOND, FIRST], ids=["version 2", "version 1"])
def test_a_budget_above_the_limit_of_a_control_group_is_warned_of(
    names: tuple[str, str], tmp_path: Path, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, before anything is changed, in one line; the model trains, as it does not reach the limit. A budget of that
    limit, and one that nobody gave, pass."""
    line, root = ("0::", "") if names is SECOND else ("4:memory:", "memory")
    above = tmp_path / "fs" / root / "jobs"
    (above / "one").mkdir(parents=True)
    for folder, limit in ((above / "one", "max" if names is SECOND else str((1 << 63) - 4096)), (above, str(64 * MIB))):
        (folder / names[0]).write_text(f"{limit}\n")
    (tmp_path / "cgroup").write_text(f"{line}/jobs/one\n")
    found = functools.partial(sizes.cgroup_limit, str(tmp_path / "cgroup"), str(tmp_path / "fs"))
    assert found() == (64 * MIB, str(above))
    monkeypatch.setattr(sizes, "cgroup_limit", found)

    model: Any = Chain()
    before = state_of(model)
    optimizer = adamw(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning) as caught:
            protrain.wrap(model, optimizer, memory="65MiB", disk=fresh_disk)
    words = (
        f"memory is 65.00 MiB ({65 * MIB} bytes), above the limit of the control group {above}, 64.00 MiB ({64 * MIB} bytes): "
    )
    assert words in str(caught.value)
    assert "give memory below that" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert state_of(model) == before

    with pytest.warns(UserWarning, match="above the limit of the control group") as told:
        model, optimizer = protrain.wrap(model, optimizer, memory=65 * MIB, disk=fresh_disk)
    assert [warning.filename for warning in told] == [__file__]
    assert steps(inputs(1))(model, optimizer, False) == plain(1)
    protrain.unwrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for memory in (64 * MIB, None):
            model = Chain()
            model, _ = protrain.wrap(model, adamw(model), memory=memory, disk=fresh_disk)
            protrain.unwrap(model)
    (above / names[0]).write_text("max\n" if names is SECOND else f"{(1 << 63) - 4096}\n")
    assert found() is None


def test_a_budget_above_all_memory_of_the_machine_is_warned_of(fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "cgroup_limit", lambda: None)
    total = sizes.memory_sizes()["MemTotal"]
    assert total > sizes.free_memory_bytes() > 0
    for memory, warned in ((total, False), (total + 1, True)):
        model = Chain()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model, _ = protrain.wrap(model, adamw(model), memory=memory, disk=fresh_disk)
        protrain.unwrap(model)
        words = [str(warning.message) for warning in told]
        assert len(words) == warned
        assert all(f"({memory} bytes), above this machine's memory, " in line and f" ({total} bytes): " in line for line in words)
        assert all("raise the limit" not in line and "\n" not in line for line in words)


GROUPED = """
import sys
from pathlib import Path
import torch
from nets import Block, Chain, inputs, steps
from twins import adamw
import protrain

def train(**options):
    model = Chain()
    model.blocks.extend(Block() for _ in range(16))  # 120 MiB of states in all
    optimizer = adamw(model)
    if options:
        model, optimizer = protrain.wrap(model, optimizer, **options)
    losses = steps(inputs(3))(model, optimizer, False)
    if options:
        print(protrain.status(model).budget_bytes, protrain.status(model).disk_read_bytes)
        protrain.unwrap(model)
    return losses

torch.set_num_threads(1)
want = train()
group = Path(sys.argv[1])
(group / "cgroup.procs").write_text("0")
assert train(disk=sys.argv[2], memory=None) == want
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group for memory, below that of this process; needs root."""
    places = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    if "memory" not in places:
        pytest.skip("no control groups of version 1 here")
    made = Path("/sys/fs/cgroup/memory", places["memory"].lstrip("/"), f"protrain-{os.getpid()}")
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield made
    made.rmdir()


def test_a_control_group_that_holds_less_than_the_states(group: Path, fresh_disk: Path) -> None:
    """Nobody says how much memory there is: the budget keeps to the group, and the kernel has nothing to kill."""
    limit = 112 * MIB
    (group / "memory.limit_in_bytes").write_text(str(limit))
    result = subprocess.run(
        [sys.executable, "-c", GROUPED, str(group), str(fresh_disk)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    budget, read = map(int, result.stdout.split())
    assert budget < limit
    assert read > 0


# ---- folders ----


def test_a_folder_that_vanishes(fresh_disk: Path) -> None:
    """The store needs no name; what is saved makes its folder anew."""
    disk, target = fresh_disk / "disk", fresh_disk / "gone" / "checkpoint"
    model, optimizer = wrap(disk)
    losses = steps(inputs(1))(model, optimizer, False)
    disk.rmdir()
    losses += steps(inputs(2)[1:])(model, optimizer, False)
    protrain.save(model, optimizer, target)
    with pytest.raises(protrain.DiskError, match="no checkpoint") as caught:
        protrain.load(model, optimizer, fresh_disk / "never")
    refused(caught.value, errno.ENOENT, fresh_disk / "never", "missing")
    protrain.unwrap(model)
    assert (target / "model.safetensors").is_file()
    assert losses == plain(2)


def test_a_folder_in_memory_is_refused() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    with pytest.raises(protrain.DiskError) as caught:
        wrap(Path("/dev/shm"))
    refused(caught.value, errno.ENOTSUP, Path("/dev/shm"), "is a tmpfs.*name a folder on a disk")


Mount = Callable[..., Path]


@pytest.fixture
def mount(fresh_disk: Path) -> Iterator[Mount]:
    """Mounts a small ext4 of its own; needs root and a loop device."""
    mounted: list[Path] = []

    def make(size: int, *options: str) -> Path:
        image, point = fresh_disk / f"image{len(mounted)}", fresh_disk / f"mount{len(mounted)}"
        point.mkdir()
        image.touch()
        os.truncate(image, size)
        try:
            subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, capture_output=True)
            words = ",".join(("loop", *options))
            subprocess.run(["mount", "-o", words, str(image), str(point)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        mounted.append(point)
        return point

    yield make
    for point in mounted:
        subprocess.run(["umount", str(point)], check=True)


def test_a_full_disk(mount: Mount, fresh_disk: Path) -> None:
    """In wrap and in save: what was there stays, and when there is room all goes on."""
    folder = mount(96 * MIB)
    filler = folder / "filler"
    target = folder / "checkpoint"
    model: Any = Chain()
    before = state_of(model)
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(MIB)):
            pass
    with pytest.raises(protrain.DiskError) as caught:
        protrain.wrap(model, adamw(model), memory=TIGHT, disk=folder)
    refused(caught.value, errno.ENOSPC, folder, r"(?s)\d+ bytes.*No space left")
    assert state_of(model) == before
    filler.unlink()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, disk=fresh_disk)
    steps(inputs(1))(model, optimizer, False)
    protrain.save(model, optimizer, target)
    saved = {path.name: path.read_bytes() for path in target.iterdir()}
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(MIB)):
            pass
    with pytest.raises(protrain.DiskError) as caught:
        protrain.save(model, optimizer, target)
    refused(caught.value, errno.ENOSPC, target, "No space left")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == saved
    assert not [name for name in os.listdir(folder) if name.endswith(".partial")]
    filler.unlink()
    protrain.save(model, optimizer, target)
    protrain.unwrap(model)


def test_a_read_only_disk(mount: Mount, fresh_disk: Path) -> None:
    folder = mount(16 * MIB, "ro")
    model, optimizer = wrap(fresh_disk)
    before = state_of(model)
    with pytest.raises(protrain.DiskError) as caught:
        protrain.save(model, optimizer, folder / "checkpoint")
    refused(caught.value, errno.EROFS, folder, "Read-only file system")
    assert state_of(model) == before
    protrain.unwrap(model)
    with pytest.raises(protrain.DiskError) as caught:
        wrap(folder)
    refused(caught.value, errno.EROFS, folder, "Read-only file system.*name a folder that can be written")
