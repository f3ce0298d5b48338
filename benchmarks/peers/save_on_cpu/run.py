"""torch.autograd.graph.save_on_cpu around the forward pass: what autograd saves is copied to host memory, and back."""

import torch
from peers.worker import Job, Step, loss_of, serve


def make(job: Job) -> Step:
    model = job.model()
    optimizer = job.optimizer(model.parameters())

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(**job.knobs):
            loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


serve(make)
