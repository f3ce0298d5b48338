"""Weights in the form in which transformers saves some models: experts one by one, or under other names than their modules have.

transformers knows how they become a model's parameters. Which of a folder's tensors make which of them follows from names alone;
what is made is made where it is needed, and nothing else of the folder is in memory then.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import Error


@dataclass
class Conversion:
    """What becomes of some tensors of a folder. name: the parameter, or the first of several; sources: the tensors, each with the
    pattern that it fits. transform: transformers' own; None: the only source is the parameter, maybe under another name."""

    name: str
    transform: Any = None
    sources: list[tuple[str, str | None]] = field(default_factory=list)

    @property
    def source(self) -> str:
        """Where it is under another name alone: that, or its own, which a folder may have as well."""
        return next((source for source, _ in self.sources if source == self.name), self.sources[0][0])

    @property
    def keeps_name(self) -> bool:
        """Whether a name alone does not tell which of the forms a tensor has."""
        return self.transform is not None and any(source == self.name for source, _ in self.sources)

    def make(self, model: nn.Module, read: Callable[[str], torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """By the names that the model has for them. Memory is that of the sources, and of what each step makes of them.

        Raises:
            ValueError: transformers cannot make them of what is read.
        """
        transform = copy.deepcopy(self.transform)
        for source, pattern in self.sources:
            transform.add_tensor(self.name, source, pattern, partial(read, source))
        try:
            made = transform.convert(self.name, model=model, config=getattr(model, "config", None))
        except (Error, torch.OutOfMemoryError):  # nothing of the weights
            raise
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"weights: {self.name} cannot be made of {self.sources[0][0]} and its like: {error}") from error
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}


def conversions(model: nn.Module, saved: Iterable[str], names: Iterable[str]) -> list[Conversion]:
    """How tensors with the names `saved` become this model's, whose names for them are `names`; none where the model is not
    transformers', or has one form alone, or its version knows of no other."""
    if "transformers" not in sys.modules:
        return []
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return []
    if not isinstance(model, PreTrainedModel):
        return []
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    converter_of = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = dict.fromkeys(names, True), model.base_model_prefix
    found: dict[str, Conversion] = {}
    for source in sorted(saved, key=dot_natural_key):  # experts in their order
        name, pattern = rename_source_key(source, renamings, converters, prefix, known)
        if name not in known and source in known:
            name, pattern = rename_source_key(source, [], [], prefix, known)
        if name not in known:
            continue
        conversion = found.setdefault(name, Conversion(name, None if pattern is None else converter_of[pattern]))
        conversion.sources.append((source, pattern))
    return list(found.values())
