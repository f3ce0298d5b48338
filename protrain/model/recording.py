"""What records a model for others to run: `torch.jit.trace` and `torch.jit.script`, `torch.export`, and what is made of them.

A record has parameters by where they lie, and is run where nobody sees which of them it reads: of a wrapped model those would be
another's bytes a moment later.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from ..errors import PlanError


def refuse_recording() -> NoReturn:
    """Raises PlanError: a wrapped model cannot be recorded."""
    raise PlanError(
        "torch.jit and torch.export cannot take a wrapped model, whose parameters lie elsewhere a moment later: give them "
        "copy.deepcopy(model), which is plain, or call protrain.unwrap(model) first"
    )


def check_not_recorded() -> None:
    """Whether nobody records what is run here.

    Raises:
        PlanError: torch.jit.trace or torch.export does.
    """
    if torch._C._is_tracing() or torch.compiler.is_exporting():
        refuse_recording()
