"""Low-rank adapters (LoRA): trained factors beside frozen linear layers.

W x becomes W x + alpha / rank * B A x (Hu et al., 2021). A is random and B is zero at first, so new
adapters do not change a module's outputs. Only A and B, and the parameters named by `train`, need a
gradient: clients train, send and store only these.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import check_integer, check_number, is_within, last_parts, matching


class LowRank(nn.Module):
    """Frozen linear layer with a low-rank adapter."""

    def __init__(self, base_layer: nn.Module, rank: int, alpha: float):
        super().__init__()
        weight = _weight(base_layer)
        outputs, inputs = reversed(weight.shape) if _is_transposed(base_layer) else weight.shape
        self.base_layer = base_layer
        self.lora_A = nn.Linear(inputs, rank, bias=False, device=weight.device, dtype=weight.dtype)
        self.lora_B = nn.Linear(rank, outputs, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.lora_B.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scale

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """Plain layer with the same outputs."""
        layer = copy.deepcopy(self.base_layer)
        change = self.lora_B.weight @ self.lora_A.weight * self.scale
        _weight(layer).add_(change.T if _is_transposed(layer) else change)
        return layer


def adapters(
    module: nn.Module, targets: Sequence[str], rank: int = 8, alpha: float = 16.0, train: Sequence[str] = ()
) -> nn.Module:
    """Add adapters to the linear layers of these names, and freeze all other parameters.

    The module is changed in place and returned. For a module that `simulate` builds from its seed,
    pass `lambda: adapters(make(), ["q_proj", "v_proj"])`.

    targets: last parts of the layers' dotted names ("q_proj"), full names, or patterns
        ("encoder.*.q_proj"). Layers are `nn.Linear`, or the `Conv1D` of transformers.
    rank, alpha: rank of the adapters, and their scale times the rank.
    train: names or patterns of modules or parameters that are trained in full, such as a new
        head.
    """
    rank = check_integer("lora.rank", rank, at_least=1)
    alpha = check_number("lora.alpha", alpha, above=0)
    layers = {name: part for name, part in module.named_modules() if name and _is_linear(part)}
    chosen = matching("lora.targets", targets, layers)
    if not chosen:
        allowed = "must name at least one linear layer; this model has " + ", ".join(sorted(last_parts(layers)))
        raise InvalidInput("lora.targets", list(targets), allowed)
    # adapters change the names, so parameters are looked up by name before
    parameters = dict(module.named_parameters())
    parts = [name for name, _ in module.named_modules() if name]
    unfrozen = matching("lora.train", train, [*parts, *parameters])
    module.requires_grad_(False)
    wrapped = {id(layers[name]): LowRank(layers[name], rank, alpha) for name in chosen}
    for parent in list(module.modules()):
        for name, part in _all_children(parent):
            if id(part) in wrapped and not isinstance(parent, LowRank):
                setattr(parent, name, wrapped[id(part)])
                _keep_to_forward(parent)
    for name, parameter in parameters.items():
        if is_within(name, unfrozen):
            parameter.requires_grad_(True)
    return module


def merged(module: nn.Module) -> nn.Module:
    """Copy a module with its adapters added to the weights.

    The copy is a plain module with the original names and shapes.
    """
    if isinstance(module, LowRank):
        return module.merged()
    merged_module = copy.deepcopy(module)
    plain: dict[int, nn.Module] = {}
    for parent in list(merged_module.modules()):
        for name, part in _all_children(parent):
            if isinstance(part, LowRank):
                setattr(parent, name, plain.setdefault(id(part), part.merged()))
    return merged_module


def _all_children(parent: nn.Module) -> list[tuple[str, nn.Module | None]]:
    """Submodules by name, also those that the parent has under an earlier name, which
    `named_children` leaves out."""
    return list(parent._modules.items())


def _keep_to_forward(parent: nn.Module) -> None:
    """Make a transformer encoder layer call its submodules.

    In evaluation, PyTorch's fast path reads the weights of the submodules instead of calling them,
    which would ignore adapters.
    """
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0  # turns the fast path off


def _is_linear(part: nn.Module) -> bool:
    """Whether a module is a linear layer that can be wrapped.

    Subclasses are not, since they may use their weights in other ways.
    """
    return type(part) is nn.Linear or _is_transposed(part)


def _is_transposed(part: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, whose weight has the shape (inputs, outputs)."""
    kind = type(part)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight
