"""Requirements of a series: data sets, client-steps, and an estimate of its duration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from papers.harness.paper import Paper
from papers.harness.series import Case, Options, Series
from stratafl import Client, Data, Experiment, simulate
from stratafl.base.environment import usable_cores
from stratafl.data.catalog import prepare
from stratafl.models.registry import build
from stratafl.simulation.build import batch_size
from stratafl.simulation.simulation import Simulation

H200 = {
    "mlp": {"fp32": 161_695, "tf32": 310_201, "bf16": 309_440, "fp16": 316_151},
    "cnn": {"fp32": 5_746, "tf32": 29_615, "bf16": 42_159, "fp16": 42_261},
    "resnet18_gn": {"tf32": 5_160, "bf16": 6_822},
    "lstm": {"tf32": 8_997, "bf16": 11_998},
}
"""Client-steps per second on an NVIDIA H200, 100 clients, batch 50, measured in
benchmarks/results/h200_*.json."""
SAMPLES = {"mlp": ((1, 28, 28), 10), "cnn": ((3, 32, 32), 10), "resnet18_gn": ((3, 32, 32), 100), "lstm": ((80,), 80)}


@dataclass(frozen=True)
class Rate:
    """Client-steps per second, and the source of the number."""

    steps: float
    source: str


def expected_steps(paper: Paper, series: Series, cases: Sequence[Case]) -> float:
    """Client-steps that cases of a series are expected to take.

    A run that stops at a target is expected to need as many rounds as the paper's own.
    """
    total = 0.0
    for case in cases:
        published, limit = paper.published_rounds(series, case), case.experiment.rounds
        total += (limit if published is None else min(limit, published)) * case.steps_per_round
    return total


def needs(cases: Sequence[Case]) -> dict[str, str]:
    """Data sets of the cases, each with its state."""
    names = dict.fromkeys(case.experiment.data.source for case in cases)
    return {name: prepare.describe(name).state for name in names}


class Rates:
    """Training speed of each model, measured at most once by a few steps on its engine."""

    def __init__(self, options: Options):
        self.options = options
        self._known: dict[str, Rate] = {}

    def of(self, case: Case) -> Rate:
        model = case.experiment.model
        name, key = str(model.name), f"{model.name} {model.params.get('hidden', '')}"
        if key not in self._known:
            self._known[key] = self._recorded(name) or self._measured(case)
        return self._known[key]

    def seconds(self, paper: Paper, series: Series, cases: Sequence[Case]) -> float:
        """Expected duration of cases of a series."""
        return sum(expected_steps(paper, series, [case]) / self.of(case).steps for case in cases)

    def _recorded(self, model: str) -> Rate | None:
        on_gpu = self.options.device.startswith("cuda") and torch.cuda.is_available()
        if not on_gpu or "H200" not in torch.cuda.get_device_name():
            return None
        steps = H200.get(model, {}).get(self.options.precision)
        return None if steps is None else Rate(steps, f"benchmarks/results/h200_{model}.json")

    def _measured(self, case: Case) -> Rate:
        experiment = case.experiment
        on_cpu = experiment.execution.device == "cpu"
        clients, steps = (20, 10) if experiment.data.source == "digits" else (2, 2) if on_cpu else (100, 4)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # like each of several workers
        try:
            run = _short_run(experiment, clients, steps)
            next(run)  # the first round is a warm-up
            began = time.perf_counter()
            next(run)
            if not on_cpu:
                torch.cuda.synchronize()
            steps_per_second = clients * steps / (time.perf_counter() - began)
        finally:
            torch.set_num_threads(threads)
        workers = usable_cores() if on_cpu else 1
        return Rate(steps_per_second * workers, f"measured here just now, {workers} worker{'s' if workers > 1 else ''}")


def _short_run(experiment: Experiment, clients: int, steps: int) -> Simulation:
    """Set up two rounds of a case's model on noise, with one batch per client."""
    name, params = str(experiment.model.name), experiment.model.params
    shape, classes = ((1, 8, 8), 10) if experiment.data.source == "digits" else SAMPLES[name]
    batch = batch_size(experiment) or 50
    total = clients * batch
    inputs = torch.randint(classes, (total, *shape)) if name == "lstm" else torch.rand(total, *shape)
    return simulate(
        lambda: build(name, shape, classes, **params),
        Data((inputs, torch.arange(total) % classes), partition=list(torch.arange(total).split(batch))),
        tree=clients,
        method="hfedavg",
        schedule=[steps],
        client=Client(batch_size=batch),
        execution=experiment.execution,
        rounds=2,
    )
