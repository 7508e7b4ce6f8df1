"""Runs of Python programs: kept like those of a config, killed at any moment, gone on with by the
same program."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from stratafl import Client, Data, Experiment, InvalidInput, Model, Simulation, StepDecay, Storage, Tree, mtgc
from stratafl.base.signals import Interrupted, InterruptExit
from stratafl.engine import factory
from stratafl.runs import read_run
from stratafl.runs.provenance import changes_since, identity
from stratafl.runs.session import RunSession
from tests.flat import client_options, simulate
from tests.runs.conftest import ROOT, Server, contents
from tests.runs.program import GROUP_ROUNDS
from tests.runs.states import everything
from tests.slow import slow_unless

PROGRAM = Path(__file__).parent / "program.py"
ENGINES = ["loop", "vmap", "stacked"]


@pytest.fixture(scope="module", params=slow_unless(lambda engine: engine == "stacked", ENGINES))
def uninterrupted(request, server: Server) -> tuple[str, Path]:
    """An engine, and a run of the program without interruption."""
    path = server.folder / f"whole-{request.param}"
    code, said = server.run("python", PROGRAM, path, request.param)
    assert (code, said) == (0, "1\n2\n3\n")
    return request.param, path


def place(run: Path) -> tuple[int, int]:
    """The newest checkpoint's."""
    newest = max(path.name for path in (run / "checkpoints").iterdir())
    return tuple(map(int, (newest + "-0").split("-")[:2]))


def test_killed_again_and_again(uninterrupted: tuple[str, Path], server: Server, tmp_path: Path) -> None:
    engine, undisturbed = uninterrupted
    run = tmp_path / "run"
    for moment in (1, 3, GROUP_ROUNDS + 2, 2 * GROUP_ROUNDS + 4):
        process = server.start("python", PROGRAM, run, engine, int(signal.SIGKILL), moment)
        assert process.ends() == -signal.SIGKILL, process.said()
    code, said = server.run("python", PROGRAM, run, engine)
    assert code == 0, said
    assert contents(run) == contents(undisturbed)


def test_a_signal_stops_a_run_after_the_current_group_round(
    uninterrupted: tuple[str, Path], server: Server, tmp_path: Path
) -> None:
    engine, undisturbed = uninterrupted
    run, done = tmp_path / "run", 0
    for number, moment in ((signal.SIGINT, 2), (signal.SIGTERM, 1), (signal.SIGINT, 4), (signal.SIGINT, 5)):
        code, said = server.run("python", PROGRAM, run, engine, int(number), moment)
        assert code == 128 + number, said
        hint = f"run: interrupted; the same program goes on from there: the run is kept in {run}"
        assert said.splitlines()[-1] == hint and "Traceback" not in said
        done += moment
        assert place(run) == divmod(done, GROUP_ROUNDS), "not a group round more"
        status = json.loads((run / "status.json").read_text())
        assert (status["round"], status["meetings"]) == divmod(done, GROUP_ROUNDS)
        assert (status["status"], status["reason"]) == ("interrupted", "it was stopped")
    code, said = server.run("python", PROGRAM, run, engine)
    assert code == 0, said
    assert contents(run) == contents(undisturbed)
    after = [(continuation["after"], continuation.get("meetings", 0)) for continuation in read_run(run).continued]
    assert after == [(0, 2), (0, 3), (1, 2), (2, 2)]


def test_stopped_and_killed_in_turn(server: Server, tmp_path: Path) -> None:
    """A kill falls back to the checkpoint inside the round."""
    run, undisturbed = tmp_path / "run", tmp_path / "whole"
    assert server.run("python", PROGRAM, undisturbed, "loop")[0] == 0
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        process = server.start("python", PROGRAM, run, "loop", int(number), 3)
        assert abs(process.ends()) % 128 == number, process.said()
    assert place(run) == divmod(6, GROUP_ROUNDS)
    assert server.run("python", PROGRAM, run, "loop")[0] == 0
    assert contents(run) == contents(undisturbed)


