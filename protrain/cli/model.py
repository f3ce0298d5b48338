"""How a model comes to be, without ever being whole in memory.

A name or a folder gives a config; the model is built with its parameters on meta, its buffers computed. `Initializer` then
gives each module's own parameters the values that transformers would: it calls the model's `_init_weights` for the module
and for every module around it (GPT-2 scales the projections of a block from the block's attention and MLP), while all
tensors but the module's own are marked as done. Every module has random numbers of its own, seeded by its place in the
model, so that values depend on nothing but the seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain.cli.words import CommandError, size_text

#: Of a config, under transformers' common names: a sequence has a token and one to foretell.
_LEAST_SIZES = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 2,
}
_FLAG = "_is_hf_initialized"  # by which transformers' own init functions leave a tensor alone


def shipped_names() -> list[str]:
    """The names that --model knows."""
    folder = resources.files("protrain") / "configs"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_config(name: str) -> tuple[Any, Path | None]:
    """The transformers config of a shipped name or a folder, of a causal language model, and the folder. Raises CommandError."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CommandError(
                f"the folder {name!r} has no config.json; give a folder with one, or one of {', '.join(shipped_names())}"
            )
        return _from_folder(folder), folder
    if name not in shipped_names():
        raise CommandError(f"no model {name!r}; give a folder with config.json, or one of {', '.join(shipped_names())}")
    from transformers import AutoConfig

    values = json.loads((resources.files("protrain") / "configs" / f"{name}.json").read_text())
    return AutoConfig.for_model(**values), None


