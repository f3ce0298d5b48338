"""First values: parameters from ordinary memory, from an initialisation function, or from a folder of safetensors.

The full model is never in memory at once: chunk after chunk is filled where it will lie and written to its home.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base.counting import uncounted
from ..base.reading import open_file, parse, shown
from ..base.sizes import MIB
from ..errors import PlanError
from ..model.held import persistent_buffers
from ..model.onmeta import become
from ..model.parameters import DisableTorchFunction, release
from ..model.precision import has_master, write_master
from ..model.strides import dense_strides, outermost_first
from ..runtime import changes
from .converted import Conversion, conversions
from .tensorfiles import TensorFile, unreadable

if TYPE_CHECKING:
    from ..session import Session

SLICE_BYTES = 4 * MIB

#: What parameters are read from. Numbers of fewer bits, or integers, stand for others, which factors beside them tell.
WEIGHT_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Filler:
    """Opens chunks for filling and writes them to their homes when their last parameter has its values."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.left = [set(members) for members in session.layout.members]
        self.open = session.residency.filling
        self.written: set[int] = set()
        self.unset: set[int] = set()  # came on meta, and have no values yet
        self._originals: dict[int, dict[int, torch.Tensor]] = {}  # of chunks that are not written yet

    def enter(self, number: int) -> None:
        """Parameter `number` is a view of real memory that can be filled when this returns."""
        session, chunk = self.session, self.session.layout.entries[number].chunk
        if chunk in self.open:
            return
        if chunk in self.written:  # a tied parameter comes again
            self.enter_again([number])
        else:
            self._give_way(chunk)
            originals = {i: session.params[i].data for i in session.layout.members[chunk]}
            self._originals[chunk] = originals
            session.engine.begin_fill(chunk)
            make_real(session, chunk)
            session.residency.bind(chunk)
            with torch.no_grad(), DisableTorchFunction():
                self.unset.update(i for i, original in originals.items() if original.device.type == "meta")
                for i, original in originals.items():
                    if original.device.type != "meta":
                        session.params[i].data.copy_(original)
                        self.keep(i, original)
        self.open.add(chunk)

    def enter_again(self, numbers: list[int]) -> None:
        """The same of parameters that were all entered before, also where their chunks gave way to one another meanwhile: such a
        chunk has a slot of its own then, until `drop_own_slots`.

        Raises:
            BudgetError: there is no room for all of them at once.
        """
        for _ in self.session.residency.bring(numbers):
            pass
        self.open.update(self.session.layout.entries[number].chunk for number in numbers)

    def _give_way(self, chunk: int) -> None:
        """What is open in the slot of this chunk is written as far as it is filled, and comes again. Slots are the arrangement's:
        a chunk that has one of its own by now gives way for nothing, which costs a write and no memory."""
        slots = self.session.homes.arrangement.slot_of_chunk
        self._write([one for one in self.open if slots[one] == slots[chunk] >= 0])

    def _write(self, chunks: list[int]) -> None:
        for chunk in chunks:
            self.session.engine.end_fill(chunk)
            self.open.discard(chunk)
            self.written.add(chunk)

    def drop_own_slots(self) -> None:
        """No chunk has a slot of its own any more: each would keep it, and with one module after the other they would be as many
        as the model has chunks. What is open is written as far as it is filled, and comes again."""
        session, found = self.session, self.session.homes.arrangement
        if not session.residency.own_slots:
            return
        self._write([chunk for chunk in self.open if found.slot_of_chunk[chunk] >= 0])
        away = [chunk for chunk in sorted(self.written) if found.slot_of_chunk[chunk] >= 0]
        nothing = torch.zeros((), dtype=session.layout.dtype, device=session.wrapped.compute.device)
        for chunk in away:
            session.residency.unbind(chunk)
            for number in session.layout.members[chunk]:
                with DisableTorchFunction():
                    session.params[number].data = nothing.expand(session.layout.entries[number].shape)
        session.engine.drop_slots()
        session.residency.own_slots = 0
        session.engine.set_slots(found.slot_of_chunk, found.slot_bytes)
        for chunk in away:
            session.residency.bind(chunk)

    def keep(self, number: int, values: torch.Tensor, first: int = 0) -> None:
        """What a parameter was given, from element `first` of its memory on, is in its master as it was. Where nothing was
        rounded the first update makes the master from the parameter."""
        if values.dtype != self.session.layout.dtype:
            write_master(self.session.values, number, values, first)

    def lend(self, number: int) -> None:
        """Parameter `number`, entered before, is memory of its own in the type in which it was given, where that is wider than
        where its chunk lies: what initialises it draws the same numbers as it would without us."""
        session, dtype = self.session, self.session.wrapped.given_dtypes[number]
        if dtype == session.layout.dtype:
            return
        with DisableTorchFunction():
            compute, entry = session.wrapped.compute, session.layout.entries[number]
            wide = compute.empty_on_host(entry.shape, dtype, entry.strides)
            if has_master(session.wrapped, number) and wide.numel():
                session.engine.transfer(number, session.wrapped.master_array, compute.on_host(wide), False)
            else:
                wide.copy_(session.params[number].data)
            session.params[number].data = compute.to_device(wide)

    def take_back(self, number: int) -> None:
        """What was lent, or put into `.data` instead, is the parameter's value: rounded where its chunk lies, and as it is in its
        master. It lies there as it was given.

        Raises:
            PlanError: it is of another shape, type or device.
        """
        session, p, entry = self.session, self.session.params[number], self.session.layout.entries[number]
        wrapped = session.wrapped
        with torch.no_grad(), DisableTorchFunction():
            given = p.data
            if given.data_ptr() == session.residency.address(number) and given.stride() == entry.strides:
                return
            changes.check_value(entry.name, entry.shape, wrapped.given_dtypes[number], wrapped.compute.device, given)
            entry.strides = dense_strides(given)
            p.data = session.residency.place(number)
            if given.untyped_storage().data_ptr() == p.untyped_storage().data_ptr():
                given = given.clone()  # a view of what is about to be written
            p.data.copy_(given)
            self.keep(number, given)

    def withdraw(self, number: int) -> None:
        """Parameter `number`, entered before, lies where its chunk does, whatever it was lent or given."""
        with DisableTorchFunction():
            self.session.params[number].data = self.session.residency.place(number)

    def leave(self, number: int) -> None:
        """Parameter `number` has its values."""
        chunk = self.session.layout.entries[number].chunk
        self.left[chunk].discard(number)
        if chunk in self.open and not self.left[chunk]:
            self.session.engine.end_fill(chunk)
            self._originals.pop(chunk, None)  # a chunk that was entered again has none
            self.open.discard(chunk)
            self.written.add(chunk)

    def give_back(self) -> None:
        """Filling failed: the parameters of chunks that were not written have again the values that they came with. Those that
        came on meta go back there elsewhere (onmeta.py)."""
        for chunk, originals in self._originals.items():
            real = {number: original for number, original in originals.items() if original.device.type != "meta"}
            if real:
                self.session.residency.unbind(chunk)
            for number, original in real.items():
                with DisableTorchFunction():
                    self.session.params[number].data = original
                release(self.session.params[number])


