"""States: the model's and its optimizer's as torch writes them, tensor by tensor, and taken over from what torch wrote."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch

from .. import _core
from ..base.counting import uncounted
from ..errors import PlanError, StepError
from ..model.held import persistent_buffers
from ..model.parameters import ChunkTensor, DisableTorchFunction
from ..optim.optimizers import ADAM_STATE, Group, check_arrays, hyper_of, loaded_groups, n_states_of, state_names
from ..runtime.loads import STATE
from .values import Values


class States:
    """Of one session. What is handed out is full, separately owned, and in no budget."""

    def __init__(self, values: Values) -> None:
        self._values, self._wrapped = values, values.wrapped
        self._engine: _core.Engine = values.engine
        self._copies: dict[int, MutableMapping[int, torch.Tensor]] = {}  # by id of a state dict

    # ---- the model's ----

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, owned copy) for each entry of the model's state dict, one at a time; tied names after the first are left out."""
        index = self._wrapped.number_of
        seen: set[int] = set()
        for prefix, module in self._wrapped.model.named_modules():
            for leaf, p in module._parameters.items():
                if p is not None and id(p) not in seen:
                    seen.add(id(p))
                    yield f"{prefix}.{leaf}" if prefix else leaf, self._values.get(index[id(p)])
            for leaf, buffer in persistent_buffers(module).items():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield f"{prefix}.{leaf}" if prefix else leaf, buffer.detach().clone()

    def fill_state_dict(self, own: dict[str, int], state_dict: Any, prefix: str) -> None:
        """Each entry of a module's own parameters, by their names in it, becomes a full tensor; tied parameters share one. What
        a module's own way of saving has made of one stays as it is, with memory of its own."""
        copies = self._copies_in(state_dict)
        for leaf, number in own.items():
            if prefix + leaf in state_dict:
                entry: Any = state_dict[prefix + leaf]
                if not self._shows_all(entry, number):
                    if _shows_some(entry, self._wrapped.params[number]):
                        with uncounted():
                            state_dict[prefix + leaf] = entry.detach().clone()
                    continue
                copy = copies.get(number)
                state_dict[prefix + leaf] = copies[number] = self._values.get(number) if copy is None else copy

    def _shows_all(self, entry: Any, number: int) -> bool:
        """Whether an entry of a state dict is the parameter, or shows all of it as it lies."""
        p = self._wrapped.params[number]
        if entry is p or issubclass(type(entry), ChunkTensor):
            return entry is p or self._values.residency.shows(entry, number)
        if not _shows_some(entry, p):
            return False
        with DisableTorchFunction():
            same = (entry.shape, entry.stride(), entry.dtype) == (p.shape, p.stride(), p.dtype)
            return same and entry.storage_offset() == p.storage_offset() and not entry.is_conj() and not entry.is_neg()

    def _copies_in(self, state_dict: Any) -> MutableMapping[int, torch.Tensor]:
        """Of parameters by number, as long as somebody has them: nothing of them is in the state dict but its entries, which a
        program may drop or write to a file."""
        try:
            weakref.ref(state_dict)
        except TypeError:  # a plain dict, whose end nobody tells
            return {}
        key = id(state_dict)
        if key not in self._copies:
            self._copies[key] = weakref.WeakValueDictionary()
            weakref.finalize(state_dict, self._copies.pop, key, None).atexit = False
        return self._copies[key]

    # ---- the optimizer's ----

    def optimizer(self, value: Callable[[int, int], torch.Tensor] | None = None) -> dict[str, Any]:
        """Of torch's form; value(parameter, array) gives each state array of a kernel, an owned copy unless given."""
        wrapped = self._wrapped
        if wrapped.foreign is not None:
            return wrapped.foreign.state_dict()
        value = value or self._values.get
        packed: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        place = 0
        for group in wrapped.groups:
            used = n_states_of(hyper_of(wrapped.kind, group))
            for offset, p in enumerate(group["params"]):
                number = wrapped.number_of[id(p)]
                known, steps = self._arrays_of(number), self._engine.steps(number)
                if known is None:
                    continue
                if used < len(known) and known == ADAM_STATE and not self._values.get(number, len(known)).any():
                    known = known[:-1]  # amsgrad is off, and nothing tells that it was ever on
                entry = {name: value(number, 1 + array) for array, name in enumerate(known)}
                if wrapped.master_array:
                    entry["master"] = value(number, wrapped.master_array)
                if wrapped.kind is not torch.optim.SGD:
                    entry = {"step": torch.tensor(float(steps), device="cpu")} | entry
                state[place + offset] = entry
            packed.append(
                {k: v for k, v in group.items() if k != "params"} | {"params": list(range(place, place + len(group["params"])))}
            )
            place += len(group["params"])
        return {"state": state, "param_groups": packed}

    def _arrays_of(self, number: int) -> tuple[str, ...] | None:
        """By name, those of a kernel that one parameter has beside its master; None: it has no state."""
        wrapped, steps = self._wrapped, self._engine.steps(number)
        if wrapped.layout.entries[number].group < 0 or (steps == 0 and not wrapped.master_array):
            return None
        if not steps and wrapped.kind is torch.optim.SGD:  # a buffer that no step has made is none
            return ()
        return state_names(wrapped.kind, wrapped.n_states)

    def names(self) -> dict[torch.Tensor, list[str]]:
        """Of the state of each parameter that has some, in the optimizer's order; amsgrad's where wrap knew of it."""
        wrapped, foreign = self._wrapped, self._wrapped.foreign
        if foreign is not None:
            return {wrapped.params[number]: list(tree) for number, tree in foreign.described().items()}
        found: dict[torch.Tensor, list[str]] = {}
        for p in (p for group in wrapped.groups for p in group["params"]):
            arrays = self._arrays_of(wrapped.number_of[id(p)])
            if arrays is not None:
                step = ["step"] if wrapped.kind is not torch.optim.SGD else []
                found[p] = [*step, *arrays, *(["master"] if wrapped.master_array else [])]
        return found

    def load_optimizer(self, state_dict: dict[str, Any]) -> None:
        """Takes what `optimizer` gives, and plain torch's. If it fails after its first value, the state is half loaded.

        Raises:
            ValueError: it is of other groups.
            PlanError: it is of other parameters, or needs arrays that the model was not wrapped with; nothing was changed.
            DiskError: a value could not be read or put.
            StepError: a step is under way.
        """
        wrapped = self._wrapped
        if wrapped.foreign is not None:
            wrapped.foreign.load_state_dict(state_dict)
            return
        if self._engine.has_gradients():
            raise StepError("optimizer.load_state_dict in the middle of a step: call step() or zero_grad() first")
        saved = copy.deepcopy(state_dict["param_groups"])
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in wrapped.groups]:
            raise ValueError("optimizer.load_state_dict: the parameter groups are of other sizes than this optimizer's")
        order = [number for g in saved for number in g["params"]]
        owners = [p for g in wrapped.groups for p in g["params"]]
        states = state_dict["state"]
        found = {id(p): states[n] for n, p in zip(order, owners, strict=True) if n in states}
        given = loaded_groups(wrapped.kind, wrapped.groups, saved)
        self._check(found, given)
        with self._values.loads.replacing(STATE) as half:
            for group, values in zip(wrapped.groups, given, strict=True):
                for option in set(group) - set(values) - {"params"}:
                    del group[option]
                group.update(values)
            self._import(found, half)

    def import_optimizer(self, states: dict[int, dict[str, Any]]) -> None:
        """Optimizer state of torch's form, by id of the parameter.

        Raises:
            PlanError: it is of other parameters; nothing was changed.
        """
        wrapped = self._wrapped
        if wrapped.foreign is not None:
            wrapped.foreign.import_state(states)
            return
        self._check(states, wrapped.groups)
        self._import(states, False)

    def _check(self, states: dict[int, dict[str, Any]], groups: Sequence[Group]) -> None:
        """Whether each array that is there is of its parameter's shape, and has a place.

        Raises:
            PlanError: one is not, or has none.
        """
        wrapped = self._wrapped
        for number, group in enumerate(groups):
            check_arrays(f"optimizer: group {number}", wrapped.kind, group, wrapped.n_states)
        for p, entry in zip(wrapped.params, wrapped.layout.entries, strict=True):
            state = states.get(id(p), {})
            for name in (*state_names(wrapped.kind, wrapped.n_states), "master") if entry.group >= 0 else ():
                value = dict.get(state, name)  # of one that is read on demand what stands for it
                if isinstance(value, torch.Tensor) and value.shape != entry.shape:
                    raise PlanError(
                        f"optimizer: {name} of {entry.name} is of shape {tuple(value.shape)}, the parameter is of "
                        f"{tuple(entry.shape)}"
                    )

    def _import(self, states: dict[int, dict[str, Any]], half_loaded: bool) -> None:
        """half_loaded: there may be state of no step (loads.py)."""
        wrapped, values = self._wrapped, self._values
        names = state_names(wrapped.kind, wrapped.n_states)
        for number, (p, entry) in enumerate(zip(wrapped.params, wrapped.layout.entries, strict=True)):
            if entry.group < 0:
                continue
            state = states.get(id(p), {})
            for array, name in enumerate(names):
                value = state.get(name)
                if value is not None:
                    values.put(number, value, 1 + array)
                elif self._engine.steps(number) or half_loaded:
                    values.put(number, torch.zeros(entry.shape, device="cpu"), 1 + array)
            master = state.get("master") if wrapped.master_array else None
            if master is not None:
                values.put(number, master, wrapped.master_array)
                values.masters_given.add(number)
            # The arrays are asked for only where it is missing: of a file they are read each time.
            step = state["step"] if "step" in state else int(any(state.get(name) is not None for name in names))
            self._engine.set_steps(number, int(step))


def _shows_some(entry: Any, p: torch.Tensor) -> bool:
    """Whether an entry lies in the parameter's memory, or a parameter's on the disk."""
    if not isinstance(entry, torch.Tensor) or entry.layout is not torch.strided:
        return False
    with DisableTorchFunction():
        return isinstance(entry, ChunkTensor) or entry.untyped_storage()._cdata == p.untyped_storage()._cdata
