"""Plain PyTorch: everything in memory."""

import torch
from peers.worker import LEARNING_RATE, Job, Step, serve, train_step


def make(job: Job) -> Step:
    model = job.model()
    return train_step(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **job.knobs))


serve(make)
