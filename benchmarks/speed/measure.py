"""Timing of the engines and their baselines on one training task.

The time is that of the complete loop: sampling, transforms, gradients, corrections, clipping,
updates and the synchronisation at the end of a round. The roofline is the time that a step's
operations and bytes would take at the device's peak rates. An engine is compared with baselines of
the same precision only.
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

from benchmarks.speed import jax_baseline, roofline, torch_baselines
from benchmarks.speed.results import ENGINES, BenchmarkRow, BenchmarkTable
from benchmarks.speed.roofline import synchronised_time
from benchmarks.speed.torch_baselines import Round, TrainingJob
from stratafl.base.errors import InvalidInput, describe_exception, unknown_name
from stratafl.base.rng import torch_seeded
from stratafl.base.topology import Topology
from stratafl.core.client_training import Augment, ClientTraining
from stratafl.core.client_update import ClientUpdate, clip, corrections
from stratafl.core.flat_module import FlatModule
from stratafl.core.optimizer import constant
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.data.transforms import flip_and_crop
from stratafl.engine.factory import EngineName, drift_kernel, make_engine
from stratafl.engine.precision import HALF_DTYPES, PRECISIONS, Precision, float32_matmul_precision
from stratafl.federation.federation import Federation
from stratafl.federation.sync import edge_levels
from stratafl.models.registry import build, count_parameters
from stratafl.rules.registry import rules_for

SAMPLES = 500
"""Samples per client."""
MOST_SAMPLES = 50_000
"""Upper limit of the data set's size; beyond it clients share samples."""
LR, CLIP, SEED = 0.05, 10.0, 0
SEVERAL, LONG = 4, 2.0
"""Limits of the rounds and seconds that are timed together; a longer round is timed once."""
KERNEL_CATEGORIES = {
    "_load_images": "samples",
    **dict.fromkeys(("_forward", "_few_channels_forward", "_max"), "forward"),
    "_dropout": "dropout",
    "_cross_entropy": "loss",
    **dict.fromkeys(("_input_gradient", "_max_gradient"), "input gradients"),
    **dict.fromkeys(
        (
            "_weight_gradient",
            "_few_channels_weight_gradient",
            "_reduce_splits",
            "_bias_gradient",
            "_parameter_gradient",
        ),
        "weight gradients",
    ),
    **dict.fromkeys(("_squared_norms", "_sum_parts", "_update"), "update"),
    "_drift": "corrections",
    "_peaks": "largest values",
    **dict.fromkeys(("_cell_forward", "_cell_gradient", "_sequence_forward", "_sequence_backward"), "recurrence"),
    **dict.fromkeys(
        ("_pad_channels", "_pack", "_pack_shifted", "_convert_filters", "_cast", "_transpose", "_unpool"), "layout"
    ),
}
"""Category of each kernel of the package in a profile."""
OTHER = "torch's own kernels and copies"


class Sizes(NamedTuple):
    """Size of a round: clients, samples per batch, steps."""

    clients: int
    batch: int
    steps: int


GPU_SIZES = Sizes(clients=100, batch=50, steps=20)
"""Sizes on a GPU: those of the paper's experiments."""
CPU_SIZES = Sizes(clients=20, batch=20, steps=10)


@dataclass(frozen=True)
class Task:
    """Input shape, classes and augmentation that a model is timed with."""

    input_shape: tuple[int, ...]
    classes: int
    augment: Augment | None = None
    on_cpu: Sizes = CPU_SIZES
    """Sizes with which two cores time all contenders in less than a minute."""

    def sizes(self, device: torch.device) -> Sizes:
        """Default sizes on a device."""
        return self.on_cpu if device.type == "cpu" else GPU_SIZES


TASKS = {
    "logistic": Task((1, 28, 28), 10),
    "mlp": Task((1, 28, 28), 10),
    "cnn": Task((3, 32, 32), 10, flip_and_crop, Sizes(10, 10, 4)),
    "resnet18_gn": Task((3, 32, 32), 100, flip_and_crop, Sizes(2, 4, 2)),
    "lstm": Task((80,), 80, on_cpu=Sizes(4, 10, 2)),
}


def default_contenders(device: str | torch.device) -> list[str]:
    """Default contenders on a device, each as "name:precision".

    On a GPU plain PyTorch is fastest in a CUDA graph, so the graphed loop has every precision of
    the engines.
    """
    jax = ["jax"] if jax_baseline.available() else []
    if torch.device(device).type != "cuda":
        return [f"{name}:fp32" for name in ("plain loop", "vmap", *jax, "stacked")]
    mapped = ("vmap", "graphed vmap", "compiled vmap")
    plain = [f"{name}:{kind}" for kind in ("tf32", "bf16") for name in ("plain loop", *mapped, *jax)]
    return plain + [f"{name}:{kind}" for name in ("graphed loop", "stacked") for kind in PRECISIONS]


