"""Systems that train one model on one GPU inside a budget: each a function of the model and the settings that gives a step.

A step takes a batch of token ids and gives the loss; how the model is held is the system's. All train in fp32, with TF32 products
where the GPU has them, and AdamW.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Step = Callable[[torch.Tensor], torch.Tensor]


class MissingError(Exception):
    """A system cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What all systems are given. memory_bytes: of the GPU."""

    memory_bytes: int
    device: str
    disk: str | None
    host_memory: str | None


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _ordinary(model: Any, optimizer: Any) -> Step:
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
    return _ordinary(model, _adamw(model))


def checkpoint(model: Any, settings: Settings) -> Step:
    """Every block recomputed."""
    model = _checkpointed(model.to(settings.device))
    return _ordinary(model, _adamw(model))


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

    import protrain.blocks

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29501")
    dist.init_process_group("cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo", rank=0, world_size=1)
    mesh = init_device_mesh(settings.device, (1,))
    model = _checkpointed(model)
    policy = CPUOffloadPolicy(pin_memory=settings.device == "cuda")
    for _, block in protrain.blocks.find_blocks(model):
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(settings.device)
    return _ordinary(model, _adamw(model))


def protrain_(model: Any, settings: Settings, mode: str | None = None) -> Step:
    """protrain: the model begins on the CPU. mode: of each block; None: chosen by the plan."""
    import protrain
    from protrain.blocks import find_blocks

    modes = [mode] * len(find_blocks(model)) if mode else None
    with torch.device(settings.device):
        model, optimizer = protrain.wrap(
            model, _adamw(model), memory=settings.memory_bytes, host_memory=settings.host_memory, disk=settings.disk,
            block_modes=modes,
        )  # fmt: skip
    return _ordinary(model, optimizer)


def protrain_swap(model: Any, settings: Settings) -> Step:
    """The same, each block's activations on the host."""
    return protrain_(model, settings, "swap")


def deepspeed(model: Any, settings: Settings) -> Step:
    """ZeRO stage 3, parameters and optimizer on the host."""
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingError("deepspeed is not installed")
    import deepspeed as ds

    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = ds.initialize(model=_checkpointed(model), config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def colossalai(model: Any, settings: Settings) -> Step:
    """Gemini, its chunks on the host as it sees fit."""
    if importlib.util.find_spec("colossalai") is None:
        raise MissingError("colossalai is not installed")
    import colossalai as ca
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin
    from colossalai.nn.optimizer import HybridAdam

    ca.launch(rank=0, world_size=1, host="127.0.0.1", port=29502)
    booster = Booster(plugin=GeminiPlugin(placement_policy="auto", precision="fp32"))
    model = _checkpointed(model)
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-4))

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def megatron_core(_model: Any, _settings: Settings) -> Step:
    if importlib.util.find_spec("megatron") is None:
        raise MissingError("megatron-core is not installed")
    raise MissingError("megatron-core trains transformers of its own: not this model")


SYSTEMS: dict[str, Callable[[Any, Settings], Step]] = {
    "plain torch": plain,
    "all checkpointed": checkpoint,
    "save_on_cpu": save_on_cpu,
    "FSDP2 CPUOffloadPolicy": fsdp2_offload,
    "protrain": protrain_,
    "protrain, blocks swap": protrain_swap,
    "DeepSpeed ZeRO-3 offload": deepspeed,
    "ColossalAI Gemini": colossalai,
    "Megatron-core": megatron_core,
}
