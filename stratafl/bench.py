"""How fast the engines train, beside plain PyTorch, on the same data in one run.

What is timed is the whole loop: sampling, transforms, gradients, corrections, clipping, updates and the meeting at
the end of a round. The roofline is what a step's operations and bytes would take at the rates of this device.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from stratafl import baselines, jax_baseline, models, roofline
from stratafl.baselines import Job, Round
from stratafl.data.transforms import flip_and_crop
from stratafl.engine.choose import Name, make_engine
from stratafl.engine.ops import HALF, Compute
from stratafl.engine.precision import computing
from stratafl.engine.work import Augment, Training
from stratafl.errors import InvalidInput, unknown
from stratafl.federation import Federation
from stratafl.flat import Flat
from stratafl.local import leaf
from stratafl.registry import rules_for
from stratafl.roofline import now
from stratafl.tree import Tree

SAMPLES = 500
"""Each client's."""
MOST_SAMPLES = 50_000
"""In the data set; more clients than it has room for share them."""
LR, CLIP, SEED = 0.05, 10.0, 0
SEVERAL, LONG = 4, 2.0
"""Rounds timed together, and the seconds of a round that is timed alone and once more at most."""
KINDS = {
    "_fetch": "samples",
    **dict.fromkeys(("_forward", "_max"), "forward"),
    "_cross_entropy": "loss",
    **dict.fromkeys(("_input_gradient", "_max_gradient"), "input gradients"),
    **dict.fromkeys(("_weight_gradient", "_bias_gradient", "_parameter_gradient"), "weight gradients"),
    **dict.fromkeys(("_squares", "_total", "_step"), "update"),
    "_drift": "corrections",
    "_cell": "recurrence",
    "_cell_gradient": "recurrence",
    "_all_steps": "recurrence",
    "_all_steps_back": "recurrence",
    **dict.fromkeys(("_prepare", "_pack", "_reorder", "_convert", "_transpose", "_unpool", "_gather"), "layout"),
}
"""What our kernels are for, by name."""
OTHER = "torch's own kernels and copies"


@dataclass(frozen=True)
class Task:
    """A model at the sizes of its data set."""

    input_shape: tuple[int, ...]
    classes: int
    augment: Augment | None = None


TASKS = {
    "logistic": Task((1, 28, 28), 10),
    "mlp": Task((1, 28, 28), 10),
    "cnn": Task((3, 32, 32), 10, flip_and_crop),
    "resnet18_gn": Task((3, 32, 32), 100, flip_and_crop),
    "lstm": Task((80,), 80),
}


@dataclass(frozen=True)
class Row:
    """One way to train."""

    engine: str
    precision: str
    how: str
    ms: float
    """For one step of all clients."""
    client_steps: float
    """A second."""
    peak_bytes: int | None
    """Of the GPU's memory."""
    roofline: float
    """The share of what the device could do."""
    stages_ms: dict[str, float]
    """Of a step, with all before it awaited: `train` and `meet`, where they can be told apart."""
    kernels_ms: dict[str, float]
    """Of a step of our own engines on a GPU: what its time goes to, by kind of work."""


@dataclass(frozen=True)
class Table:
    """What a run measured."""

    model: str
    parameters: int
    clients: int
    batch: int
    steps: int
    device: str
    torch: str
    operations: float
    """Of one client's step."""
    bytes: dict[str, float]
    """Of one client's step, in each precision."""
    rates: roofline.Rates
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        head = f"{self.model}, {self.clients} clients, batch {self.batch}, {self.steps} steps a round, {self.device}"
        lines = [head, f"{'':24}{'ms / step':>12}{'client-steps/s':>16}{'peak GiB':>10}{'roofline':>10}"]
        for row in self.rows:
            peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"
            name = f"{row.engine} {row.precision}"
            lines.append(f"{name:24}{row.ms:12.3f}{row.client_steps:16,.0f}{peak:>10}{row.roofline:10.1%}")
        for row in self.rows:
            spent = row.kernels_ms or row.stages_ms
            if spent:
                parts = ", ".join(f"{kind} {ms:.3f}" for kind, ms in spent.items())
                lines += textwrap.wrap(
                    f"{row.engine} {row.precision}, ms / step: {parts}", 100, subsequent_indent="    "
                )
        return "\n".join(lines)


def contenders(device: str | torch.device) -> list[str]:
    """The names `bench` knows on this device: "way" or "way:precision"."""
    cuda = torch.device(device).type == "cuda"
    precise = ["fp32", "tf32", "bf16", "fp16"] if cuda else ["fp32"]
    plain = ["plain loop", *(["graphed loop"] if cuda else []), "vmap"]
    if jax_baseline.available():
        plain.append("jax")
    fast = ["tf32"] if cuda else ["fp32"]
    return [f"{name}:{kind}" for name in plain for kind in fast] + [f"stacked:{kind}" for kind in precise]


