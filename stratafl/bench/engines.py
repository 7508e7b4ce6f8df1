"""How fast the engines train, beside plain PyTorch, on the same data in one run.

What is timed is the whole loop: sampling, transforms, gradients, corrections, clipping, updates and
the meeting at the end of a round. The roofline is what a step's operations and bytes would take at
the rates of this device. Each way to train has a precision, and is compared with those of the same
one.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from stratafl.base.errors import InvalidInput, describe_exception, unknown_name
from stratafl.base.rng import torch_seeded
from stratafl.base.topology import Tree
from stratafl.bench import baselines, jax_baseline, roofline
from stratafl.bench.baselines import Job, Round
from stratafl.bench.roofline import now
from stratafl.bench.table import OURS, Row, Table
from stratafl.core.client_training import Augment, ClientTraining
from stratafl.core.client_update import leaf
from stratafl.core.flat_module import FlatModule
from stratafl.data.dataset import InMemorySamples
from stratafl.data.transforms import flip_and_crop
from stratafl.engine.factory import EngineName, drift_kernel, make_engine
from stratafl.engine.precision import HALF_DTYPES, PRECISIONS, Precision, float32_matmul_precision
from stratafl.federation.federation import Federation
from stratafl.federation.sync import edge_levels
from stratafl.models.registry import build, count_parameters
from stratafl.rules.registry import rules_for

SAMPLES = 500
"""Samples of each client."""
MOST_SAMPLES = 50_000
"""The most samples of the data set; more clients than it has room for share them."""
LR, CLIP, SEED = 0.05, 10.0, 0
SEVERAL, LONG = 4, 2.0
"""Rounds timed together at most, and the seconds they may take; a round that takes longer is timed
once."""
KINDS = {
    "_fetch": "samples",
    **dict.fromkeys(("_forward", "_max"), "forward"),
    "_drop": "dropout",
    "_cross_entropy": "loss",
    **dict.fromkeys(("_input_gradient", "_max_gradient"), "input gradients"),
    **dict.fromkeys(("_weight_gradient", "_bias_gradient", "_parameter_gradient"), "weight gradients"),
    **dict.fromkeys(("_squares", "_total", "_step"), "update"),
    "_drift": "corrections",
    "_peaks": "largest values",
    "_cell": "recurrence",
    "_cell_gradient": "recurrence",
    "_all_steps": "recurrence",
    "_all_steps_back": "recurrence",
    **dict.fromkeys(("_prepare", "_pack", "_reorder", "_convert", "_transpose", "_unpool", "_gather"), "layout"),
}
"""What our kernels are for, by name."""
OTHER = "torch's own kernels and copies"


class Sizes(NamedTuple):
    """How much is trained in a round."""

    clients: int
    batch: int
    steps: int


USUAL = Sizes(clients=100, batch=50, steps=20)
"""The sizes of the paper's experiments."""
SMALL = Sizes(clients=20, batch=20, steps=10)


@dataclass(frozen=True)
class Task:
    """A model at the sizes of its data set."""

    input_shape: tuple[int, ...]
    classes: int
    augment: Augment | None = None
    on_cpu: Sizes = SMALL
    """Sizes with which two cores need under a minute for everything."""

    def sizes(self, device: torch.device) -> Sizes:
        """The sizes that are measured unless others are given."""
        return self.on_cpu if device.type == "cpu" else USUAL


TASKS = {
    "logistic": Task((1, 28, 28), 10),
    "mlp": Task((1, 28, 28), 10),
    "cnn": Task((3, 32, 32), 10, flip_and_crop, Sizes(10, 10, 4)),
    "resnet18_gn": Task((3, 32, 32), 100, flip_and_crop, Sizes(2, 4, 2)),
    "lstm": Task((80,), 80, on_cpu=Sizes(4, 10, 2)),
}


def contenders(device: str | torch.device) -> list[str]:
    """The names `bench` knows on this device that are measured unless others are given:
    "way:precision".

    On a GPU plain PyTorch is fastest in a CUDA graph, so that is there in every precision our
    engines have.
    """
    jax = ["jax"] if jax_baseline.available() else []
    if torch.device(device).type != "cuda":
        return [f"{name}:fp32" for name in ("plain loop", "vmap", *jax, "stacked")]
    mapped = ("vmap", "graphed vmap", "compiled vmap")
    plain = [f"{name}:{kind}" for kind in ("tf32", "bf16") for name in ("plain loop", *mapped, *jax)]
    return plain + [f"{name}:{kind}" for name in ("graphed loop", "stacked") for kind in PRECISIONS]


