"""Files and folders that take their name when they are whole, and what dead runs leave beside them."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from twins import MIB, adamw

import protrain
from protrain.base import replacing
from protrain.base.replacing import clear_leftovers, replaced, replaced_file


@pytest.fixture(params=["exchange", "renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a folder takes its place."""
    if request.param == "renames":
        monkeypatch.setattr(replacing, "_exchange_at_once", lambda _one, _other: False)
    return str(request.param)


def killed_in(work: Callable[[], object]) -> None:
    """A child of this process is killed in the middle of it: work() ends in `die`."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write(target: Path, content: str, then: Callable[[], object] = lambda: None) -> None:
    with replaced(target) as fresh:
        (fresh / "model.safetensors").write_text(content)
        then()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, way: str) -> None:
    target = tmp_path / "a" / "b"

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(target, "half", interrupted)
    assert names(tmp_path) == []
    for content in ("old", "new"):
        write(target, content)
        assert names(target.parent) == ["b"]
        assert (target / "model.safetensors").read_text() == content
    with pytest.raises(ValueError, match="late"), replaced(target):
        raise ValueError("late")
    assert (target / "model.safetensors").read_text() == "new"
    assert names(target.parent) == ["b"]


def test_a_mount_point_is_refused() -> None:
    """It could not change places with what was written."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in [one for one in points if os.path.isdir(one) and "\\" not in one][:20]:
        with pytest.raises(protrain.DiskError, match=f"^{point} is a mount point.*name a folder inside of it") as caught:
            replacing.check_target(point)
        assert caught.value.errno == errno.EBUSY
    assert not replacing._is_mount_point(Path(__file__).parent)


def test_a_dead_runs_folder_goes_with_the_next_one(tmp_path: Path, way: str) -> None:
    target = tmp_path / "checkpoint"
    write(target, "old")
    killed_in(lambda: write(target, "half", die))
    assert len(names(tmp_path)) == 2
    assert (target / "model.safetensors").read_text() == "old"
    write(target, "new")
    assert names(tmp_path) == ["checkpoint"]
    killed_in(lambda: write(target, "half", die))
    clear_leftovers(target)
    assert names(tmp_path) == ["checkpoint"]
    assert (target / "model.safetensors").read_text() == "new"


def test_a_living_runs_folder_stays(tmp_path: Path, way: str) -> None:
    """It is locked as long as its writer lives; names that only resemble those of leftovers are nobody's business."""
    target = tmp_path / "checkpoint"
    others = [".checkpoint.partial", ".checkpoint.12.partial", ".checkpoint2.0123456789abcdef.partial", "checkpoint.old"]
    for name in others:
        (tmp_path / name).mkdir()
    with replaced(target) as fresh:
        (fresh / "model.safetensors").write_text("slow")
        write(target, "fast")
        assert fresh.exists()
        clear_leftovers(target)
        assert fresh.exists()
    assert (target / "model.safetensors").read_text() == "slow"
    assert names(tmp_path) == sorted([*others, "checkpoint"])


