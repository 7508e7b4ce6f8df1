"""Baseline of the speed benchmark in JAX: the same training, compiled.

A round of all clients is one compiled program: batches are drawn, transformed and trained on in a
scan, then the clients are averaged. JAX is not a dependency; it is imported when a job is set up.

JAX's default products of float32 operands are tf32 on recent NVIDIA GPUs; "fp32" requests exact
ones, "bf16" has activations and products in 16 bits. Weights, corrections and updates are float32
in every precision.

Shape suffixes: C clients, S a client's samples, E epochs, T steps, B batch, N all samples, H
height, W width, K channels, F features.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.speed.torch_baselines import Round, TrainingJob
from stratafl.base.errors import InvalidInput
from stratafl.data.transforms import PAD, flip_and_crop
from stratafl.engine.precision import Precision

Array = Any
"""Array of JAX, whose type cannot be named without importing JAX."""
Parameters = list[tuple[Array, ...]]
"""Weight and bias of each layer, in the order of the layers; empty for layers without them."""
Forward = Callable[[tuple[Array, ...], Array], Array]
"""Function of a layer: (weights, batch) -> batch."""


class UnsupportedByJax(InvalidInput):
    """Error for a job that this baseline does not support; a table may leave it out."""


class JaxModel(NamedTuple):
    """Module as a JAX function. Images are (B, H, W, K), for XLA's fastest convolutions."""

    weights: Parameters
    apply: Callable[[Parameters, Array], Array]


class DeviceData(NamedTuple):
    """Data on the device, passed as arguments: a compiled program copies values it closes over."""

    inputs_N: Array
    targets_N: Array
    samples_CS: Array


def available() -> bool:
    """Whether JAX is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "jaxlib"))


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """Precisions of JAX on a device."""
    return ("fp32", "tf32", "bf16") if device.type == "cuda" else ("fp32", "bf16")


def jax_vmap_baseline(job: TrainingJob, precision: Precision = "fp32") -> Round:
    """Train by `jax.vmap` over one client's gradient function, in a compiled round."""
    return JaxClients(job, precision).round


class JaxClients:
    """Weights of all clients, one row each, and their training round."""

    def __init__(self, job: TrainingJob, precision: Precision = "fp32"):
        jax = _jax()
        clients = len(job.partition)
        device = _device(job.inputs.device)
        network = convert(job.module)
        _check(job, network)
        samples_CS = torch.stack(job.partition)
        data = DeviceData(images_last(job.inputs.float()), _array(job.targets.int()), _array(samples_CS.int()))
        self.data = jax.device_put(data, device)
        self.weights: Parameters = jax.tree.map(
            lambda one: jax.numpy.broadcast_to(one, (clients, *one.shape)), jax.device_put(network.weights, device)
        )
        # an argument of the program, so that the compiler cannot know that it is zero
        self.corrections: Parameters = jax.tree.map(jax.numpy.zeros_like, self.weights)
        self.key = jax.device_put(jax.random.key(job.seed), device)
        self._train = jax.jit(_training(job, network, precision), donate_argnums=(0, 1))
        self._precision = precision

    def round(self) -> None:
        """Train and aggregate, and wait until the device has finished."""
        exact: AbstractContextManager[Any] = nullcontext()
        if self._precision == "fp32":
            exact = _jax().default_matmul_precision("float32")
        with exact:
            self.weights, self.key = self._train(self.weights, self.key, self.corrections, self.data)
        _jax().block_until_ready(self.weights)


def convert(module: nn.Module) -> JaxModel:
    """Convert a module to weights, which stay on the host, and a function of them."""
    layers = list(_leaves(module))
    # the module counts shared parameters once, the layers count them several times
    if sum(len(list(layer.parameters())) for layer in layers) != len(list(module.parameters())):
        raise UnsupportedByJax("module", module, "layers must not share weights")
    forwards = [_forward(layer) for layer in layers]

    def apply(weights: Parameters, x_B: Array) -> Array:
        for own, forward in zip(weights, forwards, strict=True):
            x_B = forward(own, x_B)
        return x_B

    return JaxModel([_weights(layer) for layer in layers], apply)


def images_last(inputs: Tensor) -> Array:
    """Inputs of a `JaxModel`: images with their channels last."""
    return _array(inputs.permute(0, 2, 3, 1) if inputs.dim() == 4 else inputs)