def bench(
    model: str = "cnn",
    clients: int | None = None,
    batch: int | None = None,
    steps: int | None = None,
    engines: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    rounds: int = 3,
    watch: Callable[[Table], None] = lambda table: None,
) -> Table:
    """Time each of the `engines` for the best of `rounds` rounds after the first: "plain loop",
    "graphed loop", "vmap", "graphed vmap", "compiled vmap", "jax", "loop", "stacked", "auto", each
    perhaps with ":" and a precision; all that make sense here unless given, of which on a CPU the
    compiled one is not, since compiling takes longer than all others together. Sizes are those that
    suit the device.

    One that fails, for want of memory perhaps, is named in the table, and the others go on.
    `watch` is called with the table before the first engine is measured and after each."""
    if model not in TASKS:
        raise unknown_name("model", model, TASKS)
    device = torch.device(device)
    chosen = [_chosen(name, device) for name in engines or contenders(device)]
    task = TASKS[model]
    usual = task.sizes(device)
    sizes = Sizes(*(own if given is None else given for given, own in zip((clients, batch, steps), usual, strict=True)))
    job = task_job(model, task, *sizes, device)
    precisions = list(dict.fromkeys(kind for _, kind in chosen))
    rates = roofline.measured(precisions, device)
    operations, traffic = roofline.counted(job, precisions)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    table = Table(
        model, count_parameters(job.module), *sizes, _device_name(device), str(torch.__version__),
        operations, traffic, rates, rows, failed,
    )  # fmt: skip
    watch(table)
    for name, precision in chosen:
        floor = sizes.clients * max(operations / rates.operations[precision], traffic[precision] / rates.bytes)
        try:
            rows.append(_row(name, precision, job, floor, rounds))
        except jax_baseline.UnsupportedByJax as error:
            if engines:
                failed[f"{name}:{precision}"] = str(error)
        except Exception as error:
            # whatever it is, what was measured before is not lost for it
            failed[f"{name}:{precision}"] = describe_exception(error)
        watch(table)
    return table


def row_of(way: str, job: Job, rounds: int = 2) -> Row:
    """One way to train this job, measured; not how near it is to the device's own rates."""
    return _row(*_chosen(way, job.inputs.device), job, 0.0, rounds)


def _chosen(name: str, device: torch.device) -> tuple[str, Precision]:
    """A way to train and its precision, if there are such."""
    way, _, kind = name.partition(":")
    precision: Any = kind or "fp32"
    if way not in (*PLAIN, *OURS):
        raise unknown_name("engine", way, [*PLAIN, *OURS])
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    if way.startswith("graphed") and device.type != "cuda":
        raise InvalidInput("engine", name, "a CUDA graph needs a GPU")
    if way == "jax" and precision not in jax_baseline.precisions(device):
        raise InvalidInput("engine", name, f"JAX computes in {', '.join(jax_baseline.precisions(device))} here")
    return way, precision


def _row(name: str, precision: Precision, job: Job, floor: float, rounds: int) -> Row:
    """One way to train, measured; `floor` is the seconds of a step at the device's own rates."""
    device, clients = job.inputs.device, len(job.partition)
    if device.type == "cuda":
        # what the one before held
        gc.collect()
        torch.cuda.empty_cache()
    with _plainly(name, precision, device):
        made = make(name, job, precision)
        seconds, peak = _timed(made, device, rounds)
        stages_ms = {stage: 1e3 * spent / job.steps for stage, spent in _staged(made, device).items()}
    step = seconds / job.steps
    spent_ms = {}
    if name in OURS and device.type == "cuda":
        spent_ms = {kind: ms / job.steps for kind, ms in _profiled(made).items()}
        spent_ms["idle"] = max(0.0, 1e3 * step - sum(spent_ms.values()))
    peak = None if name == "jax" else peak
    return Row(name, precision, made.how, 1e3 * step, clients / step, peak, floor / step, stages_ms, spent_ms)


def task_job(model: str, task: Task, clients: int, batch: int, steps: int, device: torch.device) -> Job:
    """Random data of the task's shapes, and so many clients to share it."""
    generator = torch.Generator().manual_seed(SEED)
    count = min(clients * SAMPLES, MOST_SAMPLES)
    if len(task.input_shape) == 1:
        inputs = torch.randint(task.classes, (count, *task.input_shape), generator=generator)
    else:
        inputs = torch.randn(count, *task.input_shape, generator=generator)
    targets = torch.randint(task.classes, (count,), generator=generator)
    with torch_seeded(SEED):
        module = build(model, task.input_shape, task.classes).to(device).train()
    own = torch.arange(SAMPLES)
    partition = [((own + SAMPLES * client) % count).to(device) for client in range(clients)]
    return Job(
        module, inputs.to(device), targets.to(device), partition, batch, steps, LR, CLIP, task.augment, SEED
    )  # fmt: skip


