"""torch.autograd.graph.save_on_cpu around the forward pass: what autograd saves is copied to host memory, and back."""

import torch
from peers.worker import Job, Step, serve, train_step


def make(job: Job) -> Step:
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    return train_step(model, optimizer, lambda: torch.autograd.graph.save_on_cpu(**job.knobs))


serve(make)