def test_a_finished_run_is_finished(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert server.run("python", PROGRAM, run, "loop")[0] == 0
    before = contents(run)
    code, said = server.run("python", PROGRAM, run, "loop")
    assert (code, said) == (0, "run: done already: 3 rounds in result().history\n1\n2\n3\n"), "no round is done again"
    assert contents(run) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("batch=5", "client.batch_size was 4 and is 5"),
        ('method="mtgc"', 'method.name was null and is "mtgc"'),
        ("seed=1", "seed was 0 and is 1"),
    ],
)
def test_another_run_is_refused_with_what_differs(change: str, said: str, server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert server.run("python", PROGRAM, run, "loop", int(signal.SIGINT), 2)[0] == 130
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, complaint = server.run("python", PROGRAM, run, "loop", 0, 0, change)
    assert code == 99 and said in complaint.splitlines()[-1] and "force=True" in complaint.splitlines()[-1]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_as_a_process_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), "run", "loop", str(int(signal.SIGINT)), "3"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 130
    assert ran.stderr.splitlines() == [
        "run: stopping when the clients next synchronise; once more to stop at once",
        "run: interrupted; the same program goes on from there: the run is kept in run",
    ]
    assert place(tmp_path / "run") == (0, 3)


# -- in this process -------------------------------------------------------------------------------


def study(model=nn.Linear, classes: int = 3, **more):
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 4, generator=random)
    targets = (inputs @ torch.randn(4, classes, generator=random)).argmax(dim=1)
    options = {"rounds": 3, "periods": [2, 2], "batch": 5, "test": (inputs, targets), **more}
    build = model if isinstance(model, nn.Module) else lambda: nn.Linear(4, classes)
    data = options.pop("data", (inputs, targets))
    return simulate(build, data, [range(10 * i, 10 * i + 10) for i in range(4)], "2x2", **options)


def test_it_is_listed_and_read_like_any_other(tmp_path: Path) -> None:
    study(save=tmp_path / "x").run()
    run = read_run(tmp_path / "x")
    assert (run.name, run.status, run.round, run.engine) == ("x", "done", 3, "loop")
    assert run.config["method"]["name"] == "mtgc" and run.config["schedule"]["periods"] == [2, 2]
    assert run.config["tree"]["shape"] == "2x2" and run.config["client"]["lr"] == 0.1
    assert run.tree["levels"][2]["samples"] == [10] * 4 and run.tree["classes"] == ["0", "1", "2"]
    objects = json.loads((run.path / "run.json").read_text())["objects"]
    assert objects["model.name"] == objects["data.source"] == "in memory"


def test_the_command_says_how_to_go_on(tmp_path: Path) -> None:
    study(save=tmp_path / "x")
    with pytest.raises(InvalidInput, match="objects of a Python program: run that again, with the same `save`"):
        RunSession.resume(tmp_path / "x")