def test_killed_between_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders cannot change places at once: the old one is put back by whoever comes next."""
    target = tmp_path / "checkpoint"
    write(target, "old")
    monkeypatch.setattr(replacing, "_exchange_at_once", lambda _one, _other: False)
    rename = Path.rename

    def second_kills(path: Path, to: Path) -> Path:
        if path.name.endswith(".partial"):
            die()
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", second_kills)
    killed_in(lambda: write(target, "new"))
    monkeypatch.setattr(Path, "rename", rename)
    assert not target.exists()
    clear_leftovers(target)
    assert names(tmp_path) == ["checkpoint"]
    assert (target / "model.safetensors").read_text() == "old"


def test_killed_after_the_places_were_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "checkpoint"
    write(target, "old")
    monkeypatch.setattr(replacing, "_sync", die)
    monkeypatch.setattr(replacing, "_sync_all", lambda _folder: None)
    killed_in(lambda: write(target, "new"))
    monkeypatch.undo()
    assert (target / "model.safetensors").read_text() == "new"
    assert len(names(tmp_path)) == 2
    clear_leftovers(target)
    assert names(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_name_that_the_disk_does_not_confirm(
    fault: BaseException, there: bool, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there is there again."""
    target, sync = tmp_path / "a" / "checkpoint", replacing._sync
    if there:
        write(target, "old")

    def fail_for_the_parent(path: Path) -> None:
        if path == target.parent:
            assert (target / "model.safetensors").read_text() == "new"
            raise fault
        sync(path)

    monkeypatch.setattr(replacing, "_sync", fail_for_the_parent)
    with pytest.raises(type(fault)):
        write(target, "new")
    assert names(tmp_path) == (["a"] if there else [])
    if there:
        assert (target / "model.safetensors").read_text() == "old"
        assert names(target.parent) == ["checkpoint"]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_renames_that_fail(nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename, count = tmp_path / "checkpoint", Path.rename, 0
    write(target, "old")

    def fail_once(path: Path, to: Path) -> Path:
        nonlocal count
        count += 1
        if count == nth:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(replacing, "_exchange_at_once", lambda _one, _other: False)
    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        write(target, "new")
    assert names(tmp_path) == ["checkpoint"]
    assert (target / "model.safetensors").read_text() == "old"


def test_what_cannot_be_put_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that became read-only: the new one is there, whole."""
    target, exchange = tmp_path / "checkpoint", replacing._exchange_at_once
    write(target, "old")

    def read_only(_path: object, _other: object = None) -> bool:
        raise OSError(errno.EROFS, "Read-only file system")

    def once(one: Path, other: Path) -> bool:
        done = exchange(one, other)
        for name in ("_exchange_at_once", "_sync"):
            monkeypatch.setattr(replacing, name, read_only)
        return done

    monkeypatch.setattr(replacing, "_exchange_at_once", once)
    with pytest.raises(protrain.DiskError, match=r"holds what is new.*cannot be put back: Read-only file system"):
        write(target, "new")
    assert (target / "model.safetensors").read_text() == "new"


def test_a_folder_that_cannot_be_listed_is_not_taken_for_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "checkpoint"
    write(target, "old")

    def broken_once(_path: object = None) -> object:
        monkeypatch.undo()
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        write(target, "new", lambda: monkeypatch.setattr(os, "scandir", broken_once))
    assert (target / "model.safetensors").read_text() == "old"
    assert names(tmp_path) == ["checkpoint"]


def test_through_a_link(tmp_path: Path, way: str) -> None:
    """A link to a folder on another disk stays one, and the folder behind it is what is replaced."""
    (tmp_path / "large").mkdir()
    (tmp_path / "checkpoint").symlink_to(tmp_path / "large" / "real")
    for content in ("one", "two"):
        write(tmp_path / "checkpoint", content)
        assert (tmp_path / "large" / "real" / "model.safetensors").read_text() == content
    assert (tmp_path / "checkpoint").is_symlink()
    assert names(tmp_path) == ["checkpoint", "large"]
    assert names(tmp_path / "large") == ["real"]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    (tmp_path / ".trace.json.0123456789abcdef.partial").write_text("a dead run's")
    with replaced_file(target) as fresh:
        assert stat.S_ISREG(os.lstat(fresh).st_mode)
        Path(fresh).write_text("one")
    with pytest.raises(ValueError, match="late"), replaced_file(target):
        raise ValueError("late")
    assert target.read_text() == "one"
    assert names(tmp_path) == ["trace.json"]


def test_names_cannot_be_foreseen(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        with replaced_file(tmp_path / "x") as fresh, replaced(tmp_path / "y") as folder:
            seen |= {fresh, str(folder)}
    assert len(seen) == 6
    assert not any(f".{os.getpid()}" in name for name in seen)


def test_what_is_no_checkpoint_is_not_replaced(fresh_disk: Path) -> None:
    model = torch.nn.Linear(64, 64)
    model, optimizer = protrain.wrap(model, torch.optim.AdamW(model.parameters()), memory="8MiB", disk=fresh_disk)
    folder, file = fresh_disk / "results", fresh_disk / "file"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years")
    file.write_text("x")
    with pytest.raises(protrain.DiskError, match=r"holds files that are no checkpoint, such as 'thesis\.tex'"):
        protrain.save(model, optimizer, folder)
    with pytest.raises(protrain.DiskError, match="is a file"):
        protrain.save(model, optimizer, file)
    assert (folder / "thesis.tex").read_text() == "years"
    assert file.read_text() == "x"
    assert names(fresh_disk) == ["file", "results"]
    protrain.unwrap(model)


@pytest.mark.parametrize("name", ["", ".", "..", "../work"])
def test_the_current_folder_is_not_replaced(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one above it; no name was once the current folder, with all that lay in it."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "config.json").write_text("{}")
    monkeypatch.chdir(work)
    with pytest.raises(protrain.DiskError, match=r"no name|current folder"), replaced(name):
        pass
    assert names(tmp_path) == ["work"]
    assert names(work) == ["config.json"]


@pytest.mark.parametrize("other", ["src/train.py", "notes.txt", ".git/HEAD", "model.safetensors/x"])
def test_a_folder_with_more_than_a_model_is_not_replaced(other: str, tmp_path: Path) -> None:
    """A config.json beside it makes it no checkpoint."""
    folder = tmp_path / "project"
    (folder / other).parent.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / other).write_text("years")
    with pytest.raises(protrain.DiskError, match=f"such as '{Path(other).parts[0]}'"), replaced(folder):
        pass
    assert (folder / other).read_text() == "years"
    assert names(tmp_path) == ["project"]


@pytest.mark.parametrize(("length", "refused"), [(229, False), (230, True), (300, True)])
def test_a_name_that_leaves_no_room_for_the_longer_one_is_refused_first(length: int, refused: bool, tmp_path: Path) -> None:
    target = tmp_path / ("x" * length)
    if refused:
        with pytest.raises(protrain.DiskError, match="is too long") as caught:
            replacing.check_target(target)
        assert caught.value.errno == errno.ENAMETOOLONG
    else:
        replacing.check_target(target)
        write(target, "new")


def test_a_folder_of_a_model_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (folder / name).write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt", "vocab.json"):
        (folder / name).write_text("{}")
    with replaced(folder) as fresh:
        (fresh / "new").touch()
    assert names(folder) == ["new"]


def test_what_others_put_into_a_checkpoint_stays(tmp_path: Path, way: str) -> None:
    """Files and folders that are no part of it, a log that is being written among them; what the last one left of itself goes."""
    folder = tmp_path / "run"
    write(folder, "first")
    for name in ("protrain.json", "model-00002-of-00002.safetensors", "notes.txt", "eval/deep/1.json", "tokenizer/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "latest").symlink_to("nowhere")
    with (folder / "log.txt").open("w") as log:
        for content in ("second", "third"):
            with replaced(folder) as fresh:
                (fresh / "model.safetensors").write_text(content)
                (fresh / "protrain.json").write_text(content)
            print(content, file=log, flush=True)
    assert names(folder) == ["eval", "latest", "log.txt", "model.safetensors", "notes.txt", "protrain.json", "tokenizer"]
    for name in ("notes.txt", "eval/deep/1.json", "tokenizer/x"):
        assert (folder / name).read_text() == name
    assert (folder / "log.txt").read_text() == "second\nthird\n"
    assert (folder / "latest").readlink() == Path("nowhere")
    assert (folder / "model.safetensors").read_text() == "third"
    assert names(tmp_path) == ["run"]


def test_a_tokenizer_that_others_put_into_a_checkpoint_stays(fresh_disk: Path) -> None:
    """Though its files have names of a model's: the checkpoint says which are its own."""
    folder = fresh_disk / "run"
    model = nn.Linear(8, 8)
    model, optimizer = protrain.wrap(model, adamw(model), memory=8 * MIB)
    theirs = ("adapter_config.json", "config.json", "mine.safetensors", "spiece.model", "tokenizer.json", "vocab.txt")

    def extra(fresh: Path) -> None:
        (fresh / "merges.txt").write_text("with the first")

    protrain.save(model, optimizer, folder, extra=extra)
    for name in theirs:
        (folder / name).write_text("theirs")
    protrain.save(model, optimizer, folder)
    protrain.save(model, optimizer, folder)
    assert names(folder) == sorted([*theirs, "model.safetensors", "optimizer.safetensors", "protrain.json"])
    assert all((folder / name).read_text() == "theirs" for name in theirs)
    protrain.load(model, optimizer, folder)
    protrain.unwrap(model)


@pytest.mark.parametrize("mode", [0o700, 0o2770, 0o755])
def test_rights_of_what_is_replaced_stay(mode: int, tmp_path: Path, way: str) -> None:
    folder, file = tmp_path / "run", tmp_path / "page"
    folder.mkdir()
    folder.chmod(mode)
    file.touch()
    file.chmod(mode & 0o666)
    for _ in range(2):
        write(folder, "new")
        with replaced_file(file) as fresh:
            Path(fresh).write_text("new")
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert stat.S_IMODE(file.stat().st_mode) == mode & 0o666


def test_a_write_protected_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    write(folder, "first")
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for another user than root
    with pytest.raises(protrain.DiskError, match=r"write-protected; give yourself the right .* or name another folder") as caught:
        write(folder, "second")
    assert caught.value.errno == errno.EACCES
    assert names(tmp_path) == ["run"]


def test_an_interrupt_while_the_old_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes all the same."""
    folder, remove, interrupts = tmp_path / "run", replacing._remove, [KeyboardInterrupt]
    write(folder, "first")

    def interrupted(path: Path) -> None:
        if interrupts:
            raise interrupts.pop()
        remove(path)

    monkeypatch.setattr(replacing, "_remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(folder, "second")
    assert names(tmp_path) == ["run"]
    assert not replacing.litter


def test_what_cannot_be_kept_beside_a_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    write(folder, "first")
    for name in ("protrain.json", "notes.txt", "deep/notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    for _ in ("a file", "a folder alone"):
        with pytest.raises(protrain.DiskError, match=r"holds '(notes\.txt|deep)', which is no part of a checkpoint"):
            write(folder, "second")
        assert (folder / "model.safetensors").read_text() == "first"
        assert names(tmp_path) == ["run"]
        (folder / "notes.txt").unlink(missing_ok=True)
    assert (folder / "deep" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_appears_while_it_is_written_is_not_replaced(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "model"
    theirs = target / "thesis.tex" if kind == "folder" else target

    def somebody() -> None:
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_text("years")

    with pytest.raises(protrain.DiskError, match=r"is a file|holds files"):
        write(target, "new", somebody)
    assert theirs.read_text() == "years"
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "name", ["ema.safetensors", "adapter_model.safetensors", "tokenizer_corpus.txt", "vocab.txt", "mine.model"]
)
def test_a_folder_with_what_others_put_beside_a_model_is_not_replaced(name: str, tmp_path: Path) -> None:
    """Weights under other names, and text, with the files of a model and alone."""
    for beside in (["config.json", "model.safetensors", "tokenizer.json"], []):
        folder = tmp_path / str(len(beside))
        folder.mkdir()
        for each in (name, *beside):
            (folder / each).write_text("theirs")
        if beside and name == "vocab.txt":
            continue  # of that model's tokenizer
        with pytest.raises(protrain.DiskError, match="holds files that are no checkpoint, such as"), replaced(folder):
            pass
        assert names(folder) == sorted([name, *beside])
