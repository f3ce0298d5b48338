"""Checkpoints: weights that plain tools read, and beside them what training needs to go on bit for bit.

A folder holds `model*.safetensors` (and config.json) as `from_pretrained` reads them, `optimizer*.safetensors` with the state
arrays under "ARRAY.PARAMETER" (the fp32 master of a bf16 parameter under "master.PARAMETER"), and `protrain.json` with parameter
groups, step counters, what modules give by get_extra_state, torch's random state, that of a device beside it, and a checksum of
these. It is written tensor by tensor beside its target and takes the target's name when it is whole. Nothing in it is a pickle.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import numbers
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import _core
from .api import session_of
from .base.counting import uncounted
from .base.reading import open_file, parse, shown
from .base.replacing import CHECKPOINT, FILES, clear_leftovers, replaced
from .base.sizes import check_folder
from .errors import DiskError, PlanError, StepError
from .model.precision import has_master, saved_config
from .optim.optimizers import Optimizer, check_arrays, hyper_of, n_states_of, state_names
from .runtime.changes import adopt, name_parameters
from .runtime.loads import PARAMETERS, STATE
from .session import Session
from .state.materialise import weight_files
from .state.statefiles import check_extra_states, check_states, extra_states_of, states_of
from .state.tensorfiles import Entry, Progress, TensorFile, Told, entries, unreadable, write_tensors

FORMAT = 1
SUM = "crc32c"  # in protrain.json, of all else in it; a file without it is read as it is


def _session(model: nn.Module, optimizer: Any) -> Session:
    session = session_of(model)
    if not isinstance(optimizer, Optimizer) or optimizer._session is not session:
        raise PlanError("optimizer: it is not the one that wrap returned for this model")
    return session


def _states(session: Session) -> Iterator[tuple[int, int, str]]:
    """(parameter, array, name in the file) of each state array that an update has written."""
    for entry in session.layout.entries:
        if entry.group >= 0 and session.engine.steps(entry.index):
            for array, name in enumerate(state_names(session.wrapped.kind, session.wrapped.n_states)):
                yield entry.index, 1 + array, f"{name}.{entry.name}"
        if has_master(session.wrapped, entry.index):
            yield entry.index, session.wrapped.master_array, f"master.{entry.name}"


def _plain(value: Any) -> Any:
    """A group's value as JSON has it."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, torch.Tensor | numbers.Real) and not isinstance(value, bool) else value


def _as_ours(value: Any, ours: Any) -> Any:
    """A group's value, read from JSON, as one that stands where ours does."""
    if isinstance(ours, torch.Tensor):
        return torch.full_like(ours, value)
    if isinstance(ours, numbers.Real) and not isinstance(ours, int | float):  # of NumPy, with which torch rounds otherwise
        return type(ours)(value)  # type: ignore[call-arg]
    if not isinstance(value, list):
        return value
    if isinstance(ours, tuple | list) and len(value) == len(ours):
        value = list(map(_as_ours, value, ours))
    return value if isinstance(ours, list) else tuple(value)


def _check_whole(value: Any) -> None:
    """Raises ValueError where it has a whole number that `load` would not take."""
    if isinstance(value, list):
        for item in value:
            _check_whole(item)
    elif type(value) is int and not _is_number(value):
        raise ValueError


