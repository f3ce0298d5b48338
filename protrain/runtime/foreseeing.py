"""Dry runs beside a session: what a batch will take, with kernels' workspace measured in memory that the budget has free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from torch.utils._pytree import tree_map

from .. import _core
from ..base.counting import counted, counted_alone
from ..base.sizes import measuring_bytes
from ..dryrun.answers import Answers, listening
from ..dryrun.dryrun import dry_forward, dry_run
from ..dryrun.phases import DryRun
from ..dryrun.twin import as_now
from ..dryrun.workspace import MeasuredWorkspace, Workspace, workspace_bytes
from ..errors import Error
from ..model.compiled import has_compiled
from .batches import shapes_of, tensors_of
from .otherhooks import no_outer_hooks
from .wrapped import Wrapped

_Found = TypeVar("_Found")

_Batch = tuple[tuple[Any, ...], dict[str, Any]]
_Key = tuple[tuple[int, ...], ...]  # a batch, by the shapes of its tensors

#: Batches of other shapes whose answers are kept, the last ones.
MOST_HEARD = 8

#: So many such batches in a row that never came again, as where lengths grow with each step, and no more are listened to.
MOST_UNUSED = 4


class Foreseer:
    """Of one session. holds_output: whether the program holds the model's output while backward runs.

    A model that decides by numbers that it computes is listened to in its first forward of a batch: answered as that one was,
    another dry run of the batch goes its way. One that fails all the same is not listened to again."""

    def __init__(self, wrapped: Wrapped, engine: _core.Engine) -> None:
        self._wrapped = wrapped
        self.holds_output = True
        self._heard: dict[_Key, Answers] = {}
        self._to_hear: _Key | None = None
        self._listens = True
        self._unused = 0  # batches in a row that were foreseen by answers, and none of them came again
        self._workspace: Workspace = workspace_bytes
        if not wrapped.compute.separate:
            self._workspace = MeasuredWorkspace(partial(counted, engine, wrapped.compute))

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], make_room: Callable[[], object]) -> DryRun:
        """A step of this batch. make_room: called where a kernel had no memory to be measured in, for every chunk to be away.

        Raises:
            DryRunError: it cannot be foreseen.
        """
        return self._measured(lambda workspace: self._dry_run(self._wrapped, args, kwargs, workspace), make_room)

    def listen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Such a batch could not be foreseen: the next forward of one is listened to. What is compiled would find other functions
        of torch in it than where it is recomputed."""
        listens = self._listens and self._unused < MOST_UNUSED and not has_compiled(self._wrapped.model)
        self._to_hear = _key_of(args, kwargs) if listens else None

    @contextmanager
    def listening(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Batch | None]:
        """Around a forward of training, which is listened to where that is of use. Gives the batch as it is before, whose
        containers the forward may change; None: it is not."""
        batch: _Batch | None = None
        if self._to_hear is not None and self._to_hear == (key := _key_of(args, kwargs)):
            with suppress(Exception):  # containers of a program's own that cannot be made anew, for no dry run either
                batch = tree_map(as_now, (args, kwargs))
        if batch is None:
            yield None
            return
        with listening() as answers:
            yield batch
        while len(self._heard) >= MOST_HEARD:
            del self._heard[next(iter(self._heard))]
        self._heard[key], self._to_hear = answers, None

    def heard(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DryRun | None:
        """A step of this batch, whose forward was listened to and has just returned; None: it cannot be foreseen all the same,
        and no other is listened to."""
        try:
            answers = self._heard.get(_key_of(args, kwargs))
            if answers is not None and not answers.too_many:
                found = self.step_under_way(args, kwargs)
                self._unused += 1
                return found
        except Error:  # the forward was made all the same
            pass
        self._heard.clear()
        self._listens = False
        return None

    def note_used(self) -> None:
        """A forward of a batch that was foreseen begins."""
        self._unused = 0

    def step_within(self, wrapped: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DryRun:
        """A step of this batch as `wrapped` has it arranged, in another budget.

        Raises:
            DryRunError: it cannot be foreseen.
        """
        return self._dry_run(wrapped, args, kwargs, self._workspace)

    def step_under_way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DryRun:
        """A step of this batch, found out while another one has the memory: kernels are measured beside the budget.

        Raises:
            DryRunError: it cannot be foreseen.
        """
        return self._measured(lambda workspace: self._dry_run(self._wrapped, args, kwargs, workspace), None)

    def forward_bytes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, evaluates: bool, make_room: Callable[[], object] | None
    ) -> int:
        """What a forward of this batch without gradients holds at once. evaluates: in eval mode. make_room: as for `step`; None:
        a step has the memory, and kernels are measured beside the budget.

        Raises:
            DryRunError: it cannot be foreseen.
        """
        model = self._wrapped.model

        def foresee(workspace: Workspace) -> int:
            return dry_forward(model, args, kwargs, evaluates=evaluates, round_bytes=_core.rounded_bytes, workspace=workspace)

        found = self._measured(foresee, make_room)
        trains = not evaluates and all(module.training for module in model.modules())
        return found if trains else found + self._wrapped.beside_fused_bytes

    def _measured(self, foresee: Callable[[Workspace], _Found], make_room: Callable[[], object] | None) -> _Found:
        """What a dry run finds. Where kernels have no memory even with room made, this budget is refused; what would do is
        measured beside it."""
        if make_room is None:
            return foresee(self._workspace if self._wrapped.compute.separate else self._beside())
        self._missed()  # of what was foreseen before
        found = foresee(self._workspace)
        if self._missed():
            make_room()
            found = foresee(self._workspace)
        if self._missed():
            found = foresee(self._beside())
        return found

    def _beside(self) -> Workspace:
        settings = self._wrapped.settings
        return MeasuredWorkspace(partial(counted_alone, settings.disk, measuring_bytes(settings.memory_bytes)))

    def _missed(self) -> bool:
        """Whether since it was last asked an operation could not be measured."""
        return isinstance(self._workspace, MeasuredWorkspace) and self._workspace.take_missed()

    def _dry_run(self, wrapped: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any], workspace: Workspace) -> DryRun:
        with no_outer_hooks():
            return dry_run(
                wrapped.model, args, kwargs, [block for _, block in wrapped.blocks],
                {id(p): entry.chunk for p, entry in zip(wrapped.params, wrapped.layout.entries, strict=True)},
                round_bytes=_core.rounded_bytes, workspace=workspace, hold_output=self.holds_output,
                answers=self._heard.get(_key_of(args, kwargs)) if self._heard else None,
            )  # fmt: skip


def _key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Key:
    return tuple(tensors_of(shapes_of(args, kwargs)))
