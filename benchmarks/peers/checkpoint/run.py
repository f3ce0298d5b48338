"""Every block checkpointed by torch.utils.checkpoint, through transformers' own switch."""

from peers.worker import Job, Step, serve, train_step


def make(job: Job) -> Step:
    model = job.model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=job.knobs)
    return train_step(model, job.optimizer(model.parameters()))


serve(make)
