"""Time of models as users write them, on the stacked engine and in plain PyTorch.

    python -m benchmarks.speed.modules --out FILE [--only gpt vit ...] [--ways stacked:bf16 ...]

100 clients, batches of 20, MTGC with 10 steps between two synchronisations. Each row is printed
when it is measured; a contender that fails is named, and the others are still measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.measure import CLIP, LR, SEED, measure
from benchmarks.speed.torch_baselines import TrainingJob
from stratafl.base.environment import environment
from stratafl.base.errors import describe_exception
from stratafl.base.rng import torch_seeded
from stratafl.models.registry import build

CLIENTS, BATCH, STEPS, SAMPLES = 100, 20, 10, 200
WAYS = ("stacked:bf16", "stacked:tf32", "vmap:bf16", "graphed loop:bf16", "graphed vmap:bf16", "graphed vmap:tf32")


def images_cnn(drop: float = 0.0) -> nn.Module:
    """CNN of the LEAF benchmark for FEMNIST."""
    dropout = [nn.Dropout(drop)] if drop else []
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), *dropout,
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), *dropout,
        nn.Flatten(), nn.Linear(64 * 49, 512), nn.ReLU(), *dropout, nn.Linear(512, 62),
    )  # fmt: skip


class Recurrent(nn.Module):
    """Prediction of the next character from the last state of torch's own recurrent layer."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], vocabulary: int = 80, hidden: int = 128):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(hidden, vocabulary)
        self.layers = kind(8, hidden, batch_first=True)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(codes))[0][:, -1])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = Attention(width, heads)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        x = x + self.mix(self.before(x), causal)
        return x + self.think(self.between(x))


class GPT(nn.Module):
    """Causal transformer over characters that predicts the next one."""

    def __init__(self, vocabulary: int = 80, length: int = 80, width: int = 128, layers: int = 4):
        super().__init__()
        self.codes, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.codes(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x, causal=True)
        return self.head(self.norm(x))[:, -1]


class Encoder(nn.Module):
    """Torch's own transformer encoder over characters."""

    def __init__(self, vocabulary: int = 80, width: int = 64, length: int = 32):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.codes, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) / 10)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.layers(self.codes(codes) + self.places).mean(dim=1))


class ViT(nn.Module):
    """Vision transformer: patches of 4 x 4, a class token, 4 layers of 128."""

    def __init__(self, width: int = 128, classes: int = 10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 65, width) / 50)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x)[:, 0]))


class Inverted(nn.Module):
    def __init__(self, wide: int, out: int, stride: int, grow: int):
        super().__init__()
        inner = wide * grow
        expand = [nn.Conv2d(wide, inner, 1, bias=False), nn.GroupNorm(8, inner), nn.ReLU6()] if grow > 1 else []
        depth = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        project = [nn.Conv2d(inner, out, 1, bias=False), nn.GroupNorm(8, out)]
        self.layers = nn.Sequential(*expand, depth, nn.GroupNorm(8, inner), nn.ReLU6(), *project)
        self.residual = stride == 1 and wide == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


def mobilenet(classes: int = 10) -> nn.Module:
    """MobileNetV2 with group norm, for small images: strides of the first two stages are 1."""
    plan = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.GroupNorm(8, 32), nn.ReLU6()]
    wide = 32
    for grow, out, count, stride in plan:
        for number in range(count):
            layers.append(Inverted(wide, out, stride if number == 0 else 1, grow))
            wide = out
    layers += [nn.Conv2d(wide, 1280, 1, bias=False), nn.GroupNorm(8, 1280), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))


def resnet(batch_norm: bool) -> nn.Module:
    module = build("resnet18_gn", (3, 32, 32), 10)
    if batch_norm:
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.GroupNorm):
                    setattr(parent, name, nn.BatchNorm2d(child.num_channels))
    return module


IMAGES, GREY, TEXT = (3, 32, 32), (1, 28, 28), (80,)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "cnn": (images_cnn, GREY, 62),
    "cnn with dropout": (lambda: images_cnn(0.25), GREY, 62),
    "gpt": (GPT, TEXT, 80),
    "encoder": (Encoder, (32,), 80),
    "vit": (ViT, IMAGES, 10),
    "lstm": (lambda: Recurrent(nn.LSTM), TEXT, 80),
    "gru": (lambda: Recurrent(nn.GRU), TEXT, 80),
    "resnet with group norm": (lambda: resnet(False), IMAGES, 10),
    "resnet with batch norm": (lambda: resnet(True), IMAGES, 10),
    "mobilenet": (mobilenet, IMAGES, 10),
}


def job_for(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    classes: int,
    device: torch.device,
    clients: int = CLIENTS,
    batch: int = BATCH,
    steps: int = STEPS,
) -> TrainingJob:
    """Training job with random data of a shape, and clients of equal size."""
    generator = torch.Generator().manual_seed(SEED)
    count = clients * SAMPLES
    if len(shape) == 1:
        inputs = torch.randint(classes, (count, *shape), generator=generator)
    else:
        inputs = torch.randn(count, *shape, generator=generator)
    targets = torch.randint(classes, (count,), generator=generator)
    with torch_seeded(SEED):
        module = make().to(device).train()
    own = torch.arange(SAMPLES, device=device)
    partition = [own + SAMPLES * client for client in range(clients)]
    return TrainingJob(module, inputs.to(device), targets.to(device), partition, batch, steps, LR, CLIP, None, SEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=list(MODULES), choices=list(MODULES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    options = parser.parse_args()
    device, table = torch.device(options.device), {}
    for name in options.only:
        rows: dict[str, Any] = {}
        for way in options.ways:
            try:
                row = measure(way, job_for(*MODULES[name], device, options.clients))
            except Exception as problem:
                rows[way] = describe_exception(problem)
            else:
                rows[way] = {"client_steps": row.client_steps, "ms": row.ms, "how": row.how, "spent": row.kernels_ms}
            shown = (
                rows[way] if isinstance(rows[way], str) else f"{row.client_steps:10,.0f}  {row.ms:8.3f} ms  {row.how}"
            )
            print(f"{name:24} {way:20} {shown}", flush=True)
        table[name] = rows
        if options.out:
            options.out.write_text(json.dumps({**environment(), "modules": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