def _from_folder(folder: Path) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a config it cannot read
        raise CommandError(f"cannot read {str(folder / 'config.json')!r}: {' '.join(str(error).split())[:300]}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        where, kind = str(folder / "config.json"), config.model_type
        raise CommandError(f"{where!r} is of the type {kind!r}, which is no causal language model; give one that is")
    _check_sizes(folder, config)
    return config


def _check_sizes(folder: Path, config: Any) -> None:
    """Whether sizes that every model has can be those of one; transformers looks at their types alone. Raises CommandError."""
    for name, least in _LEAST_SIZES.items():
        size = getattr(config, name, None)
        if not isinstance(size, int) or size >= least or (name == "max_position_embeddings" and size == -1):  # -1: no limit
            continue
        key = config.attribute_map.get(name, name)
        raise CommandError(f"{str(folder / 'config.json')!r} says {key} {size}; give a whole number of at least {least}")


def has_weights(folder: Path | None) -> bool:
    """Whether a folder holds safetensors to start from. Raises CommandError where it holds weights only in another format."""
    if folder is None:
        return False
    if any(folder.glob("*.safetensors")):
        return True
    other = sorted(file.name for pattern in ("pytorch_model*.bin", "*.h5", "*.msgpack") for file in folder.glob(pattern))
    if other:
        raise CommandError(
            f"the weights in {str(folder)!r} are in {other[0]}; only safetensors can be read tensor by tensor, convert them first"
        )
    return False


def longest_sequence(config: Any) -> int | None:
    """The longest sequence a model takes, in tokens; None where it sets no limit."""
    value = getattr(config, "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None


def check_tokens(batch: int, seq: int, options: str) -> None:
    """Raises CommandError where the tokens of a batch alone are more than is free here. options: that say how many they are."""
    from protrain.base.sizes import default_memory_bytes

    free_bytes, size_bytes = default_memory_bytes(), batch * seq * 8
    if size_bytes > free_bytes:
        raise CommandError(
            f"{options}: the tokens alone take {size_text(size_bytes)}, and {size_text(free_bytes)} are free here; give less of "
            "them"
        )


def check_sequence(config: Any, seq: int) -> None:
    """Raises CommandError where the model takes no sequence of so many tokens."""
    longest = longest_sequence(config)
    if longest is not None and seq > longest:
        raise CommandError(
            f"--seq {seq} is longer than the model's longest sequence of {longest} tokens; give at most --seq {longest}"
        )


def check_batch(config: Any, batch: int, seq: int) -> None:
    """Raises CommandError where the model takes no such batch, or there is no room for its tokens."""
    check_sequence(config, seq)
    check_tokens(batch, seq, f"--batch {batch}, --seq {seq}")


def build(config: Any) -> nn.Module:
    """A causal language model in training mode, fp32, parameters on meta, buffers computed. Raises CommandError."""
    from transformers import AutoModelForCausalLM
    from transformers import initialization as init

    try:
        with ExitStack() as stack:
            stack.enter_context(torch.device("meta"))
            if safe := getattr(init, "meta_device_safe_creation_ops", None):
                stack.enter_context(safe())
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # models raise many kinds for values that their config takes
        raise CommandError(
            f"no model of the type {config.model_type!r} can be made from its config.json: "
            f"{'' if isinstance(error, ValueError) else f'{type(error).__name__}: '}{' '.join(str(error).split())[:200]}; "
            "put what it says right"
        ) from error
    for name, param in model.named_parameters():
        if param.numel() == 0:
            raise CommandError(
                f"the config.json of this {config.model_type!r} gives {name} the shape {list(param.shape)}, which holds nothing; "
                "put its sizes right"
            )
    for module, around in _with_modules_around(model):
        _compute_buffers(module, around)
    return model.train()


def _with_modules_around(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Each module with the modules it lies in, itself first, the model last."""
    by_name = dict(model.named_modules())
    for name, module in by_name.items():
        parts = name.split(".") if name else []
        yield module, [by_name[".".join(parts[:length])] for length in range(len(parts), -1, -1)]


def _owner(around: list[nn.Module]) -> Any:
    """The nearest transformers model, which knows how its modules are initialised."""
    for module in around:
        if hasattr(module, "_init_weights"):
            return module
    raise CommandError(
        f"{type(around[-1]).__name__} does not say how its weights are initialised; give a folder with safetensors"
    )


@contextmanager
def _done(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Inside, transformers' init functions leave these tensors as they are."""
    for tensor in tensors:
        setattr(tensor, _FLAG, True)
    try:
        yield
    finally:
        for tensor in tensors:
            if hasattr(tensor, _FLAG):
                delattr(tensor, _FLAG)


def _compute_buffers(module: nn.Module, around: list[nn.Module]) -> None:
    """Give a module's buffers that are on meta their values, as transformers does when it loads a model."""
    names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.device.type == "meta"]
    if not names:
        return

    def computed(mark: int) -> list[Any]:
        """What they are when they were NaN, or this where a type has none, before."""
        for name in names:
            buffer = torch.empty_like(module._buffers[name], device="cpu")  # type: ignore[arg-type]
            module._buffers[name] = buffer.fill_(float("nan") if buffer.is_floating_point() else mark)
        with torch.no_grad(), _done(list(around[-1].parameters())):
            _owner(around)._init_weights(module)
        return [module._buffers[name] for name in names]

    for name, one, other in zip(names, computed(0), computed(1), strict=True):
        if bool(torch.isnan(other).any()) if other.is_floating_point() else not torch.equal(one, other):
            raise CommandError(
                f"the buffer {name!r} of {type(module).__name__} cannot be computed without its model's weights; "
                "this type of model is not supported"
            )


class Initializer:
    """`param_init_fn` of protrain.wrap: called with each module whose own parameters have just been made."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        """Args: model, on meta; seed, of all random values."""
        self._seed = seed
        self._place: dict[nn.Module, tuple[int, list[nn.Module], list[str]]] = {}
        seen: set[int] = set()
        for index, (module, around) in enumerate(_with_modules_around(model)):
            # A tied parameter belongs to the first module that has it.
            names = [
                name for name, parameter in module._parameters.items() if parameter is not None and id(parameter) not in seen
            ]
            seen.update(id(module._parameters[name]) for name in names)
            self._place[module] = index, around, names

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Fill the module's own parameters in place. The random state of torch stays as it is. Raises CommandError."""
        index, around, names = self._place[module]
        if not names:
            return
        own = [module._parameters[name] for name in names]
        for parameter in own:
            parameter.fill_(float("nan"))  # type: ignore[union-attr]
        owned = {id(parameter) for parameter in own}
        others = [tensor for tensor in around[-1].parameters() if id(tensor) not in owned] + list(around[-1].buffers())
        with torch.random.fork_rng(devices=[]), _done(others):
            torch.manual_seed((self._seed * 1_000_003 + index) % (1 << 63))
            for place, outer in enumerate(around):
                _owner(around[place:])._init_weights(outer)
        for name, parameter in zip(names, own, strict=True):
            if bool(torch.isnan(parameter).any()):  # type: ignore[arg-type]
                raise CommandError(
                    f"{type(around[-1]).__name__} does not say how {name!r} of {type(module).__name__} is initialised; "
                    "give a folder with safetensors"
                )
