"""Foreign optimizers: those without a kernel take their own step, one parameter after another.

Problem: an optimizer's class updates whole tensors with code that only Python knows, and keeps state of any shape beside them;
for the whole model neither fits memory. Design: `step()` brings one parameter at a time: its value, its gradient and its state,
all in counted memory; the user's own optimizer object, narrowed to that parameter, runs its own code; the results go home. The
home of state is that of its chunk: memory, or extents of the engine's file (parking.py). What the class needs, and whether its
parameters can be updated one by one at all, was tried out before (footprint.py).

Invariants:
- A step is made or not made. New values and states of chunks on disk are written beside the old ones and count from the end of
  the step on; of chunks in memory the old ones are kept until then, in memory where there is room, else on disk.
- Each narrowed step starts from what the whole step started from: values of groups, attributes of the optimizer, entries of its
  state that belong to no parameter. All must make the same of these; if not the step is not made.
- Parameters come in the order of the optimizer's groups, as in plain torch: a class that draws random numbers draws the same.
- Between steps the user's object has no state; its groups are those of the optimizer that `wrap` returned.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base.counting import counted, uncounted
from ..errors import DiskError, Error, StepError
from ..model.parameters import DisableTorchFunction
from ..model.strides import laid
from .footprint import Footprint, Shared, check_on_cpu, one_line, own_mode, run_narrowed, without_hooks
from .parking import Parked, Space, Tree, clone, described, same, tensors_of

if TYPE_CHECKING:
    from ..planner.plans import Arrangement
    from ..session import Session


class Foreign:
    """The user's optimizer and the state of all its parameters, by their number in the layout."""

    def __init__(self, inner: torch.optim.Optimizer, footprint: Footprint) -> None:
        self.inner, self.footprint = inner, footprint
        self._groups = inner.param_groups
        self._loose = {key: value for key, value in inner.state.items() if not isinstance(key, torch.Tensor)}
        self._live: dict[int, Tree] = {}  # of chunks in memory, and of what has no large tensor
        self._parked: dict[int, Parked] = {}
        self._under_way: _Step | None = None
        self.asks = False  # inner for its state dict, or gives it one
        self._made_state = False  # in the last step, of parameters that had none

    def open(self, session: Session) -> None:
        """The session has its engine; nothing is at home yet."""
        self._session = session
        self._space = Space(session.engine)
        self._number = {id(p): number for number, p in enumerate(session.params)}

    @property
    def name(self) -> str:
        """Of the user's class."""
        return type(self.inner).__name__

    # ---- homes of state ----

    def _in_memory(self, number: int) -> bool:
        entry = self._session.layout.entries[number]
        return self._session.engine.in_memory(entry.chunk) or entry.count == 0

    def leave(self) -> None:
        """The chunks whose home is the disk have their states there when this returns."""
        for number in [number for number in self._live if not self._in_memory(number)]:
            self._parked[number] = Parked(self._space, self._live[number])
            del self._live[number]

    def arrive(self) -> None:
        """The chunks whose home is memory have their states there when this returns."""
        for number in [number for number in self._parked if self._in_memory(number)]:
            self._bring(number)
        self._space.trim()

    def _bring(self, number: int) -> None:
        parked = self._parked[number]
        self._live[number] = parked.fetch()
        del self._parked[number]
        parked.release()

    def _copy(self, number: int) -> Tree:
        return self._parked[number].fetch() if number in self._parked else clone(self._live[number])

    def _numbers(self) -> Iterator[tuple[int, int]]:
        """(group, number) of each parameter, in the optimizer's order."""
        for group, values in enumerate(self._groups):
            for p in values["params"]:
                yield group, self._number[id(p)]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Memory taken inside is in the session's budget."""
        with counted(self._session.engine, self._session.wrapped.compute):
            yield

    @property
    def here_bytes(self) -> int:
        """Of what the footprint has for large state, what is in memory now."""
        return sum(self.footprint.state_bytes[number] for number in self._live)

    # ---- a step ----

    def step(self, scale: float) -> None:
        """Make the step of all parameters that have gradients, the engine's commit with it; `scale` multiplies these. `finish`
        comes next.

        Raises:
            StepError: the class's own code failed. Then, and after any other error, parameters and state are what they were.
        """
        self._made_state = not (self._live or self._parked)
        self._under_way = _Step(self, scale)
        self._under_way.make()

    def highest_bytes(self, arrangement: Arrangement, memory_bytes: int, held_bytes: int) -> int:
        """What the last step held at most while it updated, or the next one does. held_bytes: what is in memory beside states and
        slots then."""
        layout, n_persist = self._session.layout, arrangement.plan.n_persist
        live_bytes = arrangement.static_bytes + held_bytes + self.footprint.small_bytes + sum(layout.grad_bytes[:n_persist])
        return self.footprint.highest_bytes(layout.places, n_persist, live_bytes, memory_bytes, makes_state=self._made_state)

    def made_bytes(self, n_persist: int) -> int:
        """Of the state of parameters in so many chunks, what the last step made, so that its backward ran without."""
        places = self._session.layout.places
        made = zip(places, self.footprint.state_bytes, strict=True) if self._made_state else ()
        return sum(n_bytes for (chunk, _), n_bytes in made if chunk < n_persist)

    def finish(self) -> None:
        """The engine has committed the step: its states are the parameters'. Where it was interrupted it can be called again."""
        if self._under_way is not None:
            self._under_way.finish()
            self._under_way = None

    def changes_mode(self, name: str) -> bool:
        """Whether the class's own `train` or `eval` changes what all parameters share, which is where it notes its mode."""
        return _Step(self, 1.0, own_mode(self.inner, name)).changes_mode()

    def change_mode(self, name: str) -> set[int]:
        """Call the class's own `train` or `eval`, which may change parameters and state, the engine's commit with it; `finish`
        comes next. Returns the numbers of the parameters that it was called for: those that have state.

        Raises:
            StepError: the class's own code failed. Then, and after any other error, parameters and state are what they were.
        """
        self._under_way = _Step(self, 1.0, own_mode(self.inner, name))
        with self._counted():
            self._under_way.make()
        return {number for _, number in self._numbers() if self._has_state(number)}

    def _has_state(self, number: int) -> bool:
        return number in self._live or number in self._parked

    # ---- torch's forms of state ----

    def state_dict(self) -> dict[str, Any]:
        """What the class's own state_dict gives for full, separately owned tensors, in no budget."""
        with uncounted(), self._whole():
            for _, number in self._numbers():
                if number in self._parked or number in self._live:
                    self.inner.state[self._session.params[number]] = self._copy(number)
            return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes plain torch's; the class's own load_state_dict decides about types and values of groups.

        Raises:
            StepError: a step is under way.
            ValueError: it is of other groups.
        """
        with uncounted(), self._whole():
            self.inner.load_state_dict(state_dict)
            states = {p: state for p, state in self.inner.state.items() if isinstance(p, torch.Tensor)}
            loose = {key: state for key, state in self.inner.state.items() if not isinstance(key, torch.Tensor)}
            groups = self.inner.param_groups
            self.put((self._number[id(p)], state) for p, state in states.items())
        self.set_shared(groups, clone(loose))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """The user's object has its groups, no state of parameters, and may be given one; afterwards it has none."""
        self.inner.param_groups, self.inner.state = self._groups, defaultdict(dict, self._loose)
        self.asks = True
        try:
            with DisableTorchFunction():
                yield
        finally:
            self.asks = False
            self.inner.param_groups, self.inner.state = self._groups, defaultdict(dict)

    def set_shared(self, groups: Sequence[dict[str, Any]], loose: dict[Any, Any]) -> None:
        """Values for the groups, and entries of the optimizer's state that belong to no parameter."""
        for group, given in zip(self._groups, groups, strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})
        self._loose = loose

    def put(self, states: Iterable[tuple[int, Tree]]) -> None:
        """Replace all state by copies of these, each with the number of its parameter; those left out have none.

        Raises:
            StepError: a step is under way.
            PlanError: a tensor is not on the CPU.
            DiskError: the disk has no room; nothing was changed.
        """
        if self._session.engine.has_gradients():
            raise StepError("optimizer: its state cannot be replaced in the middle of a step: call step() or zero_grad() first")
        made: dict[int, Parked] = {}
        try:
            for number, state in states:
                check_on_cpu(self.inner, state)
                with self._counted():
                    made[number] = Parked(self._space, state)
        except BaseException:
            for parked in made.values():
                parked.release()
            raise
        for parked in self._parked.values():
            parked.release()
        self._live.clear()
        self._parked = made

    def import_state(self, states: dict[int, Tree]) -> None:
        """As `put`, by id of the parameter."""
        self.put((number, states[id(p)]) for number, p in enumerate(self._session.params) if id(p) in states)

    # ---- for checkpoints ----

    def described(self) -> dict[int, Tree]:
        """The state of each parameter that has one, with tensors without data, in the optimizer's order."""
        return {
            number: self._parked[number].described() if number in self._parked else described(self._live[number])
            for _, number in self._numbers()
            if number in self._parked or number in self._live
        }

    def copy(self, number: int) -> Tree:
        """An owned copy of the state of one parameter, in no budget."""
        with uncounted():
            return self._copy(number)

    def numbers(self) -> list[int]:
        """Of the optimizer's parameters, in its order."""
        return [number for _, number in self._numbers()]

    def values_of_groups(self) -> list[dict[str, Any]]:
        """What stands in each group beside its parameters."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self._groups]

    @property
    def loose(self) -> dict[Any, Any]:
        """Entries of the optimizer's state that belong to no parameter."""
        return self._loose