def _training(job: TrainingJob, network: JaxModel, precision: Precision) -> Callable[..., tuple[Parameters, Array]]:
    """Training round as one function of arrays."""
    jax = _jax()
    jnp = jax.numpy
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32

    def loss(weights: Parameters, inputs_B: Array, targets_B: Array, present_B: Array) -> Array:
        cast_weights = jax.tree.map(lambda weight: weight.astype(dtype), weights)
        log_BK = jax.nn.log_softmax(network.apply(cast_weights, inputs_B.astype(dtype)).astype(jnp.float32))
        log_likelihood_B = jnp.take_along_axis(log_BK, targets_B[:, None], axis=1)[:, 0]
        return -jnp.sum(log_likelihood_B * present_B) / jnp.sum(present_B)

    gradients = jax.vmap(jax.grad(loss), in_axes=(0, 0, 0, None))

    def train(weights: Parameters, key: Array, corrections: Parameters, data: DeviceData) -> tuple[Parameters, Array]:
        def step(weights: Parameters, batch: tuple[Array, Array, Array]) -> tuple[Parameters, None]:
            index_CB, present_B, key = batch
            if job.augment is None:
                inputs_CB = data.inputs_N[index_CB]
            else:
                draws = jax.random.uniform(key, (4, *index_CB.shape))
                inputs_CB = flipped_and_cropped(data.inputs_N, index_CB, draws)
            gradient = gradients(weights, inputs_CB, data.targets_N[index_CB], present_B)
            gradient = jax.tree.map(jnp.add, gradient, corrections)
            squares = [jnp.sum(row**2, axis=range(1, row.ndim)) for row in jax.tree.leaves(gradient)]
            shrink_C = job.clip / jnp.maximum(jnp.sqrt(sum(squares)), job.clip)

            def descend(weight: Array, row: Array) -> Array:
                return weight - job.lr * shrink_C.reshape(-1, *[1] * (row.ndim - 1)) * row

            return jax.tree.map(descend, weights, gradient), None

        key, shuffles, transforms = jax.random.split(key, 3)
        index_TCB, present_TB = drawn_batches(shuffles, data.samples_CS, job.batch, job.steps)
        batch = (index_TCB, present_TB, jax.random.split(transforms, job.steps))
        weights, _ = jax.lax.scan(step, weights, batch)
        averaged = jax.tree.map(lambda weight: jnp.broadcast_to(weight.mean(axis=0), weight.shape), weights)
        return averaged, key

    return train


def drawn_batches(key: Array, samples_CS: Array, batch: int, steps: int) -> tuple[Array, Array]:
    """Sample indices of each step's batches, and a mask of the samples that count.

    Every client has a new order of its samples in each epoch. A scan needs batches of one size, so
    the last batch of an epoch is padded with samples that do not count.
    """
    jax = _jax()
    jnp = jax.numpy
    clients, size = samples_CS.shape
    batch = min(batch, size)
    per_epoch = math.ceil(size / batch)
    epochs = math.ceil(steps / per_epoch)
    filled = per_epoch * batch
    order_ECS = jnp.argsort(jax.random.uniform(key, (epochs, clients, size)), axis=-1)
    index_ECS = jnp.take_along_axis(samples_CS[None], order_ECS, axis=-1)
    index_ECS = jnp.pad(index_ECS, ((0, 0), (0, 0), (0, filled - size)), mode="edge")
    index_TCB = index_ECS.reshape(epochs, clients, per_epoch, batch).swapaxes(1, 2).reshape(-1, clients, batch)
    present_TB = np.tile((np.arange(filled) < size).astype(np.float32).reshape(per_epoch, batch), (epochs, 1))
    return index_TCB[:steps], jnp.asarray(present_TB[:steps])


def flipped_and_cropped(inputs_NHWK: Array, index_CB: Array, draws: Array) -> Array:
    """`flip_and_crop` of images in one gather, by four uniform numbers per image, (4, C, B)."""
    jnp = _jax().numpy
    _, height, width, _ = inputs_NHWK.shape
    flips, crops, down, right = draws
    offsets = 2 * PAD + 1
    down, right = (
        jnp.where(crops < 0.5, jnp.floor(draw * offsets).astype(jnp.int32) - PAD, 0)[..., None]
        for draw in (down, right)
    )
    row_CBH = jnp.arange(height) + down
    column_CBW = jnp.arange(width) + right
    column_CBW = jnp.where((flips < 0.5)[..., None], width - 1 - column_CBW, column_CBW)
    row_CBHW, column_CBHW = row_CBH[..., :, None], column_CBW[..., None, :]
    inside_CBHW = (row_CBHW >= 0) & (row_CBHW < height) & (column_CBHW >= 0) & (column_CBHW < width)
    moved = inputs_NHWK[
        index_CB[..., None, None], jnp.clip(row_CBHW, 0, height - 1), jnp.clip(column_CBHW, 0, width - 1)
    ]
    return jnp.where(inside_CBHW[..., None], moved, 0.0)


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Layers in the order of their calls, which only `Sequential` itself defines."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _leaves(child)
    else:
        yield module


