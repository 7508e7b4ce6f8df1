"""From a config's table of the model to the module: made by name, with the weights of a base from a
file, and with adapters beside its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.validation import name_and_params
from stratafl.core import flat_module
from stratafl.data.inputs import Shape
from stratafl.models.lora import adapters
from stratafl.models.registry import build

LORA = ("targets", "rank", "alpha", "train")
"""Keys of the table of adapters."""


def network(table: object, shape: Shape, outputs: int) -> Callable[[], nn.Module]:
    """What makes the module, called with all generators set from the run's seed."""
    name, params = name_and_params("model", table)
    params.pop("keep_at_home", None)  # which the run is told of: it is no part of the module
    base, lora = params.pop("base", None), _lora(params.pop("lora", None))

    def make() -> nn.Module:
        module = build(name, shape, outputs, **params)
        if base is not None:
            if not isinstance(base, str):
                raise InvalidInput("model.base", base, "must be the path of a .safetensors or .pt file")
            flat_module.load_weights(module, flat_module.read_state_dict(base, "model.base"), "model.base")
        return module if lora is None else adapters(module, **lora)

    return make


def _lora(given: object) -> dict[str, Any] | None:
    """The arguments of `adapters`."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidInput("model.lora", given, 'must be a table, such as { rank = 8, targets = ["q_proj"] }')
    for key in given:
        if key not in LORA:
            raise unknown_name("model.lora key", key, LORA)
    return {"targets": [], **given}
