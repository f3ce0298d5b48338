"""DeepSpeed ZeRO on its CPU accelerator, in a world of one process, with its own Adam; knobs are keys of its configuration.

Dotted knobs lie deeper, as "offload_param.device"; "largest parameter" becomes the elements of the model's largest one, which the
buffers that read parameters must hold; `checkpoint` is transformers' switch, not DeepSpeed's.
"""

import json
from typing import Any

import deepspeed
import torch
from peers.worker import LEARNING_RATE, Job, Step, loss_of, one_process, serve

NOT_ZERO = ("aio", "checkpoint")


def configuration(job: Job, largest: int) -> dict[str, Any]:
    """DeepSpeed's. Args: largest, elements of the largest parameter."""
    zero: dict[str, Any] = {}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,  # 1.0 where it is not given, and nobody else clips
        "zero_optimization": zero,
    }
    for name, value in job.knobs.items():
        *folders, last = name.split(".")
        if folders[:1] == ["aio"]:
            place = found.setdefault("aio", {})
        elif name in NOT_ZERO:
            continue
        else:
            place = zero
            for folder in folders:
                place = place.setdefault(folder, {})
        place[last] = largest if value == "largest parameter" else value
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device") == "nvme":
            zero[key]["nvme_path"] = job.disk
    return found


def make(job: Job) -> Step:
    one_process()
    deepspeed.init_distributed(dist_backend="gloo")
    model = job.model()
    if job.knobs.get("checkpoint"):
        how = {"use_reentrant": job.knobs["checkpoint"] == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    settings = configuration(job, max(p.numel() for p in model.parameters()))
    print(json.dumps(settings))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


serve(make)