PLAIN: dict[str, Callable[[Job, Precision], Round]] = {
    "plain loop": lambda job, _: baselines.loop(job),
    "graphed loop": lambda job, _: baselines.graphed_loop(job),
    "vmap": lambda job, _: baselines.mapped(job),
    "graphed vmap": lambda job, _: baselines.mapped(job, graphed=True),
    "compiled vmap": lambda job, _: baselines.mapped(job, graphed=job.inputs.is_cuda, compiled=True),
    "jax": jax_baseline.mapped,
}
"""What the engines are measured against; torch's own precision is set around it. Ways of
`torch.func.vmap` are plain PyTorch, not the engine "vmap"; the compiled one is in a CUDA graph on a
GPU, too."""


class Contender(NamedTuple):
    """A way to train, ready to go."""

    how: str
    stages: dict[str, Round]
    """What a round consists of, in order."""

    def round(self) -> None:
        for stage in self.stages.values():
            stage()


@contextmanager
def _plainly(name: str, precision: Precision, device: torch.device) -> Iterator[None]:
    """Plain PyTorch's switches for a precision; our engines set their own."""
    if name not in PLAIN:
        yield
        return
    with float32_matmul_precision(precision, device), ExitStack() as casting:
        if precision in HALF_DTYPES:
            # a graph must hold the casts, so they are not remembered
            casting.enter_context(torch.autocast(device.type, HALF_DTYPES[precision], cache_enabled=False))
        yield


def make(name: Any, job: Job, precision: Precision) -> Contender:
    """The way to train of this name, set up."""
    if name in PLAIN:
        return Contender(name, {"round": PLAIN[name](job, precision)})
    return _engine(name, job, precision)


def _engine(name: EngineName, job: Job, precision: Precision) -> Contender:
    """One of our own engines in a federation with MTGC on a tree of two levels."""
    device = job.inputs.device
    flat = FlatModule(job.module)
    clients = len(job.partition)
    groups = next(n for n in range(math.isqrt(clients), 0, -1) if clients % n == 0)
    chain = leaf(LR, clip_norm=CLIP)
    training = ClientTraining(
        flat=flat,
        loss=F.cross_entropy,
        samples=InMemorySamples(job.inputs, job.targets),
        partition=job.partition,
        client_update=chain,
        batch_size=job.batch,
        sampling="epochs",
        seed=SEED,
        augment=job.augment,
    )
    engine = make_engine(name, training, precision=precision)
    x_P, b_B = (row.to(device) for row in flat.flatten_module(job.module))
    tree = Tree.of(f"{groups}x{clients // groups}")
    edges = edge_levels(rules_for("mtgc", 2), seed=SEED)
    federation = Federation(tree, edges, x_P, b_B, drift_kernel=drift_kernel(x_P))
    done = 0

    def train() -> None:
        nonlocal done
        federation.begin_round()
        federation.apply_training(
            engine.train(federation.train_request(done, job.steps, 0)), chain.lr_sum(0, job.steps)
        )
        done += job.steps

    def meet() -> None:
        federation.synchronize(2)

    return Contender(engine.description, {"train": train, "meet": meet})


def _timed(made: Contender, device: torch.device, rounds: int) -> tuple[float, int | None]:
    """The seconds of a round, the best of so many times several rounds, and the peak of the GPU's
    memory.

    Several, because what one round leaves to the next is part of the loop; where a round is long it
    does not matter.
    """
    made.round()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = now(device)
    made.round()
    best = now(device) - began
    several = max(1, min(SEVERAL, int(LONG / best)))
    for _ in range(rounds if best < LONG else 0):
        began = now(device)
        for _ in range(several):
            made.round()
        best = min(best, (now(device) - began) / several)
    return best, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _staged(made: Contender, device: torch.device) -> dict[str, float]:
    """The seconds of each stage of a round by itself, where there are several."""
    if len(made.stages) == 1:
        return {}
    spent = {}
    for name, stage in made.stages.items():
        began = now(device)
        stage()
        spent[name] = now(device) - began
    return spent


def _profiled(made: Contender) -> dict[str, float]:
    """The GPU's milliseconds in a round by kind of work."""
    with warnings.catch_warnings(), profile(activities=[ProfilerActivity.CUDA]) as found:
        warnings.simplefilter("ignore")
        made.round()
        torch.cuda.synchronize()
    spent = dict.fromkeys([*dict.fromkeys(KINDS.values()), OTHER], 0.0)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[KINDS.get(event.name, OTHER)] += event.device_time / 1e3
    return {kind: ms for kind, ms in spent.items() if ms}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
