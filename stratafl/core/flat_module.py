"""A module as a flat vector of parameters and one of buffers."""

from __future__ import annotations

import copy
import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stratafl.base.errors import InvalidInput, MissingExtra, convert_errors, describe_exception, unknown_name
from stratafl.base.rng import Stream, derive_seed, seeded_rng
from stratafl.core.losses import Loss, check_loss_value
from stratafl.data.inputs import Inputs, as_tensor, call_arguments, unusable_because

FROZEN = "frozen weights"


class FlatModule:
    """How one architecture lies in rows: P parameters, B floating buffer values."""

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
        flags = {name: part.training for name, part in self.module.named_modules()}
        self._eval_submodules = [name for name, awake in flags.items() if not awake] if any(flags.values()) else []
        self._working: _ModuleOnRow | None = None
        self.written: set[str] = set()
        """What the last call is known to have written to, "weights" or "buffers", also where that
        changed nothing."""
        self.source_module = weakref.ref(module)
        """The user's own module, as long as it lives."""

    def train(self) -> None:
        """Training mode, but for the parts that the user gave in evaluation mode; a module that is
        wholly in it, as libraries hand out trained ones, is trained wholly."""
        self.module.train()
        for name in self._eval_submodules:
            self.module.get_submodule(name).training = False

    def eval(self) -> None:
        """Evaluation mode."""
        self.module.eval()

    def flatten_module(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """The module's parameters (P) and buffers (B)."""
        return self.flatten({**dict(module.named_parameters()), **dict(module.named_buffers())})

    def load_initial(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of a state dict, whose frozen parameters and integer buffers the module takes
        over.

        A tied parameter may stand under any of its names, and a buffer that state dicts leave out
        may be missing.
        """
        own, given = _tensors(self.module), _matched(self.module, values, "initial")
        unsaved = {name: own[name] for name in _unsaved(self.module) if name in self._buffer_shapes}
        rows = self.flatten({**unsaved, **given})
        with torch.no_grad():
            for name in given.keys() - self._shapes.keys() - self._buffer_shapes.keys():
                own[name].copy_(given[name])
        return rows

    def flatten(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of a state dict."""
        for name, shape in {**self._shapes, **self._buffer_shapes}.items():
            if name not in values:
                raise InvalidInput("initial", sorted(values), f"lacks {name!r}")
            if values[name].shape != shape:
                raise InvalidInput(f"initial.{name}", tuple(values[name].shape), f"must have the shape {tuple(shape)}")

        def joined(shapes: Mapping[str, torch.Size]) -> Tensor:
            parts = [values[name].detach().reshape(-1).to(self.dtype) for name in shapes]
            return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

        return joined(self._shapes), joined(self._buffer_shapes)

    def unflatten(self, x_P: Tensor, b_B: Tensor) -> dict[str, Tensor]:
        """Views of the two rows under the module's names; matrices of rows give views with the
        clients in front."""
        return {**_views(self._shapes, x_P), **self.unflatten_buffers(b_B)}

    def unflatten_buffers(self, b_B: Tensor) -> dict[str, Tensor]:
        """Views of a row of buffers alone."""
        return _views(self._buffer_shapes, b_B)

    @property
    def names(self) -> list[str]:
        """The parameters' names, in the order of the row."""
        return list(self._shapes)

    def integer_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that are in no row: a counter (batch norm has one), a mask,
        codes."""
        return {n: b.clone() for n, b in self.module.named_buffers() if n not in self._buffer_shapes}

    def call(self, x_P: Tensor, b_B: Tensor, inputs: Inputs) -> Any:
        """The module's output under these rows; a buffer the module updates is updated in `b_B`."""
        x_P = x_P.clone()
        working = self._at(x_P, b_B, None)
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
        """The gradient of the loss at these rows, as `loss.backward()` leaves it; zero for a
        parameter that the loss does not reach. What the module itself changes is changed in `x_P`
        and `b_B`, and in `integers` if they are given.

        within: a context to call the module in; forward: one for the way forward alone, such as
        autocast.
        """
        working = self._at(x_P, b_B, integers)
        with torch.enable_grad(), within():
            # while the module still has these values: a checkpointed part computes its activations
            # again on the way
            with forward():
                value = loss(call_module(working.module, inputs), targets)
            check_loss_value(loss, value).backward()
        self.written = working.store(x_P, b_B, integers)
        return working.gradients()

    def _at(self, x_P: Tensor, b_B: Tensor, integers: Mapping[str, Tensor] | None) -> _ModuleOnRow:
        """A module of our own with these values, in the mode that `module` is in."""
        if self._working is None or self._working.device != x_P.device:
            self._working = _ModuleOnRow(self.module, self._shapes, self._buffer_shapes, x_P)
        self._working.load(x_P, b_B, self.integer_buffers() if integers is None else integers)
        for mine, theirs in zip(self._working.parts, self.module.modules(), strict=True):
            mine.training = theirs.training
        return self._working

    def owner_of_memory(self, tensor: Tensor) -> str | None:
        """Whose memory a tensor lies in during the call that is under way: that of the "weights",
        the "buffers" or the "frozen weights"; None for any other."""
        return None if self._working is None else self._working.owner_of_memory(tensor)

    def build(self, x_P: Tensor, b_B: Tensor) -> nn.Module:
        """A module of its own with these values."""
        module = copy_module(self.module)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, view in self.unflatten(x_P, b_B).items():
                own[name].copy_(view)
        return module.eval()


class _ModuleOnRow:
    """A copy of a module whose parameters are views of a row; to the module it is as if it were the
    only one. So whatever plain PyTorch can do with a module can be done with this one: compute a
    part of it again, keep a parameter in a list, replace a buffer, change a weight in place."""

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
        self._recurrent = [part for part in self.parts if like_P.is_cuda and _is_library_recurrent(part)]
        mine = dict(self.module.named_parameters())
        self._shapes, self._parameters = shapes, [mine[name] for name in shapes]
        self._b_B = like_P.new_empty(sum(shape.numel() for shape in buffer_shapes.values()))
        views, first = _views(buffer_shapes, self._b_B), _first_names(self.module)
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._integers: list[tuple[nn.Module, str, str]] = []
        for name, _ in self.module.named_buffers(remove_duplicate=False):
            owner, _, attribute = name.rpartition(".")
            part = self.module.get_submodule(owner)
            if first[name] in views:
                self._buffers.append((part, attribute, views[first[name]]))
            else:
                self._integers.append((part, attribute, first[name]))

    def load(self, x_P: Tensor, b_B: Tensor, integers: Mapping[str, Tensor]) -> None:
        """Have these values: the parameters where they lie, the buffers as copies."""
        for parameter, view in zip(self._parameters, _views(self._shapes, x_P.detach()).values(), strict=True):
            # numbers that are to be seen in pairs, as complex ones, must not begin in the middle of
            # one
            parameter.data = view.clone() if view.storage_offset() % 2 else view
            parameter.grad = None
        for layer in self._recurrent:
            layer.flatten_parameters()  # the GPU's library wants them together, in an order of its own
        if len(self._b_B):
            self._b_B.copy_(b_B)
        self._version = self._b_B._version
        self._places = [parameter.data_ptr() for parameter in self._parameters]
        for part, attribute, view in self._buffers:
            part._buffers[attribute] = view
        self._copies = {name: integers[name].clone() for _, _, name in self._integers}
        for part, attribute, name in self._integers:
            part._buffers[attribute] = self._copies[name]

    def store(self, x_P: Tensor, b_B: Tensor, integers: Mapping[str, Tensor] | None) -> set[str]:
        """Put what became of everything where it is wanted; what is known to have been written
        to."""
        written = set()
        if self._places != [parameter.data_ptr() for parameter in self._parameters]:
            written.add("weights")
        if self._b_B._version != self._version:
            written.add("buffers")
        with torch.no_grad():
            for parameter, view in zip(self._parameters, _views(self._shapes, x_P).values(), strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter)
            for part, attribute, view in self._buffers:
                now = part._buffers[attribute]
                if now is not None and now is not view:
                    view.copy_(now)
                    written.add("buffers")
            if len(self._b_B):
                b_B.copy_(self._b_B)
            for part, attribute, name in self._integers:
                now = part._buffers[attribute]
                if now is None:
                    continue
                if now is not self._copies[name] or now._version != 0:
                    written.add("buffers")
                if integers is not None:
                    integers[name].copy_(now)
        return written

    def owner_of_memory(self, tensor: Tensor) -> str | None:
        """Whose memory a tensor lies in: that of the "weights", the "buffers" or the "frozen
        weights"; None for any other."""
        place = tensor.untyped_storage().data_ptr()
        buffers = [self._b_B, *self._copies.values()]
        for name, own in (("weights", self._parameters), ("buffers", buffers), (FROZEN, self._frozen)):
            if place and any(place == each.untyped_storage().data_ptr() for each in own):
                return name
        return None

    def gradients(self) -> Tensor:
        """What a backward pass left, as a row."""
        parts = [p.new_zeros(p.numel()) if p.grad is None else _dense(p.grad).reshape(-1) for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return torch.cat(parts)


def call_module(module: nn.Module, inputs: Inputs) -> Any:
    """What a module makes of these: of one tensor, or of several as keywords."""
    positional, keywords = call_arguments(inputs)
    return module(*positional, **keywords)


def _is_library_recurrent(part: nn.Module) -> TypeGuard[nn.RNNBase]:
    return isinstance(part, nn.RNNBase) and type(part).forward in (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def copy_module(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A copy of its own, but for the tensors it may share.

    What a module has computed from its parameters and kept (the older `weight_norm` does) is copied
    without its history, which a deep copy refuses; and hooks on its parameters, which a deep copy
    forgets, are registered anew.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in shared}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    made = copy.deepcopy(module, memo)
    for old, new in zip(module.parameters(), made.parameters(), strict=True):
        if new is not old:
            for hook in (old._backward_hooks or {}).values():
                new.register_hook(hook)
            for hook in (old._post_accumulate_grad_hooks or {}).values():
                new.register_post_accumulate_grad_hook(hook)
    return made


def _first_names(module: nn.Module) -> dict[str, str]:
    """Each name of a parameter or buffer, and the first name of the same tensor."""
    first: dict[int, str] = {}
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for each in both for name, tensor in each}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each under its first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _matched(module: nn.Module, values: Mapping[str, Tensor], field: str) -> dict[str, Tensor]:
    """A state dict's values under the first names of the module's tensors, all of which fit."""
    first, own = _first_names(module), _tensors(module)
    given: dict[str, Tensor] = {}
    for name, value in values.items():
        if name not in first:
            raise unknown_name(f"{field} key", name, first)
        if value.shape != own[first[name]].shape:
            needed = tuple(own[first[name]].shape)
            raise InvalidInput(f"{field}.{name}", tuple(value.shape), f"must have the shape {needed}")
        before = given.setdefault(first[name], value)
        if before is not value and not equal_with_nan(before, value):
            raise InvalidInput(f"{field}.{name}", "other values", f"is the same tensor as {first[name]!r}")
    return given


def load_weights(module: nn.Module, values: Mapping[str, Tensor], field: str) -> None:
    """Give a module the values of a state dict, which must have all that the module's has; a tied
    parameter may stand under any of its names."""
    given, unsaved = _matched(module, values, field), set(_unsaved(module))
    with torch.no_grad():
        for name, own in _tensors(module).items():
            if name in given:
                own.copy_(given[name])
            elif name not in unsaved:
                raise InvalidInput(field, sorted(values), f"lacks {name!r}")


def _unsaved(module: nn.Module) -> Iterator[str]:
    """The buffers that a state dict leaves out."""
    for path, part in module.named_modules():
        for name in part._non_persistent_buffers_set:
            yield f"{path}.{name}" if path else name


def equal_with_nan(a: Tensor, b: Tensor) -> bool:
    """Whether all are equal; to this question a value that is not a number is equal to itself."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _views(shapes: Mapping[str, torch.Size], row: Tensor) -> dict[str, Tensor]:
    if not shapes:
        return {}
    parts = row.split([shape.numel() for shape in shapes.values()], dim=-1)
    clients = row.shape[:-1]
    return {name: part.view(clients + shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def initial_rows(flat: FlatModule, given: object) -> tuple[Tensor, Tensor]:
    """The rows a run starts from: the module's own, unless others are given."""
    if given is None:
        return flat.flatten_module(flat.module)
    rows = flat.load_initial(read_state_dict(given))
    for name, values in flat.unflatten(*rows).items():
        # a buffer may be a mask, in which infinity has a meaning
        if name in flat.names and not bool(values.isfinite().all()):
            kind = str(flat.dtype).removeprefix("torch.")
            raise InvalidInput(f"initial.{name}", tuple(values.shape), f"must hold numbers that are finite in {kind}")
    return rows


def read_state_dict(given: object, field: str = "initial") -> dict[str, Tensor]:
    """A state dict of tensors, from one of tensors or arrays, or from the file of one."""
    if isinstance(given, str | Path):
        given = _state_file(Path(given), field)
    if not isinstance(given, Mapping):
        allowed = "must be a state dict, a table of tensors or arrays by name, or the path of one"
        raise InvalidInput(field, given, allowed)
    values = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidInput(f"{field} key", name, "must be a text")
        values[name] = as_tensor(f"{field}.{name}", value)
        if values[name].is_complex():
            raise InvalidInput(f"{field}.{name}", str(values[name].dtype), "must hold real numbers")
    return values


def _state_file(path: Path, field: str) -> object:
    """What a file holds; nothing that it holds is run."""
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
    """How a module lies in rows, or the one a function makes with all generators set from the
    seed."""
    module = model
    if not isinstance(module, nn.Module) and callable(module):
        key = derive_seed(seed, Stream.WEIGHTS)
        with (
            seeded_rng(key, devices=True),
            convert_errors("model", getattr(model, "__name__", model), "cannot be made"),
        ):
            module = model()
    flat = FlatModule(module)
    for name, value in {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}.items():
        odd = unusable_because(value)
        if odd:
            raise InvalidInput("model", type(flat.module).__name__, f"{name} {odd}")
    return flat


def frozen_digest(flat: FlatModule) -> str:
    """The SHA-256 of the parameters that are not trained; empty where there are none. They are in
    no row, no message and no checkpoint, so that all who work with the same rows must have the
    same."""
    trained = set(flat.names)
    frozen = [(name, each) for name, each in flat.module.named_parameters() if name not in trained]
    digest = hashlib.sha256()
    for name, each in frozen:
        digest.update(f"{name} {each.dtype} {tuple(each.shape)}\n".encode())
        digest.update(memoryview(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data))
    return digest.hexdigest() if frozen else ""


def check_frozen(flat: FlatModule, expected: str) -> None:
    """Refuse a module whose parameters that are not trained are others than those a run was made
    with."""
    if frozen_digest(flat) != expected:
        told = "its frozen weights are others than those the run was made with: give them as a file, [model] base"
        raise InvalidInput("model", type(flat.module).__name__, told)
