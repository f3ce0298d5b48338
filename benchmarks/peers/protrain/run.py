"""protrain: the budget is the one knob."""

import torch
from peers.worker import Job, Step, serve, train_step

import protrain


def make(job: Job) -> Step:
    with torch.device("meta"):
        model = job.empty_model()
    optimizer = job.optimizer(model.parameters())
    model, optimizer = protrain.wrap(model, optimizer, memory=job.memory, disk=job.disk, weights=job.model_folder)
    return train_step(model, optimizer)


serve(make)
