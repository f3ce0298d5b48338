"""protrain: train PyTorch models whose training state does not fit the memory, bit for bit as plain torch does."""

import atexit as _atexit

import torch as _torch  # noqa: F401  (the extension links against its libraries)

from . import _core
from .api import Status, close_all, plan, session_of, status, unwrap, wrap
from .errors import BudgetError, DiskError, Error, OutOfMemoryError, PlanError, StepError
from .optimizers import Optimizer
from .planning import Plan

__version__ = "0.1.0"

__all__ = [
    "BudgetError", "DiskError", "Error", "Optimizer", "OutOfMemoryError", "Plan", "PlanError", "Status", "StepError", "plan",
    "session_of", "status", "unwrap", "wrap",
]  # fmt: skip

_core.install_allocator()
_atexit.register(close_all)
