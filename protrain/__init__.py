"""protrain: train PyTorch models whose training state does not fit the memory, bit for bit as plain torch does.

torch is imported by the first use of a name, so that `protrain --help` answers at once.
"""

from typing import TYPE_CHECKING, Any

from .base import aftertorch

if TYPE_CHECKING:
    from .api import Status, plan, profile, session_of, status, unwrap, wrap
    from .checkpoint import load, save
    from .errors import BudgetError, DeviceError, DiskError, Error, OutOfMemoryError, PlanError, StepError
    from .optim.optimizers import Optimizer
    from .planner.plans import Forecast, Plan
    from .planner.profiles import Profile
    from .profiling.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "BudgetError", "DeviceError", "DiskError", "Error", "Forecast", "Optimizer", "OutOfMemoryError", "Plan", "PlanError",
    "Profile", "Status", "StepError", "Timeline", "load", "plan", "profile", "save", "session_of", "status", "unwrap", "wrap",
]  # fmt: skip

aftertorch.call_first()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'protrain' has no attribute {name!r}")
    from . import api, checkpoint, errors
    from .optim import optimizers
    from .planner import plans, profiles
    from .profiling import timeline

    for module in (api, checkpoint, errors, optimizers, plans, profiles, timeline):
        if name in vars(module):
            globals()[name] = vars(module)[name]
            return globals()[name]
    raise AttributeError(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
