"""The weights of a wrapped model in the Trainer's files, written without a full copy of them in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..model.held import persistent_buffers
from ..session import Session
from ..state.tensorfiles import entries, write_tensors


def has_adapters(model: nn.Module) -> bool:
    """Whether saving it means saving its adapters alone."""
    return getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")


def has_original_form(model: nn.Module) -> bool:
    """Whether the model's files hold its parameters one by one, under their names: some models are saved in another form."""
    if not hasattr(model, "save_pretrained"):
        return True
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return True
    names = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries(model)}
    saved = revert_weight_conversion(model, dict(names))
    return len(saved) == len(names) and all(saved.get(name) is t for name, t in names.items())


def write_weights(session: Session, folder: Path) -> None:
    """Write the model's safetensors, tensor by tensor, over those that were in the folder; what others put beside them, as an
    average of the weights, stays.

    Raises:
        DiskError, OSError: the folder cannot be written.
        StepError: the last load failed half-way.
    """
    session.values.loads.check("saving")
    ignored = set(getattr(session.model, "_keys_to_ignore_on_save", None) or ())
    for old in list(folder.iterdir()):
        if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json", old.name):
            old.unlink()
    write_tensors(
        folder,
        [entry for entry in entries(session.model) if entry.name not in ignored],
        ((name, tensor) for name, tensor in session.states.tensors() if name not in ignored),
    )


def adapter_state(session: Session) -> dict[str, torch.Tensor]:
    """The entries of the model's state dict that adapters are made of, and the embeddings, which peft may save with them."""
    model: Any = session.model
    config: Any = model.peft_config
    adapters = set(config)
    embeddings = {
        id(p)
        for get in ("get_input_embeddings", "get_output_embeddings")
        for p in ((getattr(model, get)() if hasattr(model, get) else None) or nn.Module()).parameters()
    }
    index = session.wrapped.number_of
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, p in module._parameters.items():
            name = f"{prefix}.{leaf}" if prefix else leaf
            if p is not None and (p.requires_grad or id(p) in embeddings or adapters & set(name.split("."))):
                found[name] = session.values.get(index[id(p)])
        for leaf, buffer in persistent_buffers(module).items():
            found[f"{prefix}.{leaf}" if prefix else leaf] = buffer.detach().clone()
    return found
