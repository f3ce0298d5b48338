"""protrain: the budget, where the disk is, and the weights, which are read as the model on meta is wrapped."""

from typing import Any

import torch
from peers.worker import Job, Step, serve, train_step

import protrain

wrapped: list[Any] = []


def make(job: Job) -> Step:
    with torch.device("meta"):
        model = job.empty_model()
    optimizer = job.optimizer(model.parameters())
    model, optimizer = protrain.wrap(model, optimizer, memory=job.memory, disk=job.disk, weights=job.model_folder)
    wrapped.append(model)
    return train_step(model, optimizer)


serve(make, lambda: protrain.status(wrapped[0]).peak_memory_bytes)