def compare_engines(
    model: str = "cnn",
    clients: int | None = None,
    batch: int | None = None,
    steps: int | None = None,
    engines: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    rounds: int = 3,
    watch: Callable[[BenchmarkTable], None] = lambda table: None,
) -> BenchmarkTable:
    """Time engines and baselines on one model: the best of `rounds` rounds after the first.

    Args:
        model: A name in `TASKS`.
        clients: Number of clients; the defaults of these three suit the device.
        batch: Samples per step.
        steps: Steps of each client in a round.
        engines: "plain loop", "graphed loop", "vmap", "graphed vmap", "compiled vmap", "jax",
            "loop", "stacked" or "auto", each optionally with ":" and a precision. The default is
            `default_contenders`, which leaves out "compiled vmap" on a CPU, where compiling takes
            longer than everything else together.
        device: Device of all contenders.
        rounds: Repetitions of the measurement.
        watch: Called with the table before the first measurement and after each.

    A contender that fails, for example for want of memory, is listed in `failed`, and the others
    are still timed.

    """
    if model not in TASKS:
        raise unknown_name("model", model, TASKS)
    device = torch.device(device)
    contenders = [_parse_contender(name, device) for name in engines or default_contenders(device)]
    task = TASKS[model]
    defaults = task.sizes(device)
    sizes = Sizes(
        *(default if value is None else value for value, default in zip((clients, batch, steps), defaults, strict=True))
    )
    job = task_job(model, task, *sizes, device)
    precisions = list(dict.fromkeys(kind for _, kind in contenders))
    rates = roofline.measure_peaks(precisions, device)
    operations, traffic = roofline.count_step(job, precisions)
    rows: list[BenchmarkRow] = []
    failed: dict[str, str] = {}
    table = BenchmarkTable(
        model, count_parameters(job.module), *sizes, _device_name(device), str(torch.__version__),
        operations, traffic, rates, rows, failed,
    )  # fmt: skip
    watch(table)
    for name, precision in contenders:
        floor = sizes.clients * max(operations / rates.operations[precision], traffic[precision] / rates.bytes)
        try:
            rows.append(_row(name, precision, job, floor, rounds))
        except jax_baseline.UnsupportedByJax as error:
            if engines:
                failed[f"{name}:{precision}"] = str(error)
        except Exception as error:
            # a failure must not lose what was measured before
            failed[f"{name}:{precision}"] = describe_exception(error)
        watch(table)
    return table


def measure(way: str, job: TrainingJob, rounds: int = 2) -> BenchmarkRow:
    """Time one contender on a job, without a roofline."""
    return _row(*_parse_contender(way, job.inputs.device), job, 0.0, rounds)


def _parse_contender(name: str, device: torch.device) -> tuple[str, Precision]:
    """Split "name:precision" and check both."""
    way, _, kind = name.partition(":")
    precision: Any = kind or "fp32"
    if way not in (*PLAIN, *ENGINES):
        raise unknown_name("engine", way, [*PLAIN, *ENGINES])
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    if way.startswith("graphed") and device.type != "cuda":
        raise InvalidInput("engine", name, "a CUDA graph needs a GPU")
    if way == "jax" and precision not in jax_baseline.precisions(device):
        raise InvalidInput("engine", name, f"JAX computes in {', '.join(jax_baseline.precisions(device))} here")
    return way, precision


def _row(name: str, precision: Precision, job: TrainingJob, floor: float, rounds: int) -> BenchmarkRow:
    """Time one contender; `floor` is the time of a step at the device's peak rates, in seconds."""
    device, clients = job.inputs.device, len(job.partition)
    if device.type == "cuda":
        # free the memory of the previous contender
        gc.collect()
        torch.cuda.empty_cache()
    with _torch_precision(name, precision, device):
        run = prepare(name, job, precision)
        seconds, peak = _timed(run, device, rounds)
        stages_ms = {stage: 1e3 * spent / job.steps for stage, spent in _staged(run, device).items()}
    step = seconds / job.steps
    spent_ms = {}
    if name in ENGINES and device.type == "cuda":
        spent_ms = {kind: ms / job.steps for kind, ms in _profiled(run).items()}
        spent_ms["idle"] = max(0.0, 1e3 * step - sum(spent_ms.values()))
    peak = None if name == "jax" else peak
    return BenchmarkRow(
        name, precision, run.description, 1e3 * step, clients / step, peak, floor / step, stages_ms, spent_ms
    )


def task_job(model: str, task: Task, clients: int, batch: int, steps: int, device: torch.device) -> TrainingJob:
    """Training job of a task, with random data divided among the clients."""
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
    return TrainingJob(
        module, inputs.to(device), targets.to(device), partition, batch, steps, LR, CLIP, task.augment, SEED
    )  # fmt: skip


