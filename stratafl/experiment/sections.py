"""Sections of an experiment: every option of a run, with its type, default, check and meaning.

Nothing here imports PyTorch: a config is read and checked, and its options are explained, in a
moment. What needs the tree, the data or the model is checked when the run is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import check_choice, check_count_or_fraction, check_number, name_and_params, plain
from stratafl.experiment.errors import section
from stratafl.experiment.fields import (
    Accepts,
    Count,
    CountOrZero,
    FilePath,
    Flag,
    LowerCase,
    NotNegative,
    Positive,
    Section,
    Table,
    Unwrapped,
    checked,
    whole,
)
from stratafl.experiment.legacy import new_place

Parameters = Annotated[Mapping[str, Any], Accepts("a table")]


@section
class Tree(Section):
    """Which clients report to which aggregators, and how much each counts."""

    SHORTHAND: ClassVar[str] = "shape"

    shape: Annotated[Any, Unwrapped, Accepts('"4x5", a number, nested lists, or a table of named groups')] = "4x5"
    """`"4x5"` is four aggregators with five clients each, root first, and `20` is 20 clients below
    the root. A list has the sizes of groups: `[3, 5, 2]` is three groups of 3, 5 and 2 clients, and
    `"3x5x2"` a tree of three levels. A table names groups and clients: `{ paris = 3, rome = ["lab",
    "clinic"] }`."""
    weights: Annotated[Any, Unwrapped, Accepts('"uniform", "samples", or numbers')] = "uniform"
    """Weights of siblings in the mean of their parent: equal (`"uniform"`), by the number of their
    samples (`"samples"`), one number per client, or one list of numbers per level."""

    @classmethod
    def _is_shorthand(cls, table: Table) -> bool:
        return "shape" not in table and not set(table) <= {"weights"}


@section
class Data(Section):
    """Which samples there are, and which client holds which."""

    SHORTHAND: ClassVar[str] = "source"

    source: Annotated[Any, Accepts('a name, a file, "file.py:function", or data')] = "digits"
    """A data set of the catalogue (`"cifar10"`), a file (`"table.csv"`, `"arrays.npz"`), a list of
    one table per client (`["north.csv", "south.csv"]`), a folder of images, a data set of Hugging
    Face (`"hf:name"`), or a function (`"my_data.py:load"`). In Python also `(inputs, targets)`, a
    map-style data set, a data frame, or a list with one of these per client."""
    test: Annotated[Any, Accepts("data, or a fraction of the samples")] = None
    """Test data in any form of `source`, or the share of the samples of a file, folder or data
    frame to hold out (`0.2`). A list has one entry per client, and the root is evaluated on all of
    them."""
    partition: Annotated[Any, Accepts("a list of one method per edge level")] = None
    """How samples are divided among the clients: one method per edge level, root first, as a name
    (`"iid"`) or a table (`{ name = "dirichlet", alpha = 0.3 }`), or in Python the sample numbers of
    each client. By default i.i.d. on every level, or as `source` is divided already."""
    test_partition: Annotated[Any, Accepts('"like_train", or test data of each client')] = None
    """Test data of each client: `"like_train"`, or in Python the sample numbers of each client in
    `test`, or a list of one data set per client."""
    columns: Parameters = field(default_factory=dict)
    """Columns of a table, or keys of items that are tables: `inputs` (one name, or a list),
    `targets`, and `owner`, the column with the owner of each sample for `partition = "natural"`."""
    arguments: Parameters = field(default_factory=dict)
    """Arguments of the function in `source`, of Hugging Face's loader, or of the synthetic data
    set."""
    lazy: Flag = False
    """Whether items of a data set are read again for every batch, so that random transforms draw
    again."""
    scale: Annotated[Literal["none", "unit", "standard"], LowerCase] = "none"
    """Scale of your own images in bytes (uint8): `"unit"` divides by 255, and `"standard"` also
    subtracts the mean of each channel of the training data and divides by its deviation. Images of
    the catalogue and of folders always are standardised."""
    augment: Annotated[Any, Accepts('"none", "flip_and_crop" or a function')] = "none"
    """Transform of every training batch: `"none"`, `"flip_and_crop"`, or in Python a function
    `(inputs, seed, client, step) -> inputs`."""
    rotation: Parameters | None = None
    """Rotation of the training images by node (feature shift): `start` and `step` in degrees, and
    the `level`."""


@section
class Model(Section):
    """The network that is trained, and the values it starts from."""

    SHORTHAND: ClassVar[str] = "name"
    INLINE: ClassVar[str] = "params"

    name: Annotated[Any, Accepts('a name, "file.py:Class", or a module')] = "mlp"
    """A model of the catalogue, or `"my_model.py:Net"`. In Python also an `nn.Module`, or a
    function that builds one, which is called with all random generators set from the seed."""
    params: Parameters = field(default_factory=dict)
    """Parameters of the model. In a config they may stand in `[model]` itself."""
    initial: Annotated[Any, Accepts("the path of a file, or a state dict")] = None
    """State dict to start from instead of the model's own values: the path of a .safetensors or .pt
    file, or in Python a table of tensors."""
    base: FilePath | None = None
    """File of weights that the model is built with before adapters are added."""
    lora: Parameters | None = None
    """Low-rank adapters: `rank`, `alpha`, `targets` and `train`. Only these are trained and
    sent."""
    local_parameters: Annotated[Any, Accepts('"batch_norm", or a list of names or patterns')] = None
    """Parameters and buffers that never leave a client: `"batch_norm"`, or a list of names or
    patterns of modules, parameters and buffers."""

    @classmethod
    def as_table(cls, value: object) -> object:
        for key, entry in value.items() if isinstance(value, Mapping) else ():
            moved = new_place(f"model.{key}")
            if moved is not None:
                raise InvalidInput(f"model.{key}", entry, moved)
        return super().as_table(value)


@section
class Method(Section):
    """The algorithm: one rule per edge level, or the name that stands for them."""

    SHORTHAND: ClassVar[str] = "name"
    INLINE: ClassVar[str] = "params"

    name: Annotated[str, LowerCase, Accepts("the name of a method")] | None = None
    """A registered method: its rule is used on the levels it is made for, and the others average.
    `"mtgc"` unless `rules` are given."""
    params: Parameters = field(default_factory=dict)
    """Parameters of the method. In a config they may stand in `[method]` itself."""
    rules: Annotated[Any, Accepts("a list of one rule per edge level")] = None
    """Instead of a name: one rule per edge level, root first, each a name, a table or in Python a
    `Rule`."""

    def __post_init__(self) -> None:
        if self.name is None and self.rules is None:
            if self.params:
                raise InvalidInput(
                    "method", dict(self.params), "needs the name of a method, whose parameters these are"
                )
            object.__setattr__(self, "name", "mtgc")
        if self.name is not None and self.rules is not None:
            raise InvalidInput("method", self.name, "give either a name or rules, not both")
        if self.rules is not None and self.params:
            raise InvalidInput("method.params", dict(self.params), "belong to a method's name, not to a list of rules")
        if isinstance(self.rules, str | Mapping):
            raise InvalidInput("method.rules", self.rules, "must be a list, one rule per edge level")

    def is_implied(self, name: str) -> bool:
        return name == "name" and self.name == "mtgc" and not self.params

    @classmethod
    def from_bare(cls, value: object) -> dict[str, Any]:
        return {"name": value} if isinstance(value, str) else {"rules": value}


def _participation(value: Any) -> Any:
    """One entry per edge level, or the entry of the clients' level."""
    value = plain(value)
    if isinstance(value, list | tuple):
        return tuple(map(_participation_entry, value))
    return _participation_entry(value)


