"""torch's first elementwise function is called as soon as torch is there (firstcall.py), whichever of both is imported first.

A program may compare with plain torch before it uses any name of protrain, and importing protrain alone imports no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_FIRST_CALL = "protrain.base.firstcall"


class _Finder:
    """Finds torch as it would be found without this, and has the first call made behind its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            with suppress(AttributeError):  # a loader that takes no attributes
                self._make_call(spec.loader)
        return spec

    def _make_call(self, loader: Any) -> None:
        """Once it has run torch."""
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            importlib.import_module(_FIRST_CALL)

        loader.exec_module = executed


def call_first() -> None:
    """Now, where torch is imported, or when it is."""
    if "torch" in sys.modules:
        importlib.import_module(_FIRST_CALL)
    else:
        sys.meta_path.insert(0, _Finder())
