"""Plain PyTorch; the bench runs it in a control group whose memory is the budget."""

from peers.worker import Job, Step, serve, train_step


def make(job: Job) -> Step:
    model = job.model()
    return train_step(model, job.optimizer(model.parameters()))


serve(make)
