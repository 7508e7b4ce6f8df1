"""One SGD step of C clients' CIFAR-10 CNNs from the client-batched kernels, in a CUDA graph, with a time per stage.

python -m benchmarks.kernels [--clients 100] [--compute bf16 fp16 tf32] [--check]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from stratafl import models
from stratafl.engine import kernels
from stratafl.store.environment import environment

ALIGN = 16
"""Rows are padded to this many values, so that every load can be 16 bytes wide."""
BATCH, CLIP, DECAY, LR = 50, 10.0, 1e-3, 0.05
GRAD_SCALE = {"fp32": 1.0, "tf32": 1.0, "fp16": 1024.0, "bf16": 1.0}


class Step:
    """The network's buffers and its step as a list of named stages."""

    def __init__(self, clients: int, compute: str):
        module = models.cnn((3, 32, 32), 10)
        shapes = [p.shape for p in module.parameters()]
        widths = [s.numel() for s in shapes]
        row = torch.cat([p.detach().flatten() for p in module.parameters()])
        widths.append(-len(row) % ALIGN)
        shapes.append(torch.Size([widths[-1]]))
        row = torch.cat([row, torch.zeros(widths[-1])])
        self.x = (row + 0.01 * torch.randn(clients, len(row))).cuda()
        self.g = torch.zeros_like(self.x)
        self.correction = torch.randn_like(self.g) * 1e-3
        self.images = torch.randn(clients, BATCH, 32, 32, 3, device="cuda")
        self.labels = torch.randint(10, (clients, BATCH), device="cuda")
        self.scale, self.compute = GRAD_SCALE[compute], compute

        def views(matrix: Tensor) -> list[Tensor]:
            parts = matrix.split(widths, dim=1)
            return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

        self.views, self.dw, self.dc = views, views(self.g), views(self.correction)
        self.squares: list[Tensor] = []
        self.forward_stages: list[tuple[str, Callable[[Tensor], Tensor]]] = [
            ("conv1", lambda x: self._conv(0, x)),
            ("conv2", lambda x: self._conv(1, x)),
            ("flatten", kernels.flatten),
            ("fc1", lambda x: self._linear(2, x)),
            ("fc2", lambda x: self._linear(3, x)),
            ("fc3", lambda x: self._linear(4, x)),
            ("loss", lambda x: kernels.cross_entropy(x, self.labels, None, self.scale)),
        ]

    def _sink(self, layer: int) -> kernels.Sink:
        return kernels.Sink(*self.dw[2 * layer : 2 * layer + 2], *self.dc[2 * layer : 2 * layer + 2], self.squares)

    def _conv(self, layer: int, x: Tensor) -> Tensor:
        w, b = self.w[2 * layer : 2 * layer + 2]
        return kernels.conv2d_relu_pool(x, w, b, 0, self.compute, self._sink(layer), self.scale)

    def _linear(self, layer: int, x: Tensor) -> Tensor:
        w, b = self.w[2 * layer : 2 * layer + 2]
        return kernels.linear(x, w, b, layer < 4, self.compute, self._sink(layer), self.scale)

    def loss(self) -> Tensor:
        # The views are made here: autograd runs a node's backward on the stream it was made on, which must be captured.
        self.w = self.views(self.x.detach().requires_grad_())
        self.squares.clear()
        x = self.images
        for _, stage in self.forward_stages:
            x = stage(x)
        return x

    def update(self) -> None:
        kernels.update(self.x, self.g, LR, CLIP, DECAY, squares=self.squares)

    def whole(self) -> None:
        self.loss().sum().backward()
        self.update()


def graph_ms(work: Callable[[], object], replays: int = 30) -> float:
    """Median time of a replay of the work captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def kernel_table(work: Callable[[], object], steps: int = 5) -> list[tuple[str, float]]:
    """GPU milliseconds per step of each kernel, in the order of their first launch."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            work()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total.setdefault(event.name, []).append(event.device_time / 1000)
    return [(f"{name[:60]} x{len(t) // steps}", math.fsum(t) / steps) for name, t in total.items()]


def gradient_error(clients: int, compute: str) -> float:
    """Distance of all clients' gradients from float64 autograd, over its length."""
    torch.manual_seed(1)
    step = Step(clients, compute)
    step.correction.zero_()
    step.loss().sum().backward()
    module = models.cnn((3, 32, 32), 10).double().cuda()
    shapes = [p.shape for p in module.parameters()]
    difference = length = 0.0
    for c in range(clients):
        parts = step.x[c].detach().double()[: sum(s.numel() for s in shapes)].split([s.numel() for s in shapes])
        names = [n for n, _ in module.named_parameters()]
        values = {n: p.view(s).requires_grad_() for n, p, s in zip(names, parts, shapes, strict=True)}
        z = torch.func.functional_call(module, values, (step.images[c].double().permute(0, 3, 1, 2),))
        loss = torch.nn.functional.cross_entropy(z, step.labels[c])
        exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(values.values()))])
        difference += float((step.g[c, : len(exact)].double() - exact).square().sum())
        length += float(exact.square().sum())
    return math.sqrt(difference / length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--compute", nargs="*", default=["bf16", "fp16", "tf32"])
    parser.add_argument("--check", action="store_true", help="compare every kernel with float64 first")
    parser.add_argument("--stages", action="store_true", help="a time for each kernel")
    arguments = parser.parse_args()
    if not kernels.available() or kernels.interpreted():
        raise SystemExit("this benchmark needs a GPU and Triton")
    print(environment())
    if arguments.check:
        from stratafl.engine.kernels.check import run

        print("\n".join(run("cuda", small=False)) or "all within their limits")
    for compute in arguments.compute:
        torch.manual_seed(0)
        step = Step(arguments.clients, compute)
        whole = graph_ms(step.whole)
        print(f"{compute}: {whole:.3f} ms per step, {arguments.clients / whole * 1000:,.0f} client-steps/s", flush=True)
        if arguments.stages:
            for name, ms in kernel_table(step.whole):
                print(f"  {name:66} {ms:.4f}")
        print(f"  gradient error against float64, 3 clients: {gradient_error(3, compute):.1e}", flush=True)


if __name__ == "__main__":
    main()
