"""A PyTorch module as two flat vectors: its trainable parameters and its floating buffers.

Shape suffixes: P parameters, B buffer values.
"""

from __future__ import annotations

import copy
import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stratafl.base.errors import InvalidInput, MissingExtra, convert_errors, describe_exception, unknown_name
from stratafl.base.rng import Stream, derive_seed, seeded_rng
from stratafl.core.losses import Loss, check_loss_value
from stratafl.data.inputs import Inputs, as_tensor, call_arguments, unusable_because

FROZEN = "frozen weights"


class FlatModule:
    """A copy of a module, whose trainable parameters and floating buffers are read from rows."""

    def __init__(self, module: nn.Module):
        if not isinstance(module, nn.Module):
            raise InvalidInput("model", module, "must be an nn.Module or a function that builds one")
        kind = type(module).__name__
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise InvalidInput(
                "model", kind, "is compiled by torch.jit, and its weights are its own: give it as it was"
            )
        if any(is_lazy(p) for p in module.parameters()):
            raise InvalidInput("model", kind, "run it once so that its lazy layers have shapes")
        try:
            self.module = copy_module(module)
        except Exception as problem:
            raise InvalidInput("model", kind, f"cannot be copied: {describe_exception(problem)}") from problem
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if not parameters:
            raise InvalidInput("model", kind, "has no trainable parameters")
        buffers = {n: b for n, b in self.module.named_buffers() if b.is_floating_point()}
        dtypes = {t.dtype for t in [*parameters.values(), *buffers.values()]}
        if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
            raise InvalidInput("model", sorted(map(str, dtypes)), "parameters and buffers must share one floating type")
        self.dtype: torch.dtype = dtypes.pop()
        self._shapes = {n: p.shape for n, p in parameters.items()}
        self._buffer_shapes = {n: b.shape for n, b in buffers.items()}
        self.parameters = sum(p.numel() for p in parameters.values())
        self.buffers = sum(b.numel() for b in buffers.values())
        modes = {name: part.training for name, part in self.module.named_modules()}
        self._eval_submodules = (
            [name for name, training in modes.items() if not training] if any(modes.values()) else []
        )
        self._working: _ModuleOnRow | None = None
        self.written: set[str] = set()
        """What the last call wrote to, even if no value changed: "weights", if it replaced their
        memory, and "buffers"."""
        self.source_module = weakref.ref(module)
        """The user's module, as long as it exists."""

    def train(self) -> None:
        """Set training mode, except for submodules that the user put into evaluation mode.

        If all of the module was in evaluation mode, as libraries return pretrained models, all of
        it is trained.
        """
        self.module.train()
        for name in self._eval_submodules:
            self.module.get_submodule(name).training = False

    def eval(self) -> None:
        """Set evaluation mode."""
        self.module.eval()

    def flatten_module(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """The rows of a module of the same architecture."""
        return self._flatten(_tensors(module))

    def load_initial(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of a state dict; its frozen parameters and integer buffers are copied into the
        module.

        A tied parameter may have any of its names. Non-persistent buffers may be missing.
        """
        tensors, values = _tensors(self.module), _first_names_only(self.module, values, "model.initial")
        defaults = {name: tensors[name] for name in _non_persistent(self.module) if name in self._buffer_shapes}
        complete = {**defaults, **values}
        for name in (*self._shapes, *self._buffer_shapes):
            if name not in complete:
                raise InvalidInput("model.initial", sorted(complete), f"lacks {name!r}")
        with torch.no_grad():
            for name in values.keys() - self._shapes.keys() - self._buffer_shapes.keys():
                tensors[name].copy_(values[name])
        return self._flatten(complete)

    def _flatten(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        def joined(shapes: Mapping[str, torch.Size]) -> Tensor:
            parts = [values[name].detach().reshape(-1).to(self.dtype) for name in shapes]
            return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

        return joined(self._shapes), joined(self._buffer_shapes)

    def unflatten(self, x_P: Tensor, b_B: Tensor) -> dict[str, Tensor]:
        """Views of the rows by the module's names; of matrices of rows, with a leading axis of
        clients."""
        return {**_views(self._shapes, x_P), **self.unflatten_buffers(b_B)}

    def unflatten_buffers(self, b_B: Tensor) -> dict[str, Tensor]:
        """Views of a row of buffers by the module's names."""
        return _views(self._buffer_shapes, b_B)

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of the row."""
        return list(self._shapes)

    def integer_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that are not in a row, such as batch norm's counter, masks and
        codes."""
        return {n: b.clone() for n, b in self.module.named_buffers() if n not in self._buffer_shapes}

    def call(self, x_P: Tensor, b_B: Tensor, inputs: Inputs) -> Any:
        """Output of the module with these rows; buffers that the module updates change in `b_B`."""
        x_P = x_P.clone()
        working = self._module_on(x_P, b_B, None)
        outputs = call_module(working.module, inputs)
        self.written = working.store(x_P, b_B, None)
        return outputs

    def gradient(
        self,
        x_P: Tensor,
        b_B: Tensor,
        inputs: Inputs,
        targets: Tensor,
        loss: Loss,
        integers: Mapping[str, Tensor] | None = None,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
        forward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Tensor:
        """Gradient of the loss at these rows by `loss.backward()`; zero for parameters that do not
        affect the loss. Changes that the module itself makes are written to `x_P`, `b_B` and
        `integers`.

        within: context for the forward and the backward pass; forward: context for the forward pass
        alone, such as autocast.
        """
        working = self._module_on(x_P, b_B, integers)
        with torch.enable_grad(), within():
            with forward():
                value = loss(call_module(working.module, inputs), targets)
            # before `store`, since activation checkpointing calls the module again in the backward
            # pass
            check_loss_value(loss, value).backward()
        self.written = working.store(x_P, b_B, integers)
        return working.gradients()

    def _module_on(self, x_P: Tensor, b_B: Tensor, integers: Mapping[str, Tensor] | None) -> _ModuleOnRow:
        """The working copy of the module with these values, in the same mode as `module`."""
        if self._working is None or self._working.device != x_P.device:
            self._working = _ModuleOnRow(self.module, self._shapes, self._buffer_shapes, x_P)
        self._working.load(x_P, b_B, self.integer_buffers() if integers is None else integers)
        for part, original in zip(self._working.parts, self.module.modules(), strict=True):
            part.training = original.training
        return self._working

    def owner_of_memory(self, tensor: Tensor) -> str | None:
        """Owner of a tensor's memory during a call: "weights", "buffers", "frozen weights" or
        None."""
        return None if self._working is None else self._working.owner_of_memory(tensor)

    def build(self, x_P: Tensor, b_B: Tensor) -> nn.Module:
        """A new module with these values, in evaluation mode."""
        module = copy_module(self.module)
        tensors = _tensors(module)
        with torch.no_grad():
            for name, view in self.unflatten(x_P, b_B).items():
                tensors[name].copy_(view)
        return module.eval()


class _ModuleOnRow:
    """A copy of a module whose parameters are views of a row.

    Since they are ordinary parameters, the module may do all that it may in plain PyTorch, such as
    activation checkpointing, keeping parameters in lists, replacing buffers, and changing weights
    in place.
    """

    def __init__(
        self,
        module: nn.Module,
        shapes: Mapping[str, torch.Size],
        buffer_shapes: Mapping[str, torch.Size],
        like_P: Tensor,
    ):
        frozen = [p for name, p in module.named_parameters() if name not in shapes]
        self.module, self.device = copy_module(module, shared=frozen), like_P.device
        self._frozen = frozen
        self.parts = list(self.module.modules())
        forwards = (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)
        recurrent = [part for part in self.parts if isinstance(part, nn.RNNBase) and type(part).forward in forwards]
        self._recurrent = recurrent if like_P.is_cuda else []
        parameters = dict(self.module.named_parameters())
        self._shapes, self._parameters = shapes, [parameters[name] for name in shapes]
        self._b_B = like_P.new_empty(sum(shape.numel() for shape in buffer_shapes.values()))
        views, first = _views(buffer_shapes, self._b_B), _first_names(self.module)
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._integers: list[tuple[nn.Module, str, str]] = []
        for name, _ in self.module.named_buffers(remove_duplicate=False):
            path, _, attribute = name.rpartition(".")
            part = self.module.get_submodule(path)
            if first[name] in views:
                self._buffers.append((part, attribute, views[first[name]]))
            else:
                self._integers.append((part, attribute, first[name]))

    def load(self, x_P: Tensor, b_B: Tensor, integers: Mapping[str, Tensor]) -> None:
        """Point the parameters to `x_P`, and copy the buffers."""
        for parameter, view in zip(self._parameters, _views(self._shapes, x_P.detach()).values(), strict=True):
            # `torch.view_as_complex` needs an even offset
            parameter.data = view.clone() if view.storage_offset() % 2 else view
            parameter.grad = None
        for layer in self._recurrent:
            layer.flatten_parameters()  # cuDNN needs the weights in one block, in its own order
        if len(self._b_B):
            self._b_B.copy_(b_B)
        self._version = self._b_B._version
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        for part, attribute, view in self._buffers:
            part._buffers[attribute] = view
        self._copies = {name: integers[name].clone() for _, _, name in self._integers}
        for part, attribute, name in self._integers:
            part._buffers[attribute] = self._copies[name]

    def store(self, x_P: Tensor, b_B: Tensor, integers: Mapping[str, Tensor] | None) -> set[str]:
        """Copy values that the module replaced or changed into the rows and `integers`; returns
        "weights" if their memory was replaced, and "buffers" if they were written to."""
        written = set()
        if self._addresses != [parameter.data_ptr() for parameter in self._parameters]:
            written.add("weights")
        if self._b_B._version != self._version:
            written.add("buffers")
        with torch.no_grad():
            for parameter, view in zip(self._parameters, _views(self._shapes, x_P).values(), strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter)
            for part, attribute, view in self._buffers:
                buffer = part._buffers[attribute]
                if buffer is not None and buffer is not view:
                    view.copy_(buffer)
                    written.add("buffers")
            if len(self._b_B):
                b_B.copy_(self._b_B)
            for part, attribute, name in self._integers:
                buffer = part._buffers[attribute]
                if buffer is None:
                    continue
                if buffer is not self._copies[name] or buffer._version != 0:
                    written.add("buffers")
                if integers is not None:
                    integers[name].copy_(buffer)
        return written

    def owner_of_memory(self, tensor: Tensor) -> str | None:
        """Owner of a tensor's memory: "weights", "buffers", "frozen weights" or None."""
        address = tensor.untyped_storage().data_ptr()
        buffers = [self._b_B, *self._copies.values()]
        for name, tensors in (("weights", self._parameters), ("buffers", buffers), (FROZEN, self._frozen)):
            if address and any(address == other.untyped_storage().data_ptr() for other in tensors):
                return name
        return None

    def gradients(self) -> Tensor:
        """The gradients of the last backward pass as a row; clears them."""
        parts = []
        for parameter in self._parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append((gradient if gradient.layout == torch.strided else gradient.to_dense()).reshape(-1))
            parameter.grad = None
        return torch.cat(parts)


def call_module(module: nn.Module, inputs: Inputs) -> Any:
    """Call a module with one tensor, or with several as keywords."""
    positional, keywords = call_arguments(inputs)
    return module(*positional, **keywords)


def copy_module(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Deep copy of a module that keeps the `shared` tensors.

    Unlike `copy.deepcopy`, it copies attributes computed from parameters (as the older
    `weight_norm` has them), without their autograd history, and hooks on parameters.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in shared}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    copied = copy.deepcopy(module, memo)
    for old, new in zip(module.parameters(), copied.parameters(), strict=True):
        if new is not old:
            for hook in (old._backward_hooks or {}).values():
                new.register_hook(hook)
            for hook in (old._post_accumulate_grad_hooks or {}).values():
                new.register_post_accumulate_grad_hook(hook)
    return copied


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first name of every tensor, by all its names; tied parameters have several."""
    first: dict[int, str] = {}
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for pairs in named for name, tensor in pairs}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their first names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _first_names_only(module: nn.Module, values: Mapping[str, Tensor], field: str) -> dict[str, Tensor]:
    """A state dict's values by the first names of the module's tensors; raises if they do not
    fit."""
    first, tensors = _first_names(module), _tensors(module)
    renamed: dict[str, Tensor] = {}
    for name, value in values.items():
        if name not in first:
            raise unknown_name(f"{field} key", name, first)
        shape = tensors[first[name]].shape
        if value.shape != shape:
            raise InvalidInput(f"{field}.{name}", tuple(value.shape), f"must have the shape {tuple(shape)}")
        other = renamed.setdefault(first[name], value)
        if other is not value and not equal_with_nan(other, value):
            raise InvalidInput(f"{field}.{name}", "other values", f"is the same tensor as {first[name]!r}")
    return renamed


def load_weights(module: nn.Module, values: Mapping[str, Tensor], field: str) -> None:
    """Copy a complete state dict into a module; a tied parameter may have any of its names."""
    renamed, optional = _first_names_only(module, values, field), set(_non_persistent(module))
    with torch.no_grad():
        for name, tensor in _tensors(module).items():
            if name in renamed:
                tensor.copy_(renamed[name])
            elif name not in optional:
                raise InvalidInput(field, sorted(values), f"lacks {name!r}")


def _non_persistent(module: nn.Module) -> Iterator[str]:
    """Names of the buffers that are not in a state dict."""
    for path, part in module.named_modules():
        for name in part._non_persistent_buffers_set:
            yield f"{path}.{name}" if path else name


def equal_with_nan(a: Tensor, b: Tensor) -> bool:
    """Whether all values are equal, where NaN is equal to NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _views(shapes: Mapping[str, torch.Size], row: Tensor) -> dict[str, Tensor]:
    if not shapes:
        return {}
    parts = row.split([shape.numel() for shape in shapes.values()], dim=-1)
    clients = row.shape[:-1]
    return {name: part.view(clients + shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def initial_rows(flat: FlatModule, initial: object) -> tuple[Tensor, Tensor]:
    """The rows that a run starts from: those of a state dict or its file, or else the module's."""
    if initial is None:
        return flat.flatten_module(flat.module)
    rows = flat.load_initial(read_state_dict(initial))
    for name, values in flat.unflatten(*rows).items():
        # buffers may be infinite, such as an attention mask
        if name in flat.names and not bool(values.isfinite().all()):
            kind = str(flat.dtype).removeprefix("torch.")
            raise InvalidInput(
                f"model.initial.{name}", tuple(values.shape), f"must hold numbers that are finite in {kind}"
            )
    return rows


def read_state_dict(source: object, field: str = "model.initial") -> dict[str, Tensor]:
    """Read a state dict of tensors or arrays, or the file of one."""
    if isinstance(source, str | Path):
        source = _load_file(Path(source), field)
    if not isinstance(source, Mapping):
        allowed = "must be a state dict, a table of tensors or arrays by name, or the path of one"
        raise InvalidInput(field, source, allowed)
    values = {}
    for name, value in source.items():
        if not isinstance(name, str):
            raise InvalidInput(f"{field} key", name, "must be a text")
        values[name] = as_tensor(f"{field}.{name}", value)
        if values[name].is_complex():
            raise InvalidInput(f"{field}.{name}", str(values[name].dtype), "must hold real numbers")
    return values


def _load_file(path: Path, field: str) -> object:
    """Load a file of weights without running code in it."""
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise InvalidInput(field, path, "must be a .safetensors or .pt file")
    if not os.path.isfile(path):
        raise InvalidInput(field, path, "there is no such file")
    with convert_errors(field, path, "cannot be read"):
        if path.suffix != ".safetensors":
            return torch.load(path, map_location="cpu", weights_only=True)
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise MissingExtra("reading .safetensors files", "safetensors", "all") from None
        return load_file(path)


def build_flat_module(model: nn.Module | Callable[[], nn.Module], seed: int) -> FlatModule:
    """Flatten a module, or the one that a function builds with all random generators seeded."""
    module = model
    if not isinstance(module, nn.Module) and callable(module):
        name = getattr(model, "__name__", model)
        with (
            seeded_rng(derive_seed(seed, Stream.WEIGHTS), devices=True),
            convert_errors("model", name, "cannot be made"),
        ):
            module = model()
    flat = FlatModule(module)
    for name, value in _tensors(flat.module).items():
        reason = unusable_because(value)
        if reason:
            raise InvalidInput("model", type(flat.module).__name__, f"{name} {reason}")
    return flat


def frozen_digest(flat: FlatModule) -> str:
    """SHA-256 of the frozen parameters; empty if there are none.

    Frozen parameters are in no row, message or checkpoint, so all nodes and all parts of a run need
    the same ones.
    """
    trained = set(flat.names)
    frozen = [(name, value) for name, value in flat.module.named_parameters() if name not in trained]
    digest = hashlib.sha256()
    for name, value in frozen:
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(memoryview(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data))
    return digest.hexdigest() if frozen else ""


def check_frozen(flat: FlatModule, expected: str) -> None:
    """Raise if a module's frozen parameters differ from those a run was made with."""
    if frozen_digest(flat) != expected:
        allowed = "its frozen weights are others than those the run was made with: give them as a file, [model] base"
        raise InvalidInput("model", type(flat.module).__name__, allowed)
