"""Files and folders that take their name when they are whole.

What is being written lies beside its target under a name that nobody can foresee, locked by its writer. The kernel gives the
lock up with the process, whatever ends it. So what has such a name and no lock was left by a dead run, and is removed by the
next one that reads or writes the target; what a living run writes is never touched. (Where the filesystem has no locks on
folders, as NFS, what dead runs left stays.)

A folder changes places with the old one in one call, so that there is no moment without a whole target. Where the filesystem
cannot, there are three renames, and who finds the target missing puts the old one back. The old one is removed when the disk has
confirmed the new one's name; where it does not, they change back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DiskError

#: Folders and files that are being written: what a process that must end at once has to remove.
litter: set[str] = set()

#: Names of the files of a model and its tokenizer.
_OF_MODELS = re.compile(
    r"(generation_|adapter_|preprocessor_|processor_)?config\.json|.*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?|"
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|chat_template.*|.*\.model|"
    r"protrain_train\.json"  # of cli/resumed.py
)

#: Of them, what a folder may hold that is replaced as a whole: no weights under other names, such as an average or an adapter.
_OF_A_MODEL_ALONE = re.compile(
    r"(generation_|preprocessor_|processor_)?config\.json|(model|optimizer|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|"
    r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|"
    r"chat_template\.(json|jinja)|(tokenizer|spiece|sentencepiece\.bpe)\.model|protrain_train\.json"
)

#: The file by which a folder is a checkpoint, with all that is neither a weight nor an array of state; and the key under which it
#: has the names of the others that were written with it.
CHECKPOINT = "protrain.json"
FILES = "files"

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextmanager
def replaced(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder to write into, which takes the target's place when the body ends well and vanishes when it does not. What
    others put into a checkpoint's folder, such as a log or a tokenizer, is in the new one too, and its rights are the old one's.

    Raises:
        DiskError: the folder cannot be made, or what has its name is not to be replaced: see `check_target`; or what others put
            there cannot be kept.
    """
    check_target(folder)
    target = Path(os.path.realpath(folder))
    try:
        made = _make_parents(target.parent)
    except OSError as error:
        raise DiskError(f"{folder} cannot be made: {error.strerror}", errno=error.errno or 0, filename=str(folder)) from None
    try:
        clear_leftovers(target)
        with _locked_name(target, _new_folder) as fresh:
            _take_rights(target, fresh)
            yield fresh
            _sync_all(fresh)
            check_target(folder)  # somebody may have made it in the meantime
            _keep_others(target, fresh)
            _put_in_place(fresh, target)
        made.clear()
    finally:
        for parent in reversed(made):
            with contextlib.suppress(OSError):  # somebody else uses it
                parent.rmdir()


def check_target(folder: str | os.PathLike[str]) -> None:
    """Whether what has this name may be replaced, as a whole: nothing, an empty folder, one that `protrain.save` wrote, one with
    nothing but the files of a model.

    Raises:
        DiskError: it is a file, a folder with files of others or without the right to write there, a mount point, the current
            folder or one above it, or no name at all.
    """
    name = os.fspath(folder)
    if not name:
        raise DiskError("the folder to write has no name: give the path of a folder", errno=errno.ENOENT, filename=name)
    target = Path(os.path.realpath(name))
    try:
        os.lstat(_name(target, "partial"))  # which is longer, and what a training of hours would be saved under
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise DiskError(
                f"{name[:80]}... is too long: the folder is written under a name of 26 bytes more; give a shorter name",
                errno=errno.ENAMETOOLONG,
                filename=name,
            ) from None
    if not target.exists():
        return
    if not target.is_dir():
        raise DiskError(f"{name} is a file; name a folder", errno=errno.ENOTDIR, filename=name)
    if _is_mount_point(target):
        raise DiskError(
            f"{name} is a mount point, whose place no other folder can take; name a folder inside of it",
            errno=errno.EBUSY,
            filename=name,
        )
    if _is_above_current(target):
        raise DiskError(
            f"{name} is the current folder, or one above it, and would be replaced as a whole; name another folder",
            errno=errno.EBUSY,
            filename=name,
        )
    try:
        with os.scandir(target) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DiskError(f"{name} cannot be listed: {error.strerror}", errno=error.errno or 0, filename=name) from None
    if not os.access(target, os.W_OK | os.X_OK):
        raise DiskError(
            f"{name} is write-protected; give yourself the right to write there (chmod u+w), or name another folder",
            errno=errno.EACCES,
            filename=name,
        )
    if any(entry.name == CHECKPOINT for entry in found):
        return
    others = [entry.name for entry in found if _is_others(entry)]
    if not others and not any(entry.name == "config.json" or entry.name.startswith("model") for entry in found):
        others = [entry.name for entry in found]
    if others:
        raise DiskError(
            f"{name} holds files that are no checkpoint, such as {others[0]!r}, and would be replaced as a whole; name a new or "
            f"an empty folder",
            errno=errno.ENOTEMPTY,
            filename=name,
        )