def _plain_groups(session: Session) -> list[dict[str, Any]]:
    """What stands in each group beside its parameters.

    Raises:
        PlanError: something of it cannot be written.
    """
    found: list[dict[str, Any]] = []
    for number, group in enumerate(session.wrapped.groups):
        found.append({})
        for key in group if session.foreign is None else ():
            try:
                if key != "params":
                    found[-1][key] = _plain(group[key])
                    json.dumps(found[-1][key])
                    _check_whole(found[-1][key])
            except (TypeError, ValueError, RuntimeError):
                raise PlanError(
                    f"optimizer: {shown(key)} of group {number} is a {type(group[key]).__name__} that cannot be saved: take it "
                    "out of the group"
                ) from None
    return found


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str | os.PathLike[str],
    *,
    extra: Callable[[Path], Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the last complete step of a wrapped model and its optimizer to a folder, which is replaced as a whole. What others
    put into a checkpoint stays.

    Args:
        extra: called with the folder while it is written, to add files of its own (a tokenizer).
        progress: called after each tensor with the bytes that are written and the bytes in all.

    Raises:
        PlanError, TypeError, ValueError: the model is not wrapped, the optimizer is not its own or has in a group what is no
            plain value, or the folder is no path.
        DiskError: the folder cannot be written, or holds what is no checkpoint; what was there before is still there.
        StepError: `extra` or `progress` made a step, or the last load failed half-way.
    """
    session, path = _session(model, optimizer), check_folder(folder, "folder")
    with session.turn:
        session.values.loads.check("save")
        _save(session, model, path, extra, progress)


def _save(
    session: Session, model: nn.Module, folder: str, extra: Callable[[Path], Any] | None, progress: Progress | None
) -> None:
    name_parameters(session.wrapped)
    commits = session.engine.commits()
    groups = _plain_groups(session)
    own = states_of(session) if session.foreign is not None else None
    extra_values, extra_entries, extra_tensors = extra_states_of(model)
    size_bytes = 0
    try:
        with replaced(folder) as fresh:
            config: Any = getattr(model, "config", None)
            if hasattr(config, "save_pretrained"):
                saved_config(model, config).save_pretrained(str(fresh))
            weights = entries(model)
            states = list(_states(session)) if own is None else []
            expected = [Entry(name, tuple(session.layout.entries[number].shape), torch.float32) for number, _, name in states]
            read = session.values.get
            values: Iterator[tuple[str, torch.Tensor]] = ((name, read(number, array)) for number, array, name in states)
            expected, values = (own[1], own[2]) if own else (expected, values)
            expected, values = [*expected, *extra_entries], itertools.chain(values, extra_tensors)
            size_bytes = sum(entry.size_bytes for entry in (*weights, *expected))
            told = Told(progress or (lambda _done, _all: None), size_bytes)
            write_tensors(fresh, weights, told.through(session.states.tensors()))
            write_tensors(fresh, expected, told.through(values), stem="optimizer")
            about = {
                "format": FORMAT,
                "optimizer": session.wrapped.kind.__name__,
                "steps": session.steps,
                "param_groups": groups,
                "group_of": {e.name: e.group for e in session.layout.entries if e.group >= 0},
                "param_steps": {
                    e.name: session.engine.steps(e.index) for e in session.layout.entries if e.group >= 0 and own is None
                },
                "torch_random_state": bytes(torch.get_rng_state().numpy()).hex(),
            }
            device_state = session.wrapped.compute.own_random_state()
            if device_state is not None:
                about["device_random_state"] = bytes(device_state.numpy()).hex()
            if own is not None:
                about["optimizer_state"] = own[0]
            if extra_values:
                about["extra_state"] = extra_values
            if extra is not None:
                extra(fresh)
            about[FILES] = sorted(os.listdir(fresh))  # which are not others' when the next one comes
            about[SUM] = _sum_of(json.loads(json.dumps(about)))
            (fresh / CHECKPOINT).write_text(json.dumps(about, indent=1) + "\n")
            if session.engine.commits() != commits:
                raise StepError("save: a step was made while the checkpoint was being written; nothing was saved")
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise DiskError(
            f"saving to {folder} failed: {error.strerror or error} (tensors of {size_bytes} bytes)",
            errno=error.errno or errno.EIO,
            filename=error.filename or folder,
            asked_bytes=size_bytes,
        ) from error


def _sum_of(about: dict[str, Any]) -> str:
    """The checksum of the values of a protrain.json as they are read."""
    return f"{_core.checksum(json.dumps(about).encode()):08x}"


def _read_about(folder: str) -> dict[str, Any]:
    if not folder:
        raise DiskError("the folder to read has no name: give the path of a folder", errno=errno.ENOENT, filename=folder)
    path = os.path.join(folder, CHECKPOINT)
    size_bytes = 0
    try:
        if not has_checkpoint(folder):
            raise DiskError(f"{folder} holds no checkpoint: {path} is missing", errno=errno.ENOENT, filename=path)
        with open_file(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            about = parse(file.read())
        if not isinstance(about, dict):
            raise ValueError("it is no object")
        if SUM in about and about.pop(SUM) != _sum_of(about):
            raise DiskError(
                f"{path} ({size_bytes} bytes) is not what was written there: its {SUM} is another; take another copy, or remove "
                f"the line of {SUM} if it was changed by hand",
                errno=errno.EBADMSG,
                filename=path,
                asked_bytes=size_bytes,
            )
        if about.get("format") != FORMAT:
            raise ValueError(f"format {shown(about.get('format'))} is not {FORMAT}")
        _check_about(about)
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise unreadable(path, error, size_bytes) from None
    except ValueError as error:
        raise PlanError(f"{path} is no checkpoint of this version: {error}") from error
    return about


def has_checkpoint(folder: str) -> bool:
    """Whether there is one in a folder.

    Raises:
        OSError: nobody may look.
    """
    try:
        return stat.S_ISREG(os.stat(os.path.join(folder, CHECKPOINT)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def saved_steps(folder: str | os.PathLike[str]) -> int:
    """The steps that were complete when a checkpoint was saved.

    Raises:
        DiskError: it cannot be read, or is damaged.
        PlanError: it is no checkpoint of this version.
    """
    return int(_read_about(check_folder(folder, "folder"))["steps"])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _check_about(about: dict[str, Any]) -> None:
    """Raises ValueError where a value is not what `save` writes."""
    groups, steps = about.get("param_groups"), about.get("param_steps")
    if not isinstance(about.get("optimizer"), str) or not _is_count(about.get("steps")):
        raise ValueError("optimizer is no name, or steps no count")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError("param_groups is no list of objects")
    if not isinstance(steps, dict) or not all(map(_is_count, steps.values())):
        raise ValueError("param_steps is no object of counts")
    group_of = about.get("group_of", {})  # none of older ones
    if not isinstance(group_of, dict) or not all(map(_is_count, group_of.values())):
        raise ValueError("group_of is no object of counts")
    state = about.get("torch_random_state")
    if not isinstance(state, str):
        raise ValueError("torch_random_state is no text")
    try:
        torch.Generator().set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8).clone())
    except (ValueError, RuntimeError, TypeError):
        raise ValueError("torch_random_state is none") from None
    try:
        bytes.fromhex(about.get("device_random_state", ""))  # not where the CPU computed
    except (ValueError, TypeError):
        raise ValueError("device_random_state is none") from None


def _check_groups(path: str, saved: list[dict[str, Any]], groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Raises PlanError where a saved group has what ours has not, or a value of another kind than both ours of now, which may be
    of another checkpoint, and what the optimizer was made with."""
    for number, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        for key, value in theirs.items():
            if key == "params" or (key not in ours and key not in _OF_SCHEDULERS):
                raise PlanError(f"{path}: param_groups[{number}] has {shown(key)}, which groups of this optimizer have not")
            if not _alike(value, _plain(ours.get(key))) and not (key in defaults and _alike(value, _plain(defaults[key]))):
                raise PlanError(f"{path}: param_groups[{number}] has {key} = {shown(value)}, of another kind than ours")


#: Keys that learning-rate schedulers add to groups.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


def _alike(value: Any, ours: Any) -> bool:
    """Whether a value may stand where ours stands: a number for a number, text for text, a list for one as long; where ours is
    None, or has no such key, None or numbers."""
    if isinstance(ours, list):
        return isinstance(value, list) and len(value) == len(ours) and all(map(_alike, value, ours))
    if ours is None:
        return (
            value is None
            or isinstance(value, bool)
            or _is_number(value)
            or (isinstance(value, list) and all(map(_is_number, value)))
        )
    if isinstance(ours, int | float) and not isinstance(ours, bool):
        return _is_number(value) or (isinstance(value, float) and not math.isfinite(ours))
    return type(value) is type(ours) or (value is None and isinstance(ours, bool))


def _is_number(value: Any) -> bool:
    return math.isfinite(value) if type(value) is float else type(value) is int and abs(value) < 1 << 62


class _Files:
    """The tensors of safetensors files by name."""

    def __init__(self, paths: list[str]) -> None:
        self.where = {name: file for file in map(TensorFile, paths) for name in file.entries}

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.where[name].entries[name].shape if name in self.where else None

    def tensor(self, name: str) -> torch.Tensor:
        return self.where[name].read(name)


def _files(folder: str, stem: str) -> list[str]:
    """Those that `save` wrote, with what that puts before the number of a shard where the index is lost."""
    return [path for path in weight_files(folder, stem) if os.path.basename(path).startswith(stem)]


def _buffers_to_load(folder: str, model: nn.Module, weights: _Files) -> dict[str, torch.Tensor]:
    """The model's buffers that a checkpoint has, by name.

    Raises:
        PlanError: it lacks one of them, has one of another shape, or a tensor that the model has not.
    """
    buffers = dict(model.named_buffers())
    saved = {entry.name for entry in entries(model)}
    for name, buffer in buffers.items():
        shape, ours = weights.shape(name), tuple(buffer.shape)
        if shape != ours and (shape is not None or name in saved):
            what = "missing" if shape is None else f"of shape {shape}"
            raise PlanError(f"{folder}: buffer {name} is {what}, the model's is of {ours}")
    own = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))}
    unknown = next((name for name in weights.where if name not in own), None)
    if unknown is not None:
        raise PlanError(f"{folder} is of another model: it has {shown(unknown)}, which this {type(model).__name__} has not")
    return {name: buffer for name, buffer in buffers.items() if weights.shape(name) is not None}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Bring a wrapped model and its optimizer to the step that `save` wrote; budget, disk and precision may be others. Gradients
    of a step that was not made are dropped, as by `zero_grad()`; torch's random state is that of the checkpoint.

    Raises:
        TypeError, ValueError: the folder is no path.
        DiskError: the folder holds no checkpoint, or cannot be read, or holds what was not written there, or another run replaced
            it meanwhile: load it again, or another one. Where this came in the middle of the values, forward, `step()` and `save`
            raise StepError until a load has ended.
        PlanError: it is one of another model or optimizer; nothing was changed.
    """
    session, path = _session(model, optimizer), check_folder(folder, "folder")
    with session.turn:
        _load(session, model, optimizer, path)


def _place(folder: str) -> tuple[int, int] | None:
    """Which folder has this name now."""
    try:
        about = os.stat(folder)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _load(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    gone = name_parameters(session.wrapped)
    clear_leftovers(folder)
    place = _place(folder)
    about = _read_about(folder)
    weights, states = _Files(_files(folder, "model")), _Files(_files(folder, "optimizer"))
    groups: list[dict[str, Any]] = about["param_groups"]
    if about["optimizer"] != session.wrapped.kind.__name__ or len(groups) != len(session.wrapped.groups):
        own = f"{session.wrapped.kind.__name__} with {len(session.wrapped.groups)}"
        raise PlanError(f"{folder} is of {about['optimizer'][:40]} with {len(groups)} groups, the optimizer is another: {own}")
    if (session.foreign is None) != ("optimizer_state" not in about):
        raise PlanError(f"{folder} is of a {about['optimizer']} with a kernel or of one without, the optimizer is the other")
    group_of = about.get("group_of", {})
    other = next((e for e in session.layout.entries if e.group >= 0 and group_of.get(e.name, e.group) != e.group), None)
    if other is not None:
        raise PlanError(
            f"{folder}: parameter {other.name} is in group {group_of[other.name]} of the optimizer that was saved, and in group "
            f"{other.group} of this one, whose options it would have: make the groups as they were"
        )
    _check_groups(folder, groups, session.wrapped.groups, optimizer.defaults)
    if session.foreign is None:
        for number, (group, saved) in enumerate(zip(session.wrapped.groups, groups, strict=True)):
            check_arrays(f"{folder}: param_groups[{number}]", session.wrapped.kind, group | saved, session.wrapped.n_states)
    device_state = _device_state(session, folder, about.get("device_random_state", ""))
    bring = None
    if session.foreign is not None:
        bring = check_states(session, about["optimizer_state"], states.shape, states.tensor)
    bring_extra = check_extra_states(model, about.get("extra_state", {}), states.shape, states.tensor)
    buffers = _buffers_to_load(folder, model, weights)
    wanted: list[tuple[int, int, _Files, str]] = []
    for entry in session.layout.entries:
        if entry.index not in gone or weights.shape(entry.name) is not None:
            wanted.append((entry.index, 0, weights, entry.name))
        if entry.group >= 0 and about["param_steps"].get(entry.name):
            used = n_states_of(hyper_of(session.wrapped.kind, session.wrapped.groups[entry.group] | groups[entry.group]))
            for array, name in enumerate(state_names(session.wrapped.kind, session.wrapped.n_states)):
                if array < used or states.shape(f"{name}.{entry.name}") is not None:
                    wanted.append((entry.index, 1 + array, states, f"{name}.{entry.name}"))
        if entry.group >= 0 and states.shape(f"master.{entry.name}") is not None:  # saved in bf16; in fp32 it is the parameter
            wanted.append((entry.index, session.wrapped.master_array, states, f"master.{entry.name}"))
    for number, _, files, name in wanted:
        shape, ours = files.shape(name), tuple(session.layout.entries[number].shape)
        if shape != ours:
            raise PlanError(
                f"{folder}: tensor {name} is {'missing' if shape is None else f'of shape {shape}'}, the model's is of {ours}"
            )
    if _place(folder) != place:  # what was read so far may be of two checkpoints; later each file knows itself
        raise DiskError(f"{folder} was replaced while it was being read; load it again", errno=errno.ESTALE, filename=folder)
    session.zero_grad()
    adopt(session.values)  # what was given by `.data` before is not to come over what is loaded
    torch.autograd.graph.increment_version(session.params)  # what autograd saved of them is gone
    with session.values.loads.replacing(PARAMETERS, STATE) as half_loaded:
        _put(session, wanted, about["param_steps"], half_loaded)
        if bring is not None:
            bring()
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(weights.tensor(name))
        bring_extra()
        for group, saved in zip(session.wrapped.groups, groups, strict=True):
            group.update({k: _as_ours(v, group.get(k)) for k, v in saved.items()})
        session.steps = int(about["steps"])
        torch.set_rng_state(_bytes_of(about["torch_random_state"]))
        if device_state is not None:
            session.wrapped.compute.set_own_random_state(device_state)


def _bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()


def _device_state(session: Session, folder: str, text: str) -> torch.Tensor | None:
    """What the generator of the device that computes is to go on from; None: it has none, or the checkpoint is of a CPU.

    Raises:
        PlanError: it is of another kind of device.
    """
    own = session.wrapped.compute.own_random_state()
    if own is None or not text:
        return None
    state = _bytes_of(text)
    if state.numel() != own.numel():
        raise PlanError(
            f"{folder}: device_random_state has {state.numel()} bytes, that of {session.wrapped.compute.device} {own.numel()}: "
            "load it with the torch, and on the kind of device, that it was saved with"
        )
    return state


def _put(session: Session, wanted: list[tuple[int, int, _Files, str]], param_steps: dict[str, int], half_loaded: bool) -> None:
    """Put each (parameter, array) that is wanted, read from its file, and the steps of parameters; state that none has is 0."""
    given = {(number, array) for number, array, _, _ in wanted}
    for number, array, files, name in wanted:
        with uncounted():
            session.values.put(number, files.tensor(name), array)
    for entry in session.layout.entries:
        if entry.group < 0:
            continue
        steps = int(param_steps.get(entry.name, 0))
        if session.wrapped.kind is torch.optim.SGD and (entry.index, 1) not in given:
            steps = 0  # those without momentum, which older checkpoints counted, left no buffer
        if session.engine.steps(entry.index) or half_loaded:
            for array in range(1, session.wrapped.n_states + 1):
                if (entry.index, array) not in given:
                    with uncounted():
                        session.values.put(entry.index, torch.zeros(entry.shape, device="cpu"), array)
        session.engine.set_steps(entry.index, steps)
