"""Systems that train one model on one GPU inside a budget: each a function of the model and the settings that gives a step.

A step takes a batch of token ids and gives the loss; how the model is held is the system's. All train with AdamW, in fp32 with
TF32 products where the GPU has them; who can do no fp32 says so in its name.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peers.worker import one_process
from torch import nn

Step = Callable[[torch.Tensor], torch.Tensor]
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01


@dataclass(frozen=True)
class Settings:
    """What all systems are given. memory_bytes: of the GPU; batch: rows of each."""

    memory_bytes: int
    device: str
    disk: str | None
    host_memory: str | None
    batch: int


@dataclass(frozen=True)
class System:
    """make: of a model in ordinary memory, on `device` already, or on meta, which only some take.

    package: that must be installed; refused: why it is never measured; begins: where the parameters of a model lie best before
    it is made over ("device", "host" or "meta"); keeps_budget: itself, so that torch need not.
    """

    make: Callable[[Any, Settings], Step]
    begins: str = "device"
    package: str = ""
    refused: str = ""
    keeps_budget: bool = False

    def missing(self) -> str:
        """Why it cannot be measured here; empty where it can."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed" + (f"; {self.refused}" if self.refused else "")
        return self.refused


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def ordinary(model: Any, optimizer: Any) -> Step:
    """The ordinary loop's step, which drops its gradients and gives the loss without its graph."""

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _checkpointed(model: Any) -> Any:
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def plain(model: Any, settings: Settings) -> Step:
    model = model.to(settings.device)
    return ordinary(model, _adamw(model))


def checkpoint(model: Any, settings: Settings) -> Step:
    """Every block recomputed."""
    model = _checkpointed(model.to(settings.device))
    return ordinary(model, _adamw(model))


def save_on_cpu(model: Any, settings: Settings) -> Step:
    """Every saved activation in pinned host memory."""
    model = model.to(settings.device)
    optimizer = _adamw(model)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=settings.device == "cuda"):
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2_offload(model: Any, settings: Settings) -> Step:
    """FSDP2 with CPUOffloadPolicy: parameters, gradients and state on the host, blocks recomputed."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    import protrain.model.blocks

    if not dist.is_initialized():
        one_process()
        dist.init_process_group("cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo")
    mesh = init_device_mesh(settings.device, (1,))
    model = _checkpointed(model)
    policy = CPUOffloadPolicy(pin_memory=settings.device == "cuda")
    for _, block in protrain.model.blocks.find_blocks(model):
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(settings.device)
    return ordinary(model, _adamw(model))


def fill(module: nn.Module) -> None:
    """Values for a module's own parameters that nobody looks at: small, and no time to draw."""
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.01)


def protrain_(model: Any, settings: Settings, mode: str | None = None) -> Step:
    """protrain: the model begins on the CPU or on meta. mode: of each block; None: chosen by the plan."""
    import protrain
    from protrain.model.blocks import find_blocks

    modes = [mode] * len(find_blocks(model)) if mode else None
    on_meta = next(model.parameters()).device.type == "meta"
    with torch.device(settings.device):
        model, optimizer = protrain.wrap(
            model, _adamw(model), memory=settings.memory_bytes, host_memory=settings.host_memory, disk=settings.disk,
            block_modes=modes, param_init_fn=fill if on_meta else None,
        )  # fmt: skip
    return ordinary(model, optimizer)


def protrain_swap(model: Any, settings: Settings) -> Step:
    """The same, each block's activations on the host."""
    return protrain_(model, settings, "swap")


def deepspeed_configuration(settings: Settings) -> dict[str, Any]:
    """ZeRO stage 3, parameters and optimizer on the host."""
    offload = {"device": "cpu", "pin_memory": settings.device == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": settings.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # 1.0 where it is not given, and nobody else clips
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
    }


def deepspeed(model: Any, settings: Settings) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", settings.device)
    import deepspeed as ds

    if not torch.distributed.is_initialized():
        one_process()  # without it DeepSpeed asks MPI
        ds.init_distributed(dist_backend="nccl" if settings.device == "cuda" else "gloo")
    model = _checkpointed(model)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=deepspeed_configuration(settings))

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def colossalai(model: Any, settings: Settings) -> Step:
    """Gemini, its chunks on the host as it sees fit, over fp32 masters: it computes in fp16 or bf16 alone."""
    import colossalai as ca
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin
    from colossalai.nn.optimizer import HybridAdam

    if not torch.distributed.is_initialized():
        one_process()
        ca.launch(rank=0, world_size=1, host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]))
    booster = Booster(plugin=GeminiPlugin(placement_policy="auto", precision="bf16"))
    model = _checkpointed(model)
    optimizer = HybridAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    model, optimizer, *_ = booster.boost(model, optimizer)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def megatron_core(_model: Any, _settings: Settings) -> Step:
    raise NotImplementedError("never called: it is refused")


PLAIN = "plain torch"
SYSTEMS: dict[str, System] = {
    PLAIN: System(plain),
    "all checkpointed": System(checkpoint),
    "save_on_cpu": System(save_on_cpu),
    "FSDP2 CPUOffloadPolicy": System(fsdp2_offload, "host"),
    "protrain": System(protrain_, "meta", keeps_budget=True),
    "protrain, blocks swap": System(protrain_swap, "meta", keeps_budget=True),
    "DeepSpeed ZeRO-3 offload": System(deepspeed, "host", "deepspeed"),
    "ColossalAI Gemini (bf16)": System(colossalai, "host", "colossalai"),
    "Megatron-core": System(megatron_core, refused="it trains transformers of its own, not this model, so it is never measured"),
}