def _is_others(entry: os.DirEntry[str]) -> bool:
    """Whether it is no file of a checkpoint, nor of a model that lies there alone."""
    ours = entry.name == CHECKPOINT or _OF_A_MODEL_ALONE.fullmatch(entry.name)
    return not (ours and entry.is_file(follow_symlinks=False))


def is_of_a_model(name: str) -> bool:
    """Whether a file of this name is one of a model, its tokenizer or a checkpoint."""
    return name == CHECKPOINT or _OF_MODELS.fullmatch(name) is not None


def _is_mount_point(folder: Path) -> bool:
    """Whether a file system begins there, or a folder of one is bound there."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return os.path.ismount(folder)
    points = (re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split(b" ")[4]) for line in lines)
    return os.fsencode(folder) in points


def _is_above_current(folder: Path) -> bool:
    """Whether it is the current folder or one above it."""
    try:
        current = Path.cwd()
    except OSError:  # it was removed
        return False
    return folder in (current, *current.parents)


@contextmanager
def replaced_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """The path of a new, empty file to write, which takes the target's place when the body ends well, and vanishes else.

    Raises:
        OSError: it cannot be made or cannot take its place; what was there is as it was.
    """
    target = Path(os.path.realpath(path))
    clear_leftovers(target)
    with _locked_name(target, _new_file) as fresh:
        _take_rights(target, fresh)
        yield str(fresh)
        _sync(fresh)
        os.replace(fresh, target)


def clear_leftovers(target: str | os.PathLike[str]) -> None:
    """Remove what dead runs left of this target, and put an old one back that was to be replaced when a run was killed."""
    target = Path(os.path.realpath(target))
    for path in _siblings(target, "old"):
        with _taken(path) as ours:
            if ours and not os.path.lexists(target):
                path.rename(target)
            elif ours:
                _remove(path)
    for path in _siblings(target, "partial"):
        with _taken(path) as ours:
            if ours:
                _remove(path)


# ---- names ----


def _name(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{secrets.token_hex(8)}.{kind}"


def _siblings(target: Path, kind: str) -> list[Path]:
    """What has a name that `_name` gives, of this process's user."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.{kind}")
    found: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                found.append(target.parent / entry.name)
    return sorted(found)


def _new_folder(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _new_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _take_rights(target: Path, fresh: Path) -> None:
    """Who may read what is about to be written is who may read what is there; its group is the same, where we may give it that.
    We may write it."""
    try:
        there = target.stat()
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError):
        os.chown(fresh, -1, there.st_gid)
    fresh.chmod(stat.S_IMODE(there.st_mode) | stat.S_IWUSR)


@contextmanager
def _locked_name(target: Path, make: Callable[[Path], int]) -> Iterator[Path]:
    """A new file or folder beside the target, locked inside, gone after."""
    while True:
        fresh = _name(target, "partial")
        litter.add(str(fresh))
        handles: list[int] = []
        try:
            handles.append(make(fresh))
            handles.append(os.dup(handles[0]))  # a folder is removed through two descriptors, and there may be no others then
            with contextlib.suppress(OSError):
                fcntl.flock(handles[0], fcntl.LOCK_EX)
            if not _is(fresh, handles[0]):
                continue  # somebody took it for a dead run's before it was locked
            yield fresh
            return
        finally:
            for handle in handles:
                os.close(handle)
            try:
                _remove(fresh)
            finally:
                if os.path.lexists(fresh):  # an interrupt came meanwhile
                    _remove(fresh)
                litter.discard(str(fresh))


