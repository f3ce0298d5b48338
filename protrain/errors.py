"""What protrain raises. Each message names what was given, what is allowed and what to do."""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Base class of all of protrain's errors. After any of them the model's last complete step is intact; but where the disk
    fails half-way through a load, or another change of values, forward, `step()` and `save` raise StepError until a load has
    ended."""

    _keywords: tuple[str, ...] = ()  # of its constructor, beside the message

    def __reduce__(self) -> Any:
        """Errors cross processes as they are: a worker's BudgetError is one in its parent."""
        return _again, (type(self), str(self), {name: getattr(self, name) for name in self._keywords})


def _again(kind: type[Error], message: str, keywords: dict[str, Any]) -> Error:
    return kind(message, **keywords)


class BudgetError(Error):
    """The memory budget cannot hold what is asked for; it was not allocated.

    Attributes:
        needed_bytes: memory that would have been in use, at least.
        budget_bytes: the budget that was given.
        smallest_bytes: the smallest budget that works, as far as it is known when the error is raised. Of a request in the middle
            of a step, whose rest nobody foresees, one that is worth a try: less may do.
    """

    _keywords = ("needed_bytes", "budget_bytes", "smallest_bytes")

    def __init__(self, message: str, *, needed_bytes: int, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class DiskError(Error, OSError):
    """An operation on the disk failed: `errno` and `filename` as in any OSError, `asked_bytes` of the operation."""

    _keywords = ("errno", "filename", "asked_bytes")

    def __init__(self, message: str, *, errno: int = 0, filename: str = "", asked_bytes: int = 0) -> None:
        super().__init__(message)
        self.errno = errno
        self.filename = filename
        self.asked_bytes = asked_bytes
        self._message = message

    def __str__(self) -> str:
        return self._message


class StepError(Error):
    """Calls came in an order that no training step has, and the step can go on as if the call had not been made; or a load,
    or another change of values, failed half-way: load again."""


class PlanError(Error, ValueError):
    """A plan, or an argument that shapes one, cannot be used as given."""


class OutOfMemoryError(Error, MemoryError):
    """The operating system, or the device, gives no memory although the budget would allow it."""


class DeviceError(Error, RuntimeError):
    """The device that computes is missing, cannot be used or has failed. A device that failed is of no use to this process."""


#: DiskErrors and OutOfMemoryErrors of the core so far in this process: who asked may have lost something by one.
n_losses = 0


def from_record(code: int, message: str, errno: int, path: str, asked: int, needed: int, budget: int, smallest: int) -> Exception:
    """The exception for an error record of the C core (csrc/base/status.h, `ptn_status` is the code)."""
    global n_losses
    n_losses += code in (2, 3)
    if code == 1:
        return BudgetError(message, needed_bytes=needed, budget_bytes=budget, smallest_bytes=max(smallest, needed))
    if code == 2:
        return OutOfMemoryError(message)
    if code == 3:
        return DiskError(message, errno=errno, filename=path, asked_bytes=asked)
    if code == 4:
        return StepError(message)
    if code == 5:
        return PlanError(message)
    if code == 7:
        return DeviceError(message)
    return ValueError(message)
