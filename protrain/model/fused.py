"""torch's own attention layers in eval mode: where no gradient is asked for, a layer is one operation on all of its parameters.

`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` look at the class of their parameters first, and run another path
where one has a `__torch_function__`, as parameters on disk have: that path rounds differently. `nn.TransformerEncoder` looks at
its first layer in the same way before it leaves out what is padding, whose outputs are zeros then. So a layer is called as what
is compiled is (running.py): its chunks are brought, and its parameters are plain ones until it returns; those of an encoder's
first layer from before the encoder looks at it on.

Where the path is not to be taken for any other reason, it is torch that says so.

Recurrent layers are one operation in forward always, which needs no help, but room for all of its chunks at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .compiled import find_compiled


def _not_compiled(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are not compiled, nor inside of one that is."""
    inside = {id(inner) for _, module in find_compiled(model) for inner in module.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def find_fused(model: nn.Module) -> list[nn.Module]:
    """Layers that torch may run as one operation, those inside of others too, each once."""
    return [module for module in _not_compiled(model) if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer)]


def find_recurrent(model: nn.Module) -> list[nn.Module]:
    """Layers whose forward is one operation with the parameters of all of their own layers, each once; the backward of each of
    those is a node of its own."""
    return [module for module in _not_compiled(model) if isinstance(module, nn.RNNBase)]


def find_encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    """torch's encoders of such layers, each once."""
    return [module for module in _not_compiled(model) if isinstance(module, nn.TransformerEncoder) and len(module.layers) > 0]


def _may_ask_for_gradients(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether anything in it may: what it is given, a parameter, a hook, an activation of the user's."""
    inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return (
        any(tensor.requires_grad for tensor in (*inputs, *layer.parameters()))
        or any(inner._forward_hooks or inner._forward_pre_hooks for inner in layer.modules())
        or getattr(layer, "activation_relu_or_gelu", 1) == 0
    )


def runs_fused(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing but the class of its parameters would keep torch from running this layer as one operation, or autograd
    records nothing of it all the same."""
    return not layer.training and (not torch.is_grad_enabled() or not _may_ask_for_gradients(layer, args, kwargs))