def _participation_entry(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value.lower() == "all"):
        return "all"
    return value if callable(value) else check_count_or_fraction("", value, f"must be {PARTICIPATION}")


PARTICIPATION = '"all", a fraction, a number or a function'


@section
class Schedule(Section):
    """When each level synchronises, which children take part, and whom aggregators wait for."""

    SHORTHAND: ClassVar[str] = "periods"

    periods: Annotated[Any, Unwrapped, Accepts("a list, one number per edge level")] = None
    """How often each level synchronises, in units of the level below, root first: `[30, 20]` is a
    global round of 30 group rounds, each of 20 local steps. By default 10 local steps, and 5
    synchronisations per level above."""
    unit: Annotated[Literal["steps", "epochs"], LowerCase] = "steps"
    """Unit of the last period: local steps, or passes of each client over its own samples."""
    participation: checked(_participation, PARTICIPATION) = "all"  # type: ignore[valid-type]
    """Children of each parent that take part in a round: `"all"`, a fraction (`0.5`), a number
    (`5`), or in Python a function of a `ParticipationContext` that returns a mask. One entry per
    edge level, root first, or the clients' alone."""
    wait: Annotated[Any, Accepts('"all", a table with deadline, first or buffer, or a list of these')] = "all"
    """Whom an aggregator waits for: `"all"`, `{ deadline = seconds }`, `{ first = number or
    fraction }` or `{ buffer = number }`. One entry per edge level, root first, or the clients'
    alone. All but `"all"` need a network."""


