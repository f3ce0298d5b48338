"""torch's own attention layers in eval mode: where no gradient is asked for, a layer is one operation on all of its parameters.

`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` look at the class of their parameters first, and run another path
where one has a `__torch_function__`, as parameters on disk have: that path rounds differently. `nn.TransformerEncoder` looks at
its first layer in the same way before it leaves out what is padding, whose outputs are zeros then. So a layer is called as what
is compiled is (running.py): its chunks are brought, and its parameters are plain ones until it returns; those of an encoder's
first layer from before the encoder looks at it on.

Where the path is not to be taken for any other reason, it is torch that says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .compiled import find_compiled

_LAYERS = {nn.MultiheadAttention.forward, nn.TransformerEncoderLayer.forward}


def _not_compiled(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are not compiled, nor inside of one that is."""
    inside = {id(inner) for _, module in find_compiled(model) for inner in module.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def find_fused(model: nn.Module) -> list[nn.Module]:
    """Layers that torch may run as one operation, those inside of others too, each once."""
    return [module for module in _not_compiled(model) if type(module).forward in _LAYERS]


def find_encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    """The encoders whose forward is torch's own, each once."""
    encoders = (module for module in _not_compiled(model) if isinstance(module, nn.TransformerEncoder))
    return [module for module in encoders if type(module).forward is nn.TransformerEncoder.forward]


def runs_fused(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing but the class of its parameters would keep torch from running this layer as one operation."""
    if layer.training:
        return False
    inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*inputs, *layer.parameters()))


def leaves_padding_out(encoder: nn.TransformerEncoder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing but the class of parameters would keep it from that in this call."""
    padding = args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")
    return padding is not None and runs_fused(encoder.layers[0], args, kwargs)