def make_real(session: Session, chunk: int) -> None:
    """Meta parameters of a chunk become real ones, the same Python objects, with no memory of their own yet."""
    nothing = torch.zeros((), dtype=session.layout.dtype, device=session.wrapped.compute.device)
    for number in session.layout.members[chunk]:
        p = session.params[number]
        if p.device.type != "meta":
            continue
        become(p, nn.Parameter(nothing.expand(p.shape), requires_grad=p.requires_grad))


@contextmanager
def _filling(session: Session) -> Iterator[Filler]:
    """Around filling all chunks, which may fail anywhere."""
    filler = Filler(session)
    try:
        yield filler
    except BaseException:
        filler.give_back()
        raise


def _by_chunk(session: Session) -> Iterator[int]:
    """The numbers of all parameters, in an order in which no two chunks are open at once."""
    return chain.from_iterable(session.layout.members)


def from_memory(session: Session) -> None:
    """Copy parameters that are there already."""
    with _filling(session) as filler:
        for number in _by_chunk(session):
            filler.enter(number)
            filler.leave(number)


def from_function(session: Session, param_init_fn: Callable[[nn.Module], Any]) -> None:
    """Call param_init_fn for each module that owns parameters, in the order of model.modules()."""
    index = {id(p): number for number, p in enumerate(session.params)}
    with _filling(session) as filler:
        for module in session.model.modules():
            if own := list(dict.fromkeys(index[id(p)] for p in module._parameters.values() if p is not None)):
                filler.drop_own_slots()
                _initialise(filler, module, own, index, param_init_fn)
        filler.drop_own_slots()
        if unset := sorted(session.layout.entries[number].name for number in filler.unset):
            more = f" and {len(unset) - 3} more" if len(unset) > 3 else ""
            raise PlanError(
                f"param_init_fn left {', '.join(unset[:3])}{more} without values: it is called with each module that has "
                f"parameters of its own, and gives all of them values in place"
            )