def _weights(layer: nn.Module) -> tuple[Array, ...]:
    """Weight and bias with inputs before outputs, as in JAX: (F, F) and (H, W, K, K)."""
    if isinstance(layer, nn.Linear):
        weight = layer.weight.t()
    elif isinstance(layer, nn.Conv2d):
        weight = layer.weight.permute(2, 3, 1, 0)
    else:
        return ()
    return tuple(_array(value.float()) for value in (weight, layer.bias) if value is not None)


def _forward(layer: nn.Module) -> Forward:
    """Function of a layer. Subclasses are not supported: they may compute something else."""
    kind = type(layer)
    if kind is nn.Linear:
        return _linear
    if kind is nn.Conv2d and _is_plain_convolution(layer):
        return _convolution(layer)
    if kind is nn.ReLU:
        return lambda own, x_B: _jax().nn.relu(x_B)
    if kind is nn.MaxPool2d and _is_halving(layer):
        return _halved
    if kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return _flattened
    raise UnsupportedByJax("module", layer, "JAX gets Conv2d, ReLU, MaxPool2d(2), Flatten and Linear in a Sequential")


def _linear(own: tuple[Array, ...], x_BF: Array) -> Array:
    if x_BF.ndim != 2:
        raise UnsupportedByJax("module", tuple(x_BF.shape), "Linear takes (B, features)")
    return _jax().numpy.matmul(x_BF, own[0]) + sum(own[1:])


def _convolution(layer: Any) -> Forward:
    padding = [(size, size) for size in layer.padding]

    def forward(own: tuple[Array, ...], x_BHWK: Array) -> Array:
        y_BHWK = _jax().lax.conv_general_dilated(
            x_BHWK, own[0], layer.stride, padding, rhs_dilation=layer.dilation, feature_group_count=layer.groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return y_BHWK + sum(own[1:])

    return forward


def _halved(own: tuple[Array, ...], x_BHWK: Array) -> Array:
    """2x2 max-pooling.

    XLA can fuse the gradient of this form, unlike that of a reduction over windows. Equal values
    share the gradient, while torch gives it to the first: after ReLU this makes no difference for
    zeros.
    """
    batch, height, width, channels = x_BHWK.shape
    even = x_BHWK[:, : height // 2 * 2, : width // 2 * 2]
    return even.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def _flattened(own: tuple[Array, ...], x_B: Array) -> Array:
    """Features in the order of the module: channels first."""
    return (x_B.transpose(0, 3, 1, 2) if x_B.ndim == 4 else x_B).reshape(len(x_B), -1)


def _is_plain_convolution(layer: Any) -> bool:
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _is_halving(layer: Any) -> bool:
    two = (2, (2, 2))
    plain = layer.padding in (0, (0, 0)) and layer.dilation in (1, (1, 1))
    return layer.kernel_size in two and layer.stride in two and plain and not (layer.ceil_mode or layer.return_indices)


def _check(job: TrainingJob, network: JaxModel) -> None:
    """Raise before the first round if it would fail."""
    sizes = {len(samples) for samples in job.partition}
    if len(sizes) != 1:
        raise UnsupportedByJax("partition", sizes, "all clients must have as many samples")
    if job.augment not in (None, flip_and_crop) or (job.augment is not None and job.inputs.dim() != 4):
        raise UnsupportedByJax("augment", job.augment, "JAX gets flips and crops of images, or none")
    sample = _jax().eval_shape(network.apply, network.weights, images_last(job.inputs[:1].float()))
    if sample.ndim != 2:
        raise UnsupportedByJax("module", tuple(sample.shape), "must give (B, classes)")


def _device(device: torch.device) -> Any:
    """Device of JAX for a device of torch."""
    kind = "gpu" if device.type == "cuda" else device.type
    try:
        return _jax().devices(kind)[device.index or 0]
    except (RuntimeError, IndexError):
        raise UnsupportedByJax("device", str(device), "JAX does not see it") from None


def _array(tensor: Tensor) -> Array:
    """Copy on the host, since JAX may keep the memory of its arguments."""
    return np.array(tensor.detach().cpu().numpy(), order="C")


def _jax() -> Any:
    # torch uses the same GPU, and JAX would take most of its memory at the start
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not available():
        raise UnsupportedByJax("engine", "jax", "JAX is not installed")
    import jax

    return jax
