"""Saved tensors to disk in plain Python, as torch's tutorial on saved-tensor hooks does it: torch.save to a file of its own for
each tensor, removed with its last use. A setting may leave parameters where they are, and small tensors.
"""

import os
import uuid
from pathlib import Path
from typing import Any

import torch
from peers.worker import Job, Step, serve, train_step


class DiskTensor:
    """A file that goes with the object."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / str(uuid.uuid4())

    def __del__(self) -> None:
        os.remove(self.path)


def make(job: Job) -> Step:
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()} if job.knobs["skip_parameters"] else set()

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.numel() < job.knobs["least_elements"] or tensor.untyped_storage().data_ptr() in parameters:
            return tensor
        packed = DiskTensor(job.disk)
        torch.save(tensor, packed.path)
        return packed

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else torch.load(packed.path)

    return train_step(model, optimizer, lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))


serve(make)