def _initialise(
    filler: Filler, module: nn.Module, own: list[int], index: dict[int, int], param_init_fn: Callable[[nn.Module], Any]
) -> None:
    """The parameters `own` of a module, and its buffers that are on meta, get their values from the function. index: the numbers
    of all parameters by id."""
    for number in own:
        filler.enter(number)
    filler.enter_again(own)  # what gave way to another of them
    try:
        for number in own:
            filler.lend(number)
        empty = _empty_buffers(module, filler.session.wrapped.compute.device)
        _fill_unset(filler, own)
        param_init_fn(module)
        _check_kept(module, index)
        for leaf in empty:
            buffer = module._buffers[leaf]
            if buffer is not None and buffer.is_floating_point() and bool(buffer.isnan().all()):
                raise PlanError(f"param_init_fn left the buffer {leaf} of a {type(module).__name__} without values")
        filler.unset.difference_update([number for number in own if not _is_unset(filler.session.params[number])])
        for number in own:
            filler.take_back(number)
    except BaseException:
        for number in own:
            filler.withdraw(number)
        raise
    for number in own:
        filler.leave(number)


def _fill_unset(filler: Filler, own: list[int]) -> None:
    """What has no values yet is NaN, by which it is known afterwards."""
    with torch.no_grad(), DisableTorchFunction():
        for number in filler.unset.intersection(own):
            filler.session.params[number].data.fill_(torch.nan)


def _is_unset(p: nn.Parameter) -> bool:
    with torch.no_grad(), DisableTorchFunction():
        data = p.data
        return data.numel() > 0 and bool(data[(0,) * data.dim()].isnan()) and bool(data.isnan().all())


def _check_kept(module: nn.Module, known: dict[int, int]) -> None:
    """Raises PlanError where param_init_fn put another parameter into the module."""
    for leaf, p in module._parameters.items():
        if p is not None and id(p) not in known:
            raise PlanError(
                f"param_init_fn replaced the parameter {leaf} of a {type(module).__name__}: set its values in place, or by .data"
            )


def _empty_buffers(module: nn.Module, device: torch.device) -> list[str]:
    """Give the module's own meta buffers memory, NaN where they can be; returns their names."""
    found = [leaf for leaf, buffer in module._buffers.items() if buffer is not None and buffer.device.type == "meta"]
    for leaf in found:
        buffer = module._buffers[leaf]
        assert buffer is not None
        value = float("nan") if buffer.is_floating_point() else 0
        module._buffers[leaf] = torch.full(buffer.shape, value, dtype=buffer.dtype, device=device)
    return found