def bench(
    model: str = "cnn",
    clients: int = 100,
    batch: int = 50,
    steps: int = 20,
    engines: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    rounds: int = 3,
) -> Table:
    """Time each of the `engines` for the best of `rounds` rounds after the first: "plain loop", "graphed loop", "vmap",
    "jax", "loop", "stacked", "auto", each perhaps with ":" and a precision; all that make sense here unless given."""
    if model not in TASKS:
        raise unknown("model", model, TASKS)
    device = torch.device(device)
    task = TASKS[model]
    job = task_job(model, task, clients, batch, steps, device)
    chosen = [name.partition(":")[::2] for name in engines or contenders(device)]
    precisions: list[Any] = list(dict.fromkeys(kind or "fp32" for _, kind in chosen))
    rates = roofline.measured(precisions, device)
    operations, traffic = roofline.counted(job, precisions)
    rows = []
    for name, given in chosen:
        precision: Any = given or "fp32"
        with _plainly(name, precision, device):
            try:
                made = make(name, job, precision)
            except jax_baseline.Unsupported:
                if engines:
                    raise
                continue
            seconds, peak = _timed(made, device, rounds)
            stages_ms = {stage: 1e3 * spent / steps for stage, spent in _staged(made, device).items()}
        step = seconds / steps
        floor = clients * max(operations / rates.operations[precision], traffic[precision] / rates.bytes)
        spent_ms = {}
        if name not in PLAIN and device.type == "cuda":
            spent_ms = {kind: ms / steps for kind, ms in _profiled(made).items()}
            spent_ms["idle"] = max(0.0, 1e3 * step - sum(spent_ms.values()))
        peak = None if name == "jax" else peak
        rows.append(Row(name, precision, made.how, 1e3 * step, clients / step, peak, floor / step, stages_ms, spent_ms))
    return Table(
        model, models.parameters(job.module), clients, batch, steps, _device_name(device), str(torch.__version__),
        operations, traffic, rates, rows,
    )  # fmt: skip


def task_job(model: str, task: Task, clients: int, batch: int, steps: int, device: torch.device) -> Job:
    """Random data of the task's shapes, and so many clients to share it."""
    generator = torch.Generator().manual_seed(SEED)
    count = min(clients * SAMPLES, MOST_SAMPLES)
    if len(task.input_shape) == 1:
        inputs = torch.randint(task.classes, (count, *task.input_shape), generator=generator)
    else:
        inputs = torch.randn(count, *task.input_shape, generator=generator)
    targets = torch.randint(task.classes, (count,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        module = models.build(model, task.input_shape, task.classes).to(device).train()
    own = torch.arange(SAMPLES)
    partition = [((own + SAMPLES * client) % count).to(device) for client in range(clients)]
    return Job(
        module, inputs.to(device), targets.to(device), partition, batch, steps, LR, CLIP, task.augment, SEED
    )  # fmt: skip


PLAIN: dict[str, Callable[[Job], Round]] = {
    "plain loop": baselines.loop,
    "graphed loop": baselines.graphed_loop,
    "vmap": baselines.mapped,
    "jax": jax_baseline.mapped,
}
OURS = ("loop", "stacked", "auto")


class Contender(NamedTuple):
    """A way to train, ready to go."""

    how: str
    stages: dict[str, Round]
    """What a round consists of, in order."""

    def round(self) -> None:
        for stage in self.stages.values():
            stage()


@contextmanager
def _plainly(name: str, precision: Compute, device: torch.device) -> Iterator[None]:
    """Plain PyTorch's switches for a precision; our engines set their own."""
    if name not in PLAIN:
        yield
        return
    with computing(precision, device), ExitStack() as casting:
        if precision in HALF:
            # a graph must hold the casts, so they are not remembered
            casting.enter_context(torch.autocast(device.type, HALF[precision], cache_enabled=False))
        yield


def make(name: Any, job: Job, precision: Compute) -> Contender:
    """The way to train of this name, set up."""
    if name == "jax" and precision != _jax_precision(job.inputs.device):
        raise InvalidInput("engine", f"jax:{precision}", f"JAX computes in {_jax_precision(job.inputs.device)} here")
    if name in PLAIN:
        return Contender(name, {"round": PLAIN[name](job)})
    if name not in OURS:
        raise unknown("engine", name, [*PLAIN, *OURS])
    return _engine(name, job, precision)


def _jax_precision(device: torch.device) -> Compute:
    return "tf32" if device.type == "cuda" else "fp32"


def _engine(name: Name, job: Job, precision: Compute) -> Contender:
    """One of our own engines in a federation with MTGC on a tree of two levels."""
    device = job.inputs.device
    flat = Flat(job.module)
    clients = len(job.partition)
    groups = next(n for n in range(math.isqrt(clients), 0, -1) if clients % n == 0)
    chain = leaf(LR, clip_norm=CLIP)
    training = Training(
        flat, F.cross_entropy, job.inputs, job.targets, job.partition, chain, job.batch, "epochs", SEED, job.augment
    )
    engine = make_engine(name, training, precision=precision)
    x_P, b_B = (row.to(device) for row in flat.row(job.module))
    tree = Tree.of(f"{groups}x{clients // groups}")
    federation = Federation(tree, rules_for("mtgc", 2), x_P, b_B, [None, None], SEED)
    done = 0

    def train() -> None:
        nonlocal done
        federation.begin()
        x_AP, b_AB = engine.train(federation.work(done, job.steps, 0))
        federation.trained(x_AP, b_AB, chain.rate(0, job.steps))
        done += job.steps

    def meet() -> None:
        federation.meet(2)

    return Contender(engine.how, {"train": train, "meet": meet})


def _timed(made: Contender, device: torch.device, rounds: int) -> tuple[float, int | None]:
    """The seconds of a round, the best of so many times several rounds, and the peak of the GPU's memory.

    Several, because what one round leaves to the next is part of the loop; where a round is long it does not matter.
    """
    made.round()
    began = now(device)
    made.round()
    best = now(device) - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    several = 1 if best > LONG else SEVERAL
    for _ in range(rounds):
        began = now(device)
        for _ in range(several):
            made.round()
        best = min(best, (now(device) - began) / several)
        if best > LONG:
            break
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
