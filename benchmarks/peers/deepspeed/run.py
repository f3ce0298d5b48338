"""DeepSpeed ZeRO on its CPU accelerator, in a world of one process, with its own Adam; knobs are keys of its configuration.

Dotted knobs lie deeper, as "offload_param.device"; "largest parameter" becomes the elements of the model's largest one, which the
buffers that read parameters must hold; `checkpoint` is transformers' switch, not DeepSpeed's. Models whose parameters go to disk
are made inside of zero.Init, as its documentation has it for models that fit no memory.
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


def largest_parameter(job: Job) -> int:
    """Its elements."""
    with torch.device("meta"):
        return max(p.numel() for p in job.empty_model().parameters())


def model_in_parts(job: Job, settings: dict[str, Any]) -> Any:
    """Each parameter is whole while it gets its value. Where a whole model is handed over instead, DeepSpeed 0.19 makes fp32
    parameters bf16 on a CPU without fp16, and its forward fails."""
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = job.empty_model()
    for parameter, value in job.weights(model):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(value)
    return model


def make(job: Job) -> Step:
    one_process()
    deepspeed.init_distributed(dist_backend="gloo")
    settings = configuration(job, largest_parameter(job))
    print(json.dumps(settings))
    in_parts = job.knobs.get("offload_param.device") == "nvme"
    model = model_in_parts(job, settings) if in_parts else job.model()
    if job.knobs.get("checkpoint"):
        how = {"use_reentrant": job.knobs["checkpoint"] == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


serve(make)