def from_weights(session: Session, folder: str) -> None:
    """Read parameters from the safetensors files of a folder, slice by slice. What transformers saves in another form than its
    modules have is made as transformers makes it, one parameter, or what comes of the same tensors, at a time.

    Raises:
        ValueError: the folder has no such files, lacks a parameter, or has it in another shape or as no plain numbers.
        BudgetError: there is no room to make a parameter of what was saved.
    """
    where = {name: file for file in map(TensorFile, weight_files(folder)) for name in file.entries}
    names, entries = _names_of(session), session.layout.entries
    known = {entry.index: next((name for name in names[entry.index] if name in where), None) for entry in entries}
    lacking = next((entry.name for entry in entries if known[entry.index] is None), None)
    found = conversions(session.model, where, [name for name, _ in session.model.named_parameters(remove_duplicate=False)])
    if lacking is not None and not found:
        raise ValueError(f"weights: {folder} has no tensor {lacking}")
    another_form = any(one.keeps_name and not all(where[name].is_ours for name, _ in one.sources) for one in found)
    buffers = _saved_buffers(session.model, where)
    with _filling(session) as filler:
        if lacking is not None or another_form:
            _make_all(filler, folder, found, where, {name: entry.index for entry in entries for name in names[entry.index]})
        else:
            for number in _by_chunk(session):
                name = known[number]
                assert name is not None
                filler.enter(number)
                _read_weights(filler, number, where[name], name)
                filler.leave(number)
    for source, buffer in buffers:
        with torch.no_grad(), uncounted():
            buffer.copy_(where[source].read(source))


def _saved_buffers(model: nn.Module, where: dict[str, TensorFile]) -> list[tuple[str, torch.Tensor]]:
    """Persistent buffers that a folder has, as running means, or what a router adds to scores, each behind its name there.

    Raises:
        ValueError: one is of another shape there.
    """
    buffers = {
        f"{prefix}.{leaf}" if prefix else leaf: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for leaf, buffer in persistent_buffers(module).items()
    }
    renamed = {one.name: one.source for one in conversions(model, where, buffers) if one.transform is None}
    prefix, found = getattr(model, "base_model_prefix", ""), []
    for name, buffer in buffers.items():
        source = next((one for one in (renamed.get(name), *_with_prefix(name, prefix)) if one in where), None)
        if source is None:
            continue
        file = where[source]
        if file.entries[source].shape != tuple(buffer.shape):
            saved, ours = file.entries[source].shape, tuple(buffer.shape)
            raise ValueError(f"weights: buffer {source} in {file.path} has shape {saved}, the model's has {ours}")
        found.append((source, buffer))
    return found


def _with_prefix(name: str, prefix: str) -> list[str]:
    """A name, and where the model has a base that one without, or with, its prefix."""
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"]


def _make_all(
    filler: Filler, folder: str, found: list[Conversion], where: dict[str, TensorFile], numbers: dict[str, int]
) -> None:
    """In the order of chunks, so that few are open at once.

    Raises:
        ValueError, BudgetError: as `from_weights`.
    """
    made: set[int] = set()
    order = {number: place for place, number in enumerate(_by_chunk(filler.session))}
    for conversion in sorted(found, key=lambda one: order[numbers[one.name]]):
        filler.drop_own_slots()
        made |= _make_weights(filler, conversion, where, numbers)
    filler.drop_own_slots()
    if lacking := next((entry.name for entry in filler.session.layout.entries if entry.index not in made), None):
        raise ValueError(f"weights: {folder} has no tensor {lacking}, nor what transformers makes it of")


def _make_weights(filler: Filler, conversion: Conversion, where: dict[str, TensorFile], numbers: dict[str, int]) -> set[int]:
    """The parameters that were made.

    Raises:
        ValueError: what is saved is of another shape, or no plain numbers.
        BudgetError: there is no room for it.
    """
    if conversion.transform is None:
        source, number = conversion.source, numbers[conversion.name]
        filler.enter(number)
        _read_weights(filler, number, where[source], source)
        filler.leave(number)
        return {number}
    for source, _ in conversion.sources:
        _check_numbers(where[source], source)
    made = conversion.make(filler.session.model, lambda source: where[source].read(source))
    found = {numbers[name]: values for name, values in made.items() if name in numbers}
    for number, values in found.items():
        entry = filler.session.layout.entries[number]
        if values.shape != entry.shape:
            source, shape = conversion.sources[0][0], tuple(values.shape)
            raise ValueError(f"weights: {source} and its like make {entry.name} of shape {shape}, it has {tuple(entry.shape)}")
        filler.enter(number)
        with torch.no_grad(), DisableTorchFunction():
            filler.session.params[number].data.copy_(values)
            filler.keep(number, values)
        filler.leave(number)
    return set(found)