PLAIN: dict[str, Callable[[TrainingJob, Precision], Round]] = {
    "plain loop": lambda job, _: torch_baselines.loop_baseline(job),
    "graphed loop": lambda job, _: torch_baselines.graphed_loop_baseline(job),
    "vmap": lambda job, _: torch_baselines.vmap_baseline(job),
    "graphed vmap": lambda job, _: torch_baselines.vmap_baseline(job, graphed=True),
    "compiled vmap": lambda job, _: torch_baselines.vmap_baseline(job, graphed=job.inputs.is_cuda, compiled=True),
    "jax": jax_baseline.jax_vmap_baseline,
}
"""Baselines by name; torch's precision switches are set around them.

"vmap" and its variants are plain `torch.func.vmap`, not the engine "vmap"; the compiled one is also
in a CUDA graph on a GPU."""


class PreparedRun(NamedTuple):
    """Contender that is ready to train: its description and the phases of its round."""

    description: str
    phases: dict[str, Round]
    """Phases of a round, in order."""

    def round(self) -> None:
        for stage in self.phases.values():
            stage()


@contextmanager
def _torch_precision(name: str, precision: Precision, device: torch.device) -> Iterator[None]:
    """Set torch's precision switches for a baseline; the engines set their own."""
    if name not in PLAIN:
        yield
        return
    with float32_matmul_precision(precision, device), ExitStack() as casting:
        if precision in HALF_DTYPES:
            # a CUDA graph must contain the casts, so they are not cached
            casting.enter_context(torch.autocast(device.type, HALF_DTYPES[precision], cache_enabled=False))
        yield


def prepare(name: Any, job: TrainingJob, precision: Precision) -> PreparedRun:
    """Set up the contender of this name."""
    if name in PLAIN:
        return PreparedRun(name, {"round": PLAIN[name](job, precision)})
    return _engine(name, job, precision)


def _engine(name: EngineName, job: TrainingJob, precision: Precision) -> PreparedRun:
    """Set up an engine in a federation with MTGC on a tree of two levels."""
    device = job.inputs.device
    flat = FlatModule(job.module)
    clients = len(job.partition)
    groups = next(n for n in range(math.isqrt(clients), 0, -1) if clients % n == 0)
    chain = ClientUpdate(constant(LR), (corrections, clip(CLIP)))
    training = ClientTraining(
        flat=flat,
        loss=F.cross_entropy,
        samples=InMemorySamples(job.inputs, job.targets),
        clients=ClientIndex.from_lists(job.partition),
        client_update=chain,
        batch_size=job.batch,
        sampling="shuffle",
        seed=SEED,
        augment=job.augment,
    )
    engine = make_engine(name, training, precision=precision)
    x_P, b_B = (row.to(device) for row in flat.flatten_module(job.module))
    tree = Topology.of(f"{groups}x{clients // groups}")
    federation = Federation(
        tree, edge_levels(rules_for("mtgc", 2), seed=SEED), x_P, b_B, drift_kernel=drift_kernel(x_P)
    )
    done = 0

    def train() -> None:
        nonlocal done
        federation.begin_round()
        result = engine.train(federation.train_request(done, job.steps, 0))
        federation.apply_training(result, chain.lr_sum(0, job.steps))
        done += job.steps

    def meet() -> None:
        federation.synchronize(2)

    return PreparedRun(engine.how, {"train": train, "meet": meet})


def _timed(run: PreparedRun, device: torch.device, rounds: int) -> tuple[float, int | None]:
    """Seconds of a round, the best of `rounds` measurements, and the GPU's peak memory.

    Each measurement covers several rounds, because work that a round leaves to the next belongs to
    the loop; a long round is measured alone.
    """
    run.round()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = synchronised_time(device)
    run.round()
    best = synchronised_time(device) - began
    several = max(1, min(SEVERAL, int(LONG / best)))
    for _ in range(rounds if best < LONG else 0):
        began = synchronised_time(device)
        for _ in range(several):
            run.round()
        best = min(best, (synchronised_time(device) - began) / several)
    return best, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _staged(run: PreparedRun, device: torch.device) -> dict[str, float]:
    """Seconds of each phase of a round alone; empty where there is only one."""
    if len(run.phases) == 1:
        return {}
    spent = {}
    for name, stage in run.phases.items():
        began = synchronised_time(device)
        stage()
        spent[name] = synchronised_time(device) - began
    return spent


def _profiled(run: PreparedRun) -> dict[str, float]:
    """GPU milliseconds of a round by kernel category."""
    with warnings.catch_warnings(), profile(activities=[ProfilerActivity.CUDA]) as profiled:
        warnings.simplefilter("ignore")
        run.round()
        torch.cuda.synchronize()
    spent = dict.fromkeys([*dict.fromkeys(KERNEL_CATEGORIES.values()), OTHER], 0.0)
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[KERNEL_CATEGORIES.get(event.name, OTHER)] += event.device_time / 1e3
    return {kind: ms for kind, ms in spent.items() if ms}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