class _Step:
    """One step under way, and how to take it back; or a call of another method of the class (None: its step), which takes no
    gradients."""

    def __init__(self, foreign: Foreign, scale: float, method: Any = None) -> None:
        self._foreign, self._session, self._scale, self._method = foreign, foreign._session, scale, method
        self._commits = self._session.engine.commits()
        self._before = Shared.of(self._optimizer_now())
        self._after: Shared | None = None
        self._made: dict[int, Parked | None] = {}  # new states of chunks on disk; None: it has none now
        self._kept: dict[int, Tree | Parked] = {}  # old values and states of chunks in memory

    def _optimizer_now(self) -> torch.optim.Optimizer:
        inner = self._foreign.inner
        inner.param_groups, inner.state = self._foreign._groups, defaultdict(dict, self._foreign._loose)
        return inner

    def make(self) -> None:
        session, foreign, number = self._session, self._foreign, -1
        session.engine.use_account(True)
        try:
            with without_hooks(foreign.inner), DisableTorchFunction():
                self._scale_in_memory()
                for group, number in foreign._numbers():
                    if self._method is not None:
                        if foreign._has_state(number):
                            (self._in_memory if foreign._in_memory(number) else self._from_disk)(group, number)
                    elif number in session.gradients.taken:
                        self._from_disk(group, number)
                    elif session.params[number].grad is not None and foreign._in_memory(number):
                        self._in_memory(group, number)
                number = -1
                if self._after is None:  # no gradient at all: what the class does once for each step is done
                    self._narrowed(0, None, None)
            session.engine.stage_rest()
            session.engine.make_step([], 1.0)
        except BaseException as error:
            if session.engine.commits() != self._commits:
                raise  # an interrupt that came when the step was made
            traceback.clear_frames(error.__traceback__)  # what the class's step holds there is memory that state comes back to
            try:
                self._take_back()
            finally:
                foreign._under_way = None
            if isinstance(error, Error) or not isinstance(error, Exception):
                raise
            where = f" at {session.layout.entries[number].name}" if number >= 0 else ""
            what = "step" if self._method is None else self._method.__name__
            raise StepError(
                f"optimizer {foreign.name}: its own {what} failed{where}: {one_line(error)}; the {what} was not made, parameters "
                f"and optimizer state are what they were before it"
            ) from error

    def changes_mode(self) -> bool:
        """Whether the method changes what all parameters share."""
        with DisableTorchFunction():
            self._narrowed(0, None, None)
        assert self._after is not None
        self._settle(self._before)
        return not self._after.equals(self._before)

    def _scale_in_memory(self) -> None:
        """Gradients in memory are clipped in place, all of them before the first update, as by clip_grad_norm_: a step that fails
        leaves none as it was beside others that are smaller."""
        if self._scale == 1.0:
            return
        foreign, params = self._foreign, self._session.params
        found = [params[number].grad for _, number in foreign._numbers() if foreign._in_memory(number)]
        if grads := [grad for grad in found if grad is not None]:
            torch._foreach_mul_(grads, self._scale)

    # ---- one parameter ----

    def _narrowed(self, group: int, p: nn.Parameter | None, state: Tree) -> Tree:
        """The class's own step; returns the new state.

        Raises:
            StepError: what it keeps for all parameters depends on this one.
        """
        new, after = run_narrowed(self._foreign.inner, self._before, self._foreign._groups, group, p, state, self._method)
        if self._after is None:
            self._after = after
        elif not after.equals(self._after):
            raise StepError(
                f"optimizer {self._foreign.name}: what its step keeps for all parameters depends on each of them, so it needs "
                f"the whole model at once, which is not supported; the step was not made"
            )
        return new

    def _from_disk(self, group: int, number: int) -> None:
        session, foreign = self._session, self._foreign
        entry = session.layout.entries[number]
        value = torch.empty_strided(entry.shape, entry.strides, dtype=session.layout.dtype)
        session.engine.transfer(number, 0, value.data_ptr(), False)
        grad = self._gradient(number) if self._method is None else None
        state = foreign._parked[number].fetch() if number in foreign._parked else None
        p = session.params[number]
        kind, home = p.__class__, p.data
        p.__class__ = nn.Parameter
        p.data, p.grad = value, grad
        del value, grad
        try:
            state = self._narrowed(group, p, state)
            made = self._checked(number, p.data)
        finally:
            p.data, p.grad = home, None
            p.__class__ = kind
        session.engine.stage(number, made.data_ptr())
        del made
        self._made[number] = None
        if state is not None:
            self._made[number] = Parked(foreign._space, state)

    def _gradient(self, number: int) -> torch.Tensor:
        """Of a parameter on disk, clipped."""
        entry = self._session.layout.entries[number]
        grad = torch.empty_strided(entry.shape, entry.strides, dtype=self._session.layout.dtype)
        if not self._session.engine.spilled(number, grad.data_ptr()):
            raise StepError(f"the gradient of {entry.name} was lost")
        if self._scale != 1.0:
            grad.mul_(self._scale)
        return grad

    def _in_memory(self, group: int, number: int) -> None:
        foreign, p = self._foreign, self._session.params[number]
        if number in foreign._parked:
            foreign._bring(number)
        state = foreign._live.get(number)
        home = p.data
        self._kept[number] = self._keep({"value": home} if state is None else {"value": home, "state": state})
        kind = p.__class__
        p.__class__ = nn.Parameter
        try:
            state = self._narrowed(group, p, state)
            made = self._checked(number, p.data)
        finally:
            p.data = home
            p.__class__ = kind
        if made.data_ptr() != home.data_ptr():
            home.copy_(made)
        if state is not None:
            foreign._live[number] = state
        else:
            foreign._live.pop(number, None)

    def _checked(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """What the step left as the parameter's value, with the parameter's strides.

        Raises:
            StepError: it is another kind of tensor now.
        """
        entry = self._session.layout.entries[number]
        if value.shape != entry.shape or value.dtype != torch.float32 or value.layout != torch.strided:
            raise StepError(f"optimizer {self._foreign.name}: its step made {entry.name} a {value.dtype} of {tuple(value.shape)}")
        return laid(value, entry.strides)

    # ---- both ends ----

    def _keep(self, tree: Tree) -> Tree | Parked:
        """A copy of what is about to be changed: in memory where that leaves enough for the rest of the step, else on disk. All
        memory of the budget serves, or up to the goal where activations go to disk to keep to one: it is idle in step()."""
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(tree))
        foreign, stats = self._foreign, self._session.engine.stats()
        due = foreign.footprint.step_bytes + sum(
            n_bytes
            for number, n_bytes in enumerate(foreign.footprint.state_bytes)
            if n_bytes and number not in foreign._live and foreign._in_memory(number)
        )
        if stats["live_bytes"] + needed + due <= (self._session.homes.stash_goal_bytes or stats["limit_bytes"]):
            return clone(tree)
        return Parked(foreign._space, tree)

    def finish(self) -> None:
        foreign = self._foreign
        for number, made in self._made.items():
            old = foreign._parked.get(number)
            if old is made:
                continue
            if made is not None:
                foreign._parked[number] = made
            else:
                foreign._parked.pop(number, None)
            if old is not None:
                old.release()
        while self._kept:
            _, kept = self._kept.popitem()
            if isinstance(kept, Parked):
                kept.release()
        assert self._after is not None
        self._settle(self._after)

    def _settle(self, shared: Shared) -> None:
        """The user's object has these values, and no state of parameters."""
        foreign = self._foreign
        for group, before, values in zip(foreign._groups, self._before.groups, shared.groups, strict=True):
            for key in before.keys() - values.keys():
                del group[key]
            group.update({key: value for key, value in values.items() if key not in before or not same(before[key], value)})
        now = Shared([{} for _ in foreign._groups], shared.attributes, shared.loose)
        now.put_into(foreign.inner, foreign._groups)
        foreign.inner.param_groups = foreign._groups
        foreign._loose, foreign.inner.state = dict(foreign.inner.state), defaultdict(dict)

    def _take_back(self) -> None:
        """Parameters, states and the user's object are what they were.

        Raises:
            DiskError, StepError: something that was kept on disk cannot be read. All else is put back, and nobody trains, runs or
                saves the mixture.
        """
        session = self._session
        self._settle(self._before)
        for made in self._made.values():
            if made is not None:
                made.release()
        self._made.clear()
        failed: BaseException | None = None
        for number in list(self._kept):
            kept = self._kept.pop(number)
            try:
                self._put_back(number, kept)
            except BaseException as error:
                failed = failed or self._not_put_back(number, error)
            finally:
                if isinstance(kept, Parked):
                    kept.release()
        if failed is not None:
            session.values.loads.mix("a step failed, could not be taken back")
            raise failed

    def _not_put_back(self, number: int, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):
            return error
        text = (
            f"optimizer {self._foreign.name}: its step failed, and {self._session.layout.entries[number].name} could not be put "
            f"back: {one_line(error)}; load a checkpoint"
        )
        if isinstance(error, DiskError):
            return DiskError(text, errno=error.errno or 0, filename=error.filename or "", asked_bytes=error.asked_bytes)
        return StepError(text)

    def _put_back(self, number: int, kept: Tree | Parked) -> None:
        """One parameter and its state are what they were."""
        foreign, home = self._foreign, self._session.params[number].data
        foreign._live.pop(number, None)  # first: what comes back takes its memory
        if isinstance(kept, Parked):
            kept.take_out("value", home)
            tree = kept.fetch()
        else:
            home.copy_(kept["value"])
            tree = kept
        if "state" in tree:
            foreign._live[number] = tree["state"]
