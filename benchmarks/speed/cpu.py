"""Time of the stacked engine against the loop on a CPU, by model, number of clients and batch.

The choice of the default engine on a CPU is based on these measurements.

    python -m benchmarks.speed.cpu [--out FILE.json] [--only KIND ...] [--threads N ...]

The engines alternate within one process, so that other load slows both equally; a ratio is the
median over the repetitions. With one thread CPU time is measured, with several wall-clock time. The
synchronisation is not timed: it is the same for both, and with several threads on a busy machine it
would dominate. Rows in FILE of other models at the same commit are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.measure import LR, SEED, PreparedRun, prepare
from benchmarks.speed.modules import GPT, Encoder, Recurrent, job_for
from benchmarks.speed.torch_baselines import TrainingJob
from stratafl.base.environment import environment
from stratafl.core.client_training import ClientTraining
from stratafl.core.client_update import ClientUpdate
from stratafl.core.flat_module import FlatModule
from stratafl.core.optimizer import constant
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.engine.factory import default_engine_name
from stratafl.engine.module_profile import profile_module
from stratafl.models.registry import build

STEPS, ENGINES = 4, ("loop", "stacked")
LONG = 0.1
"""Minimal seconds of one timed repetition of the loop."""
GREY, COLOUR, DIGIT, TEXT = (1, 28, 28), (3, 32, 32), (1, 8, 8), (80,)
SIZES = ((2, 20), (10, 20), (100, 20), (10, 10), (10, 50))
"""Numbers of clients and batch sizes."""
IMAGES, LARGE = ((2, 20), (10, 20), (10, 10), (10, 50)), ((10, 20),)
"""Numbers of clients and batch sizes for slower models."""


class Model(NamedTuple):
    build_module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    sizes: tuple[tuple[int, int], ...] = SIZES


def network(convolution: Callable[[int, int, bool], list[nn.Module]], pool: bool, drop: float = 0.0) -> nn.Module:
    """CNN with three convolutions that halve their images by pooling or by strides of two."""
    layers: list[nn.Module] = []
    for channels, out in ((3, 16), (16, 32), (32, 64)):
        layers += [*convolution(channels, out, not pool and channels > 3), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pool else []
        layers += [nn.Dropout(drop)] if drop else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def plain(channels: int, out: int, halves: bool) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, 2 if halves else 1, 1)]


def group_normed(channels: int, out: int, halves: bool) -> list[nn.Module]:
    return [*plain(channels, out, halves), nn.GroupNorm(4, out)]


def batch_normed(channels: int, out: int, halves: bool) -> list[nn.Module]:
    return [*plain(channels, out, halves), nn.BatchNorm2d(out)]


def depthwise(channels: int, out: int, halves: bool) -> list[nn.Module]:
    if channels == 3:
        return group_normed(channels, out, halves)
    alone = nn.Conv2d(channels, channels, 3, 2 if halves else 1, 1, groups=channels)
    return [alone, nn.ReLU(), nn.Conv2d(channels, out, 1), nn.GroupNorm(4, out)]


class Dropping(nn.Module):
    """Small `nn.TransformerEncoder` with its default dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.codes, self.head = nn.Embedding(80, 32), nn.Linear(32, 80)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.layers(self.codes(codes)).mean(dim=1))


def own(name: str, shape: tuple[int, ...], classes: int = 10, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: build(name, shape, classes, **settings)


def digits_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )  # fmt: skip


