"""FSDP2, fully_shard, of each block and the model, with CPUOffloadPolicy, in a world of one process."""

import torch
from peers.worker import Job, Step, one_process, serve, train_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def make(job: Job) -> Step:
    one_process()
    torch.distributed.init_process_group("gloo")
    model = job.model()
    if job.knobs["checkpoint"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shared = {
        "mesh": init_device_mesh("cpu", (1,)),
        "reshard_after_forward": job.knobs["reshard_after_forward"],
        "offload_policy": CPUOffloadPolicy(pin_memory=job.knobs["pin_memory"]),
    }
    for block in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
        fully_shard(block, **shared)
    fully_shard(model, **shared)
    return train_step(model, job.optimizer(model.parameters()))


serve(make)