@section
class Cosine(Section):
    """Learning rate that falls along half a cosine to `floor` at the end of the run."""

    floor: NotNegative = 0.0
    """Learning rate at the end."""
    rounds: Count | None = None
    """Global rounds until then; those of the run unless given."""


@section
class StepDecay(Section):
    """Learning rate that is multiplied by `factor` after every `every` global rounds."""

    every: Count
    """Global rounds between two changes."""
    factor: Positive = 0.1
    """Factor of each change, at most 1."""

    def __post_init__(self) -> None:
        check_number("client.lr_schedule.factor", self.factor, above=0, at_most=1)


LR_SCHEDULES: dict[str, type[Cosine] | type[StepDecay] | None] = {"constant": None, "step": StepDecay, "cosine": Cosine}


def _lr_schedule(value: Any) -> Any:
    if callable(value) or isinstance(value, Cosine | StepDecay):
        return value
    name, params = name_and_params("", value, "a function of the round")
    name = check_choice("", name.lower(), LR_SCHEDULES)
    kind = LR_SCHEDULES[name]
    if kind is None:
        if params:
            raise InvalidInput("", value, "a constant rate has no parameters")
        return name
    return kind(**params)


def _clients_optimizer(value: Any) -> Any:
    return value.lower() if isinstance(value, str) and ":" not in value else value