MODELS = {
    "logistic": Model(own("logistic", GREY), GREY, 10),
    "mlp of 32 for digits": Model(own("mlp", DIGIT, hidden=[32]), DIGIT, 10),
    "mlp": Model(own("mlp", GREY), GREY, 10),
    "mlp of 1024": Model(own("mlp", GREY, hidden=[1024]), GREY, 10),
    "cnn for digits, not pooled": Model(digits_cnn, DIGIT, 10),
    "cnn, pooled": Model(lambda: network(plain, True), COLOUR, 10),
    "cnn, pooled, dropout": Model(lambda: network(plain, True, 0.25), COLOUR, 10, IMAGES),
    "cnn, pooled, batch norm": Model(lambda: network(batch_normed, True), COLOUR, 10),
    "cnn, pooled, group norm": Model(lambda: network(group_normed, True), COLOUR, 10, IMAGES),
    "cnn, pooled, depthwise": Model(lambda: network(depthwise, True), COLOUR, 10, IMAGES),
    "cnn of the paper": Model(own("cnn", COLOUR), COLOUR, 10, ((2, 20), (10, 20), (10, 50))),
    "cnn, steps of two": Model(lambda: network(plain, False), COLOUR, 10, IMAGES),
    "cnn, steps of two, batch norm": Model(lambda: network(batch_normed, False), COLOUR, 10, IMAGES),
    "cnn, steps of two, group norm": Model(lambda: network(group_normed, False), COLOUR, 10, IMAGES),
    "cnn, steps of two, depthwise": Model(lambda: network(depthwise, False), COLOUR, 10, IMAGES),
    "resnet18_gn": Model(own("resnet18_gn", COLOUR), COLOUR, 10, LARGE),
    "lstm of the paper": Model(own("lstm", TEXT, 80), TEXT, 80, ((2, 20), (10, 20))),
    "nn.LSTM of 32": Model(lambda: Recurrent(nn.LSTM, hidden=32), (20,), 80),
    "nn.LSTM of 128": Model(lambda: Recurrent(nn.LSTM), TEXT, 80, LARGE),
    "nn.GRU of 32": Model(lambda: Recurrent(nn.GRU, hidden=32), (20,), 80),
    "nn.GRU of 128": Model(lambda: Recurrent(nn.GRU), TEXT, 80, LARGE),
    "encoder of 32, dropout": Model(Dropping, (20,), 80),
    "encoder of 64": Model(Encoder, (32,), 80, LARGE),
    "gpt of 32": Model(lambda: GPT(length=20, width=32, layers=2), (20,), 80),
    "gpt of 128": Model(GPT, TEXT, 80, LARGE),
}


def measured(job: TrainingJob, threads: int, turns: int) -> dict[str, Any]:
    """Speed-up of the stacked engine over the loop."""
    clock = time.process_time if threads == 1 else time.perf_counter
    ready: dict[str, PreparedRun] = {}
    setup = {}
    for name in ENGINES:
        began = clock()
        ready[name] = prepare(name, job, "fp32")
        setup[name] = round(clock() - began, 2)
        ready[name].round()

    def trained(name: str) -> float:
        began = clock()
        ready[name].phases["train"]()
        took = clock() - began
        ready[name].phases["meet"]()
        return took

    several = max(1, int(LONG / trained("loop")))
    spent: dict[str, list[float]] = {name: [] for name in ENGINES}
    for _ in range(turns):
        for name in ENGINES:
            spent[name].append(sum(trained(name) for _ in range(several)) / several)
    ratios = [loop / stacked for loop, stacked in zip(spent["loop"], spent["stacked"], strict=True)]
    return {
        "times the loop": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "ms of a client's step in the loop": round(1e3 * min(spent["loop"]) / STEPS / len(job.partition), 3),
        "seconds to set up": setup,
        "how": ready["stacked"].description,
    }


def chosen(job: TrainingJob) -> dict[str, Any]:
    """Default engine, and the properties of the model that decide it."""
    supply = InMemorySamples(job.inputs, job.targets)
    training = ClientTraining(
        flat=FlatModule(job.module), loss=F.cross_entropy, samples=supply,
        clients=ClientIndex.from_lists(job.partition), client_update=ClientUpdate(constant(LR)), batch_size=job.batch,
        sampling="shuffle", seed=SEED,
    )  # fmt: skip
    profile = profile_module(training)
    mean = round(profile.mean_output_bytes / 1024, 1)
    default = default_engine_name(training, len(job.partition), "fp32", profile)
    return {"default": default, "kB an operation gives": mean, "pools images": profile.has_max_pool}


def earlier(path: Path, commit: str, others: list[str]) -> list[dict[str, Any]]:
    """Rows of a file from the same commit, except those of the given models."""
    stored: dict[str, Any] = {"environment": {"commit": ""}, "rows": []}
    if path.exists():
        stored = json.loads(path.read_text())
    same = stored["environment"]["commit"] == commit
    return [row for row in stored["rows"] if same and row["model"] not in others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    machine = environment()
    rows = [] if options.out is None else earlier(options.out, str(machine["commit"]), options.only)
    for name in options.only:
        model = MODELS[name]
        for clients, batch in model.sizes:
            job = job_for(model.build_module, model.shape, model.classes, torch.device("cpu"), clients, batch, STEPS)
            row: dict[str, Any] = {"model": name, "clients": clients, "batch": batch, **chosen(job)}
            for threads in options.threads:
                torch.set_num_threads(threads)
                row[f"{threads} threads"] = measured(job, threads, options.turns)
            rows.append(row)
            ratios = ", ".join(f"{row[f'{n} threads']['times the loop']:.2f}x on {n}" for n in options.threads)
            size = f"{row['kB an operation gives']:8} kB {'pooled' if row['pools images'] else '':6}"
            print(f"{name:30} {clients:4} x {batch:3} {size} {row['default']:8} {ratios}", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps({"environment": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