def _is(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except OSError:
        return False


@contextmanager
def _taken(path: Path) -> Iterator[bool]:
    """Whether nobody has locked the file or folder; inside, it is locked."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a living run's, or no locks here
            yield False
            return
        yield _is(path, handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    for call in (path.unlink, path.rmdir):
        with contextlib.suppress(OSError):
            call()
            return
    shutil.rmtree(path, ignore_errors=True)


# ---- places ----


def _keep_others(target: Path, fresh: Path) -> None:
    """What others put into the target has its name in the new folder too, where that has nothing of this name. They are the same
    files, not copies, so that a log that is being written goes on; before the folders change places, so that a run may die.

    Raises:
        DiskError: they cannot have a second name.
    """
    if not target.exists():
        return
    with os.scandir(target) as entries:
        ours = _written(target)
        others = [
            entry
            for entry in entries
            if (_is_others(entry) if ours is None else entry.name not in ours) and not os.path.lexists(fresh / entry.name)
        ]
    for entry in others:
        try:
            if entry.is_dir(follow_symlinks=False):
                shutil.copytree(entry.path, fresh / entry.name, symlinks=True, copy_function=_link)
            else:
                _link(entry.path, fresh / entry.name)
        except OSError as error:  # of copytree's own kind, with a list of all that failed, too
            raise DiskError(
                f"{target} holds {entry.name!r}, which is no part of a checkpoint and cannot be kept beside a new one: "
                f"{error.strerror or 'no second name for it'}; move it elsewhere",
                errno=error.errno or errno.EPERM,
                filename=entry.path,
            ) from error
    if others:
        _sync(fresh)


def _written(target: Path) -> set[str] | None:
    """The names of what was written with a checkpoint; None: it does not say, or is none."""
    try:
        names = json.loads((target / CHECKPOINT).read_bytes())[FILES]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return {CHECKPOINT, *names} if known else None


def _link(source: str | os.PathLike[str], name: str | os.PathLike[str]) -> None:
    os.link(source, name, follow_symlinks=False)


def _put_in_place(fresh: Path, target: Path) -> None:
    """The folder takes the target's name, for good; what had it has the folder's name, and goes with that. Where this fails, each
    has its own name again.

    Raises:
        OSError: what was there is there.
        DiskError: the new folder is there, and what was there could not be put back.
    """
    ours, there = os.lstat(fresh), target.exists()
    with _held(target) if there else contextlib.nullcontext():
        try:
            if there:
                _exchange(fresh, target)
            else:
                fresh.rename(target)
            _sync(target.parent)
        except BaseException as error:
            try:
                _take_back(fresh, target, ours, there)
            except OSError as second:
                raise DiskError(
                    f"{target} holds what is new, but the disk may lose it, and what was there cannot be put back: "
                    f"{second.strerror}; look at the disk and save again",
                    errno=second.errno or 0,
                    filename=str(target),
                ) from error
            raise


def _take_back(fresh: Path, target: Path, ours: os.stat_result, there: bool) -> None:
    """Undo what `_put_in_place` did so far. ours: of the folder that was to take the target's name."""
    if not os.path.lexists(target) or not os.path.samestat(os.lstat(target), ours):
        return  # it has not come so far, or somebody else's is there by now
    if there:
        _exchange(fresh, target)
    else:
        target.rename(fresh)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """It is locked, whatever its name: nobody takes it for what a dead run left."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _exchange(one: Path, other: Path) -> None:
    """Two folders change names; where that fails, neither has."""
    if not _exchange_at_once(one, other):
        _exchange_by_renames(one, other)


def _exchange_at_once(one: Path, other: Path) -> bool:
    """False where the system or the filesystem cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _exchange_by_renames(one: Path, other: Path) -> None:
    """When the process is killed between them, `clear_leftovers` puts the other back."""
    aside, tried = _name(other, "old"), []
    try:
        for source, name in ((other, aside), (one, other), (aside, one)):
            tried.append((source, name))
            source.rename(name)
    except BaseException:
        for source, name in reversed(tried):
            with contextlib.suppress(FileNotFoundError):  # this one was not made
                name.rename(source)
        raise


def _make_parents(folder: Path) -> list[Path]:
    """Make the folders that are missing; returns them, the outermost first."""
    missing: list[Path] = []
    while not folder.exists():
        missing.insert(0, folder)
        folder = folder.parent
    for path in missing:
        path.mkdir()
    return missing


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_all(folder: Path) -> None:
    def refuse(error: OSError) -> None:
        raise error  # what cannot be listed cannot be synced

    for root, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that is there as a whole or not at all; what was there is replaced.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    with replaced_file(path) as fresh, open(fresh, "wb") as file:
        file.write(content)