def _transforms(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise InvalidInput("", value, "must be a list of functions")
    return tuple(value)


@section
class Client(Section):
    """What a client does between two synchronisations."""

    SHORTHAND: ClassVar[str] = "lr"

    lr: Positive = 0.1
    """Learning rate; `lr_schedule` changes it from round to round."""
    lr_schedule: checked(_lr_schedule, '"constant", a schedule\'s table, or a function of the round') = "constant"  # type: ignore[valid-type]
    """How the learning rate changes: `"constant"`, `{ name = "cosine", floor = 0.0 }`, `{ name =
    "step", every = 30, factor = 0.1 }`; in Python `Cosine(...)`, `StepDecay(...)`, or a function of
    the global round, counted from 0, that returns a factor."""
    batch_size: Count | Annotated[Literal["full"], LowerCase] = 32
    """Samples per local step. `"full"` takes all samples of a client, and so does a client that has
    fewer."""
    sampling: Annotated[Literal["shuffle", "replacement"], LowerCase] = "shuffle"
    """Shuffled passes over a client's samples, or every sample drawn at random with replacement."""
    optimizer: checked(_clients_optimizer, "a name, a table with a name, or an optimizer") = "sgd"  # type: ignore[valid-type]
    """`"sgd"`, `"adam"`, `"adamw"`, a table (`{ name = "sgd", momentum = 0.9, nesterov = true }`),
    `"my_file.py:make"`; in Python `SGD(momentum=0.9)`, `Adam()`, `AdamW()`, or an object with
    `init` and `step`."""
    optimizer_state: Annotated[Literal["reset", "keep"], LowerCase] = "reset"
    """What happens to the state of the optimizer when a client receives a model."""
    clip_norm: Positive | None = None
    """Largest norm of gradient plus corrections; a longer one is scaled down, before weight
    decay."""
    weight_decay: NotNegative = 0.0
    """Weight decay, added to the gradient before the optimizer."""
    gradient_transforms: checked(_transforms, "a list of functions") = None  # type: ignore[valid-type]
    """In Python: the chain between gradient and optimizer, instead of corrections, `clip_norm` and
    `weight_decay`."""

    def __post_init__(self) -> None:
        if self.gradient_transforms is not None:
            for name in ("clip_norm", "weight_decay"):
                if getattr(self, name):
                    told = "is part of the chain: put it into client.gradient_transforms"
                    raise InvalidInput(f"client.{name}", getattr(self, name), told)
        floor = self.lr_schedule.floor if isinstance(self.lr_schedule, Cosine) else 0.0
        check_number("client.lr_schedule.floor", floor, at_least=0, at_most=self.lr)

    @classmethod
    def as_table(cls, value: object) -> object:
        table = super().as_table(value)
        if isinstance(table, dict) and isinstance(table.get("optimizer"), Mapping) and "lr" in table["optimizer"]:
            raise InvalidInput("client.optimizer", table["optimizer"], "the learning rate is client.lr")
        return table


def _update_factor(value: Any) -> Any:
    value = plain(value)
    entries = value if isinstance(value, list | tuple) else [value]
    if not all(entry is None or (isinstance(entry, Real) and not isinstance(entry, bool)) for entry in entries):
        raise InvalidInput("", value, f"must be {UPDATE_FACTOR}")
    return tuple(value) if isinstance(value, list | tuple) else value


UPDATE_FACTOR = "a number, or a list of one per edge level"


@section
class Aggregation(Section):
    """Which updates aggregators accept."""

    update_limit: NotNegative | None = None
    """Reject an update whose largest entry is so many times that of the siblings' median; 0: never.
    By default 10,000 for rules that take a mean."""
    update_factor: checked(_update_factor, UPDATE_FACTOR) = None  # type: ignore[valid-type]
    """Reject an update whose norm is so many times the median norm of its siblings; one number, or
    one per edge level, root first. 0 or nothing: never."""


def _levels(value: Any) -> Any:
    value = plain(value)
    if not isinstance(value, list | tuple):
        raise InvalidInput("", value, f"must be {LEVELS}")
    levels = [entry.lower() if isinstance(entry, str) else whole(entry) for entry in value]
    for entry in levels:
        if entry != "clients" and (isinstance(entry, bool) or not isinstance(entry, int) or entry < 0):
            raise InvalidInput("", value, f"must be {LEVELS}")
    return tuple(entry for entry in levels if entry != 0)


LEVELS = 'a list of levels: numbers from 1, or "clients"'


@section
class Evaluation(Section):
    """What is measured, when, and at which values a run may stop."""

    SHORTHAND: ClassVar[str] = "metrics"

    metrics: Annotated[Any, Accepts("a list of metrics, or a table of them by name")] = None
    """Metrics besides the loss, and the accuracy of classes: a list of names (`["f1"]`), functions
    or torchmetrics objects, or a table by name."""
    every: Count = 1
    """Global rounds between two evaluations; the last round always is evaluated."""
    levels: checked(_levels, LEVELS) = ()  # type: ignore[valid-type]
    """Levels below the root whose every node is evaluated; the root always is."""
    stop_when: Annotated[Any, Accepts('"metric >= value", or a table of metrics and values')] = None
    """Values of metrics that end the run when all are reached: `"accuracy >= 0.9"`, or a table
    (`{ f1 = 0.8, loss = 0.3 }`)."""
    drift: Annotated[Literal["none", "drift", "ideal"], LowerCase] = "drift"
    """Whether each synchronisation measures how far the levels drift apart. `"ideal"` also
    compares corrections with ideal ones, and computes full gradients for it once per edge level
    and round."""


@section
class Execution(Section):
    """What computes a run. Nothing here changes a result but in its last bits."""

    SHORTHAND: ClassVar[str] = "device"

    device: Annotated[Any, Accepts('"cpu", "cuda" or "cuda:1"')] = "cpu"
    """`"cpu"`, `"cuda"`, or one of several GPUs: `"cuda:1"`."""
    engine: Annotated[Literal["auto", "loop", "stacked", "vmap"], LowerCase] | None = None
    """How clients are trained: one after another (`"loop"`, the reference), all at once
    (`"stacked"`), through `torch.func` (`"vmap"`), or by the fastest one measured (`"auto"`). By
    default `"stacked"` on a GPU; on a CPU the model and the number of clients decide."""
    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], LowerCase] = "fp32"
    """Type of the products in training; models and corrections stay in float32."""

    def __post_init__(self) -> None:
        if self.device in ("auto", "loop", "stacked", "vmap"):
            raise InvalidInput("execution.device", self.device, f'is an engine: engine = "{self.device}"')


def _tags(value: Any) -> Any:
    value = plain(value)
    if not isinstance(value, list | tuple) or not all(isinstance(tag, str) and tag for tag in value):
        raise InvalidInput("", value, f"must be {TAGS}")
    return tuple(value)


TAGS = "a list of words"


@section
class Storage(Section):
    """What is kept of a stored run besides its records."""

    checkpoint_every: CountOrZero = 10
    """Global rounds between checkpoints; 0: only when the run is stopped."""
    keep_state: Flag | None = None
    """Whether a finished run keeps the model and correction of every node, which it needs to go on
    for more rounds. Unless given, a run of its own keeps them, and the runs of a sweep or a
    search do not."""
    tags: checked(_tags, TAGS) = ()  # type: ignore[valid-type]
    """Words of your own by which the report's table of runs can be filtered: `["baseline"]`."""


SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "data": Data,
    "tree": Tree,
    "method": Method,
    "schedule": Schedule,
    "client": Client,
    "aggregation": Aggregation,
    "evaluation": Evaluation,
    "execution": Execution,
    "storage": Storage,
}
"""Sections of an experiment by name."""