def _check_numbers(file: TensorFile, name: str) -> None:
    """Raises ValueError where a tensor's numbers alone are no parameter."""
    if (dtype := file.entries[name].dtype) not in WEIGHT_TYPES:
        raise ValueError(f"weights: {name} in {file.path} is of {dtype}, whose numbers alone are no parameter")


def _read_weights(filler: Filler, number: int, file: TensorFile, name: str) -> None:
    """Parameter `number`, entered before, gets the values of a file's tensor.

    Raises:
        ValueError: the tensor is of another shape, or no plain numbers.
    """
    session, entry = filler.session, filler.session.layout.entries[number]
    shape = file.entries[name].shape
    if shape != tuple(entry.shape):
        raise ValueError(f"weights: {name} in {file.path} has shape {shape}, the model's has {tuple(entry.shape)}")
    _check_numbers(file, name)
    with torch.no_grad(), DisableTorchFunction():
        target = session.params[number].data
        if not shape:
            values = file.read(name)
            target.copy_(values)
            filler.keep(number, values)
            return
        row_count = entry.count // max(shape[0], 1)
        rows = max(1, SLICE_BYTES * max(shape[0], 1) // max(4 * entry.count, 1))
        if has_master(session.wrapped, number) and outermost_first(shape, entry.strides)[0] != 0:
            rows = shape[0]  # its rows do not lie one after another in the master: it takes all at once
        for first in range(0, shape[0], rows):
            with uncounted():
                values = file.read(name, first, rows)
            target[first : first + rows].copy_(values)
            filler.keep(number, values, first * row_count)


def weight_files(folder: str, stem: str = "model") -> list[str]:
    """The safetensors files of a folder: those of its index where it has one, or the one of that name; else all. What others put
    beside these, an average of the weights, has the same names of tensors.

    Raises:
        ValueError: there is none.
        PlanError: the index is none, or names what does not lie in the folder.
        DiskError: the index cannot be read.
    """
    index, alone = os.path.join(folder, f"{stem}.safetensors.index.json"), os.path.join(folder, f"{stem}.safetensors")
    if os.path.lexists(index):
        size_bytes = 0
        try:
            with open_file(index) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                found = parse(file.read())
            listed = set(found["weight_map"].values())
            if outside := [name for name in listed if os.path.basename(name) != name or not name.endswith(".safetensors")]:
                raise ValueError(f"it names {shown(outside[0])}, which is no safetensors file of this folder")
        except OSError as error:
            raise unreadable(index, error, size_bytes) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{index} is no index of safetensors files: {error}") from None
        return [os.path.join(folder, name) for name in sorted(listed)]
    if os.path.lexists(alone):
        return [alone]
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")) if os.path.isdir(folder) else []
    if not names:
        raise ValueError(f"weights: {folder} is no folder with safetensors files")
    return [os.path.join(folder, name) for name in names]


def _names_of(session: Session) -> list[list[str]]:
    """For each parameter the names it may have in a file: its own, tied ones, and those without or with the base's prefix."""
    names: list[list[str]] = [[] for _ in session.params]
    index = {id(p): number for number, p in enumerate(session.params)}
    for name, p in session.model.named_parameters(remove_duplicate=False):
        names[index[id(p)]].append(name)
    prefix = getattr(session.model, "base_model_prefix", "")
    return [own + [other for name in own for other in _with_prefix(name, prefix)[1:]] for own in names]
