"""An experiment: everything that decides a run, as one immutable, checked value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.experiment import toml
from stratafl.experiment.errors import section
from stratafl.experiment.fields import (
    Accepts,
    Count,
    Integer,
    Option,
    Section,
    checked,
    options,
    schema,
    subsection,
)
from stratafl.experiment.sections import (
    SECTIONS,
    Aggregation,
    Client,
    Cosine,
    Data,
    Evaluation,
    Execution,
    Method,
    Model,
    Schedule,
    StepDecay,
    Storage,
    Tree,
)

if TYPE_CHECKING:
    from stratafl.distributed.communicator import Communicator
    from stratafl.simulation.result import Result
    from stratafl.simulation.simulation import Simulation

TUNE = "tune"
"""Table of a config that is no part of the run: what `stratafl tune` searches."""


def _plugins(value: Any) -> Any:
    value = [value] if isinstance(value, str | Path) else value
    if not isinstance(value, list | tuple) or not all(isinstance(path, str | Path) for path in value):
        raise InvalidInput("", value, f"must be {PLUGINS}")
    return tuple(map(str, value))


PLUGINS = "a list of paths of Python files"


@section
class Experiment(Section):
    """Everything that decides a run: model, data, tree, method, and how they are put together."""

    model: subsection(Model, str) = field(default_factory=Model)  # type: ignore[valid-type]
    data: subsection(Data, str) = field(default_factory=Data)  # type: ignore[valid-type]
    tree: subsection(Tree, str | int | list | dict) = field(default_factory=Tree)  # type: ignore[valid-type]
    method: subsection(Method, str | list) = field(default_factory=Method)  # type: ignore[valid-type]
    schedule: subsection(Schedule, list) = field(default_factory=Schedule)  # type: ignore[valid-type]
    client: subsection(Client, float) = field(default_factory=Client)  # type: ignore[valid-type]
    aggregation: subsection(Aggregation) = field(default_factory=Aggregation)  # type: ignore[valid-type]
    evaluation: subsection(Evaluation, str | list) = field(default_factory=Evaluation)  # type: ignore[valid-type]
    network: Annotated[Any, Accepts("a preset's name, the path of a TOML file, or a network's tables")] = None
    """Network in whose virtual time the run goes on: the name of a preset, the path of a TOML file,
    its tables, or in Python a `Network`."""
    execution: subsection(Execution, str) = field(default_factory=Execution)  # type: ignore[valid-type]
    storage: subsection(Storage) = field(default_factory=Storage)  # type: ignore[valid-type]
    rounds: Count = 20
    """Global rounds."""
    seed: Integer = 0
    """Seed of all random numbers."""
    loss: Annotated[Any, Accepts('a name, a table with a name, "file.py:loss" or a function')] = None
    """Loss: a name (`"mse"`), a table (`{ name = "huber", delta = 0.5 }`), `"my_file.py:loss"`,
    or in Python a function `(outputs, targets) -> scalar`. Cross-entropy of class labels unless
    given."""
    plugins: checked(_plugins, PLUGINS) = ()  # type: ignore[valid-type]
    """Python files that are imported first, so that the rules and models they register have
    names."""

    # -- files and tables --------------------------------------------------------------------------

    @classmethod
    def from_toml(cls, path: str | Path, changes: Iterable[str] = ()) -> Experiment:
        """Read a TOML file, with "section.key=value" changes on top; its paths start at its
        folder."""
        return cls.from_table(toml.read_tables(Path(path), changes))

    @classmethod
    def from_table(cls, tables: Mapping[str, Any]) -> Experiment:
        """Read nested tables, such as those of a TOML file; the table `[tune]` is no part of a
        run."""
        toml.check_plain(tables)
        if not isinstance(tables, Mapping):
            raise InvalidInput("config", tables, "must be a table")
        return cls(**{key: value for key, value in tables.items() if key != TUNE})

    def to_table(self, *, defaults: bool = True) -> dict[str, Any]:
        """The experiment as nested tables of plain values.

        defaults: include options that have their default values.
        """
        table: dict[str, Any] = {}
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, Section):
                inner = value.changed() if not defaults else {f.name: getattr(value, f.name) for f in fields(value)}  # type: ignore[arg-type]
                if inner:
                    table[option.name] = {
                        key: plain_value(f"{option.name}.{key}", entry) for key, entry in inner.items()
                    }
            elif defaults or option.name in self.changed():
                table[option.name] = plain_value(option.name, value)
        return table

    def to_toml(self) -> str:
        """Text of a TOML file with the options that differ from their defaults; raises for objects
        of a program."""
        tables = self.to_table(defaults=False)
        for name in ("model", "method"):
            inline = tables.get(name, {}).pop("params", {}) if isinstance(tables.get(name), dict) else {}
            known = options({"model": Model, "method": Method}[name])
            if set(inline) & set(known):
                tables[name]["params"] = inline
            elif inline:
                tables[name] = {"name": getattr(self, name).name, **tables[name], **inline}
        return toml.write_tables(tables)

    def replace(self, changes: Mapping[str, Any] | None = None, /, **sections: Any) -> Experiment:
        """The experiment with changes by dotted key, `replace({"client.lr": 0.05})`, or by section,
        `replace(seed=1, method="fedavg")`."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= sections
        tables: dict[str, dict[str, Any]] = {}
        for key, value in (changes or {}).items():
            name, _, rest = key.partition(".")
            if name not in values:
                raise unknown_name("experiment key", name, values)
            if not rest:
                values[name] = value
                continue
            whole = values[name]
            if not isinstance(whole, Section):
                raise InvalidInput(key, value, f"{name} has no options")
            table = tables.setdefault(name, {f.name: getattr(whole, f.name) for f in fields(whole)})  # type: ignore[arg-type]
            if type(whole).INLINE and rest not in table:
                table[type(whole).INLINE] = {**table[type(whole).INLINE], rest: value}
            elif rest in table:
                table[rest] = value
            else:
                raise unknown_name(f"{name} key", rest, table)
        return Experiment(**{**values, **tables})

    def one_of_many(self) -> Experiment:
        """The experiment as one of a sweep or a search, whose runs keep no state unless it says
        so."""
        return self.replace({"storage.keep_state": False}) if self.storage.keep_state is None else self

    # -- runs --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if something is wrong that can be told without data and model; the error has all
        mistakes."""
        from stratafl.experiment.algorithm import mistakes
        from stratafl.experiment.errors import raise_first

        found = mistakes(self)
        if found:
            raise_first(found)

    def start(self, *, save: str | Path | None = None, ranks: Communicator | None = None) -> Simulation:
        """Build the simulation; iterate over it for a record per global round.

        save: a folder to keep the run in; a run that is there already goes on. ranks: the processes
            that share the run.
        """
        from stratafl.simulation.build import build

        simulation = build(self, ranks)
        if save is not None:
            simulation.save(save)
        return simulation

    def run(
        self,
        *,
        save: str | Path | None = None,
        ranks: Communicator | None = None,
        callbacks: Sequence[Any] = (),
        progress: bool | None = None,
    ) -> Result:
        """Run all rounds, or the remaining ones of a run that is kept in `save`.

        callbacks: objects that are called at the beginning, after every round and at the end.
            progress: whether to show a progress bar; unless given, at a terminal and in a notebook.
        """
        return self.start(save=save, ranks=ranks).run(progress=progress, callbacks=callbacks)

    # -- what an option means ----------------------------------------------------------------------

    @classmethod
    def explain(cls, key: str) -> str:
        """Type, default and meaning of an option, or the options of a section, by its dotted
        key."""
        known = all_options()
        alike = [name for name in known if name.rpartition(".")[2] == key]
        if key not in SECTIONS and len(alike) == 1:
            key = alike[0]
        if key in known:
            option = known[key]
            meaning = " ".join(option.meaning.split())
            return f"{key}: {option.accepts} (default: {shown_default(option)})\n  {meaning}"
        inside = [option for name, option in known.items() if name.startswith(f"{key}.")]
        if not inside:
            raise unknown_name("option", key, [*known, *SECTIONS])
        about = (SECTIONS[key].__doc__ or "").partition("\n")[0]
        return "\n".join([f"{key}: {about}", *(f"  {option.key}: {option.accepts}" for option in inside)])

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """JSON schema of a config, for editors."""
        described = schema(cls)
        described["properties"][TUNE] = {"type": "object", "description": "What `stratafl tune` searches."}
        return described


def all_options() -> dict[str, Option]:
    """Every option of an experiment by its dotted key."""
    found: dict[str, Option] = {}
    for name, option in options(Experiment).items():
        found |= (
            {name: option}
            if option.section is None
            else {o.key: o for o in options(option.section, f"{name}.").values()}
        )
    return found


def shown_default(option: Option) -> str:
    """Default value of an option as a file would have it."""
    value = option.default()
    return "none" if value is None or value == () or value == {} else toml.toml_value(value)


def plain_value(key: str, value: Any) -> Any:
    """A value as TOML and JSON can write it; raises for an object of a program."""
    if isinstance(value, Cosine | StepDecay):
        name = "cosine" if isinstance(value, Cosine) else "step"
        return {"name": name, **value.changed()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [plain_value(key, entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): plain_value(f"{key}.{name}", entry) for name, entry in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidInput(key, value, "is an object of a program, and cannot be written to a file")


def simulate(
    model: Any = "mlp",
    data: Any = "digits",
    tree: Any = "4x5",
    method: Any = "mtgc",
    *,
    rounds: int = 20,
    save: str | Path | None = None,
    ranks: Communicator | None = None,
    **sections: Any,
) -> Simulation:
    """Build a simulation in one call: iterate over it for a record per global round, or call `run`.

    The arguments are the options of `Experiment`, each a section, its table, or the one value that
    it is mostly about: `client=0.05` is `client=Client(lr=0.05)`. The others are schedule, client,
    aggregation, evaluation, network, execution, storage, seed, loss and plugins.

    save: a folder to keep the run in; a run that is there already goes on. ranks: the processes
        that share the run.
    """
    experiment = Experiment(model=model, data=data, tree=tree, method=method, rounds=rounds, **sections)
    return experiment.start(save=save, ranks=ranks)