def test_regression_is_kept_too(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(2)
    inputs, targets = torch.randn(40, 4, generator=random), torch.randn(40, 3, generator=random)
    more = {"data": (inputs, targets), "loss": nn.functional.mse_loss, "test": (inputs, targets)}
    study(save=tmp_path / "x", **more).run()
    run = read_run(tmp_path / "x")
    assert run.status == "done" and run.tree["classes"] == ["samples"] and run.tree["levels"][0]["samples"] == [40]
    with pytest.raises(InvalidInput, match=r"data\.source was changed"):
        study(save=tmp_path / "x", **{**more, "data": (inputs, targets + 1)})


class Pairs(Dataset):
    """Samples that are read one by one."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor):
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return self.inputs[number], int(self.targets[number])


class Named(nn.Linear):
    def forward(self, codes: torch.Tensor, more: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(codes + more)


INPUTS, TARGETS = torch.arange(160.0).reshape(40, 4) / 160, torch.arange(40) % 3
PARTS = [range(10 * client, 10 * client + 10) for client in range(4)]


@pytest.mark.parametrize(
    ("model", "data", "parts", "more"),
    [
        (nn.Linear, Pairs(INPUTS, TARGETS), PARTS, {}),
        (nn.Linear, Pairs(INPUTS, TARGETS), PARTS, {"lazy": True}),
        (nn.Linear, [Pairs(INPUTS[part], TARGETS[part]) for part in PARTS], None, {}),
        (Named, ({"codes": INPUTS, "more": INPUTS}, TARGETS), PARTS, {}),
    ],
    ids=["data set", "lazy", "one per client", "named inputs"],
)
def test_data_in_any_form(model, data, parts, more, tmp_path: Path) -> None:
    def make():
        options = {"periods": [2, 1], "rounds": 2, "batch": 5, "keep_state": True, **more}
        return simulate(lambda: model(4, 3), data, parts, "2x2", save=tmp_path / "x", **options)

    result = make().run()
    run = read_run(tmp_path / "x")
    assert run.status == "done" and run.tree["levels"][2]["samples"] == [10] * 4
    again = make()
    assert again.done and torch.equal(again.run().models[2], result.models[2])


def test_tables_to_test_on_are_compared_by_their_numbers(tmp_path: Path) -> None:
    import pandas as pd

    table, column = pd.DataFrame(INPUTS.numpy()), pd.Series(TARGETS.numpy())
    options = {"periods": [1, 1], "rounds": 1, "save": tmp_path / "x"}
    run = partial(simulate, lambda: nn.Linear(4, 3), (INPUTS, TARGETS), PARTS, "2x2", **options)
    run(test=(table, column)).run()
    assert run(test=(table.copy(), column)).done
    with pytest.raises(InvalidInput, match=r"data\.test was"):
        run(test=(table + 1, column))


def test_rates_of_numpy_are_kept_as_numbers(tmp_path: Path) -> None:
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    falling = client_options(lambda round: np.float32(0.5) / np.float32(1 + round))
    for name, rates, expected in ("same", np.float32(0.5), [0.5, 0.5]), ("falling", falling, [0.5, 0.25]):
        how = {"periods": [2], "rounds": 2, "leaf": rates, "save": tmp_path / name, "engine": "loop"}
        simulate(lambda: nn.Linear(3, 2), (x, y), [range(6), range(6, 12)], 2, **how).run()
        run = read_run(tmp_path / name)
        assert [record["lr"] for record in run.rounds] == expected and run.config["client"]["lr"] == (
            0.5 if name == "same" else 1.0
        )


def test_rounds_asked_for_one_by_one_are_kept_as_well(tmp_path: Path) -> None:
    uninterrupted = study(save=tmp_path / "whole", keep_state=True)
    uninterrupted.run()
    first = study()
    first.save(tmp_path / "x", checkpoint_every=1)
    next(first)
    (tmp_path / "link").symlink_to(tmp_path)
    again = study()
    again.save(tmp_path / "link/x", checkpoint_every=1, keep_state=True)
    assert len(again.history) == 1, "the same process, as a notebook does, and whatever leads to the folder"
    with pytest.raises(InvalidInput, match="this run was ended"):
        next(first)
    assert [record.round for record in again] == [2, 3]
    assert everything(again) == everything(uninterrupted)
    assert contents(tmp_path / "x")["model"] == contents(tmp_path / "whole")["model"]


def test_a_run_may_be_saved_after_it_began(tmp_path: Path) -> None:
    simulation = study()
    next(simulation)
    simulation.save(tmp_path / "x")
    simulation.run()
    assert [record["round"] for record in read_run(tmp_path / "x").rounds] == [1, 2, 3]
    late = study()
    next(late)
    with pytest.raises(InvalidInput, match="a run that has begun needs another one"):
        late.save(tmp_path / "x")


def test_what_is_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match="there is something else"):
        study(save=tmp_path / "x")
    (tmp_path / "empty").mkdir()
    study(save=tmp_path / "empty")
    with pytest.raises(InvalidInput, match="cannot write in"):
        study(save=tmp_path / "x" / "notes.txt" / "y")


def test_force_goes_on_and_notes_it(tmp_path: Path) -> None:
    first = study()
    first.save(tmp_path / "x", checkpoint_every=1)
    next(first)
    second = study(leaf=0.2)
    second.save(tmp_path / "x", force=True)
    second.run()
    assert read_run(tmp_path / "x").continued[0]["changed"] == ["client.lr was 0.1 and is 0.2"]


def test_a_finished_run_without_state_gives_its_result(tmp_path: Path, capsys) -> None:
    first = study(save=tmp_path / "x", keep_state=False).run()
    again = study(save=tmp_path / "x", keep_state=False)
    assert capsys.readouterr().err == "x: done already: 3 rounds in result().history\n"
    assert again.done and [record.round for record in again] == [1, 2, 3]
    result = again.run()
    assert [vars(record) for record in result.history] == [vars(record) for record in first.history]
    assert torch.equal(result.models[0], first.models[0])
    assert all(map(torch.equal, result.module.state_dict().values(), first.module.state_dict().values()))
    assert result.communication.level(1) == first.communication.level(1)
    assert result.communication.bytes_per_client == first.communication.bytes_per_client


@pytest.mark.parametrize(
    "question",
    [
        lambda run: run.result().models[1],
        lambda run: len(run.result().models),
        lambda run: run.result().corrections[0],
        lambda run: run.result().model_of("0/1"),
        lambda run: run.result().communication.client(0),
        lambda run: run.rows(0),
        lambda run: run.state(),
    ],
)
def test_what_a_finished_run_did_not_keep_is_one_line(question, tmp_path: Path) -> None:
    study(save=tmp_path / "x", keep_state=False).run()
    with pytest.raises(InvalidInput, match=r"storage\.keep_state = False: .* were not kept when this run was finished"):
        question(study(save=tmp_path / "x"))


def test_more_rounds_of_a_run_without_state_are_refused(tmp_path: Path) -> None:
    study(save=tmp_path / "x", keep_state=False).run()
    told = "this run is done, and its state was not kept: for more rounds begin another, with storage.keep_state = true"
    with pytest.raises(InvalidInput, match=told):
        study(save=tmp_path / "x", rounds=4)
    with pytest.raises(InvalidInput, match="has 3 rounds already, more than rounds = 2"):
        study(save=tmp_path / "x", rounds=2)
    with pytest.raises(InvalidInput, match="seed was 0 and is 1"):
        study(save=tmp_path / "x", seed=1)
    assert read_run(tmp_path / "x").status == "done"


def test_a_run_that_is_over_gives_its_records_again() -> None:
    simulation = study()
    assert [record.round for record in simulation] == [record.round for record in simulation] == [1, 2, 3]
    notes: list[int] = []

    class Listener:
        def on_round(self, record) -> None:
            notes.append(record.round)

    simulation.run(callbacks=[Listener()])  # type: ignore[list-item]
    assert notes == [], "no round is done again"


# -- without objects -------------------------------------------------------------------------------

PLAIN = """
rounds = 2

[tree]
shape = "2x2"

[data]
source = "synthetic"
arguments = { samples = 20, features = 5, classes = 3 }

[model]
name = "mlp"
hidden = [4]

[schedule]
periods = [2, 1]

[client]
lr = 0.05
lr_schedule = { name = "step", every = 1, factor = 0.5 }

[storage]
checkpoint_every = 1
"""


def plain_experiment(**changes) -> Experiment:
    experiment = Experiment(
        model=Model("mlp", params={"hidden": [4]}),
        data=Data("synthetic", arguments={"samples": 20, "features": 5, "classes": 3}),
        tree=Tree("2x2"),
        schedule=[2, 1],
        client=Client(0.05, lr_schedule=StepDecay(every=1, factor=0.5)),
        storage=Storage(checkpoint_every=1),
        rounds=2,
    )
    return experiment.replace(**changes)


def test_a_run_without_objects_is_that_of_its_config(tmp_path: Path) -> None:
    """A program and a config that say the same give the same run."""
    (tmp_path / "plain.toml").write_text(PLAIN)
    from_file = read_run(RunSession.start(Experiment.from_toml(tmp_path / "plain.toml"), "plain", tmp_path).run().path)
    plain_experiment().run(save=tmp_path / "python")
    from_python = read_run(tmp_path / "python")
    one, other = (json.loads((run.path / "run.json").read_text()) for run in (from_file, from_python))
    assert one["config"] == other["config"] and "objects" not in other
    assert (one["data"], one["inputs"]) == (other["data"], other["inputs"])
    assert identity(from_file) == identity(from_python)
    assert not changes_since(from_python, Experiment.from_toml(tmp_path / "plain.toml"))


def test_program_and_command_go_on_with_the_same_run(tmp_path: Path) -> None:
    plain_experiment().run(save=tmp_path / "whole")
    for folder in (tmp_path / "one", tmp_path / "other"):
        next(plain_experiment().start(save=folder))
    gc.collect()  # with its simulation a run ends in this process
    RunSession.resume(tmp_path / "one").run()
    (tmp_path / "plain.toml").write_text(PLAIN)
    begun = RunSession.start(Experiment.from_toml(tmp_path / "plain.toml"), "plain", tmp_path)

    def stop(record) -> None:
        raise Interrupted(2)

    with pytest.raises(Interrupted):
        begun.run(stop)
    for folder in (tmp_path / "other", begun.path):
        plain_experiment().run(save=folder)
    models = [
        (folder / "model.safetensors").read_bytes()
        for folder in (tmp_path / "whole", tmp_path / "one", tmp_path / "other", begun.path)
    ]
    assert models == [models[0]] * 4


def test_storage_of_the_experiment_is_that_of_save(tmp_path: Path) -> None:
    experiment = plain_experiment()
    experiment.run(save=tmp_path / "x")
    assert [path.name for path in (tmp_path / "x" / "checkpoints").iterdir()] == ["000002"], "kept unless told not to"
    assert len(experiment.replace(rounds=3).run(save=tmp_path / "x").history) == 3
    experiment.replace(storage={"keep_state": False}).run(save=tmp_path / "y")
    assert not list((tmp_path / "y" / "checkpoints").iterdir())
    simulation = experiment.start()
    simulation.save(tmp_path / "z", keep_state=False)
    assert read_run(tmp_path / "z").config["storage"] == {"checkpoint_every": 1, "keep_state": False, "tags": []}


def test_an_interrupt_is_left_alone_where_nothing_is_saved(tmp_path: Path) -> None:
    def stop(draw) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the interrupt comes first")

    with pytest.raises(KeyboardInterrupt) as plain:
        study(participation=[None, stop]).run()
    assert not isinstance(plain.value, InterruptExit)


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    simulation = study(save=tmp_path / "x", participation=[None, lambda draw: 1 / 0])
    with pytest.raises(Exception, match="division by zero"):
        simulation.run()
    run = read_run(tmp_path / "x")
    assert run.status == "failed" and "ZeroDivisionError" in run.reason


def test_events_for_tensorboard(tmp_path: Path) -> None:
    simulation = study()
    simulation.save(tmp_path / "x", tensorboard=True)
    simulation.run()
    assert list((tmp_path / "x" / "tensorboard").iterdir())


def test_objects_are_named_by_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Linear(4, 3)\n\n"
        "def loss(out, y):\n    return nn.functional.cross_entropy(out, y)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_nets  # type: ignore[import-not-found]

    def make():
        options = torch.zeros(40, 4), torch.zeros(40, dtype=torch.int64)
        parts = [range(10 * i, 10 * i + 10) for i in range(4)]
        chain = client_options(0.1, clip_norm=1.0)
        return simulate(
            my_nets.net, options, parts, "2x2", [mtgc("keep"), mtgc("zero")], periods=[2, 2], rounds=2,
            loss=my_nets.loss, leaf=chain, save=tmp_path / "x",
        )  # fmt: skip

    make()
    described = json.loads((tmp_path / "x" / "run.json").read_text())
    assert described["objects"]["model.name"] == "my_nets:net" and described["objects"]["loss"] == "my_nets:loss"
    assert described["config"]["model"]["name"] == {"name": "my_nets:net"}
    assert [rule["name"] for rule in described["config"]["method"]["rules"]] == ["mtgc", "mtgc"]
    assert described["config"]["method"]["rules"][0] != described["config"]["method"]["rules"][1]
    assert described["config"]["client"]["clip_norm"] == 1.0
    assert list(described["inputs"]["files"]) == ["my_nets"]
    make()
    with (tmp_path / "my_nets.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(InvalidInput, match="my_nets was changed"):
        make()
    shutil.rmtree(tmp_path / "x")
    make()


@pytest.mark.parametrize("first", ["loop", "stacked"])
def test_an_engine_by_default_trains_the_run_to_its_end(first: str, tmp_path: Path, monkeypatch) -> None:
    """Also where the default is another when the program is run again."""

    def made(default: str, path: Path, engine: str = "auto") -> Simulation:
        monkeypatch.setattr(factory, "MIN_CLIENTS", 1 if default == "stacked" else 1000)
        data = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
        build = partial(nn.Linear, 4, 3)
        parts = torch.arange(40).chunk(4)
        simulation = simulate(build, data, parts, "2x2", periods=[2, 2], rounds=3, batch=5, engine=engine)
        simulation.save(path, checkpoint_every=1)
        return simulation

    undisturbed = made(first, tmp_path / "whole", first).run()
    next(iter(made(first, tmp_path / "run")))
    going_on = made("stacked" if first == "loop" else "loop", tmp_path / "run")
    assert going_on.engine.name == first and len(going_on.history) == 1
    assert torch.equal(going_on.run().models[0], undisturbed.models[0])
