"""Every block of code in README, CONTRIBUTING and docs/ does what the page says it does.

Python is run, each page from top to bottom in one namespace and an empty folder. Configs, sweeps
and topologies are read. Commands are parsed by the command line itself, and on the pages that a new
user walks through also run.
"""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
import typer

from stratafl.cli.main import app, main
from stratafl.deploy.sites.topology import DeploymentTopology
from stratafl.experiment.experiment import Experiment
from stratafl.models import registry as models
from stratafl.network.specification import Network
from stratafl.rules import registry as rules
from stratafl.sweeps import Sweep
from tests.docs import blocks
from tests.docs.blocks import PAGES, ROOT, Block

READ = {path.relative_to(ROOT).as_posix(): blocks.read(path.read_text()) for path in PAGES}
SLOW = ("docs/tutorial.md", "docs/runs.md", "docs/how-to/sweep.md")
WALKED = ("docs/tutorial.md", *(name for name in READ if name.startswith("docs/own/")))
"""Pages whose commands are run, too, between their blocks."""
PYTHON = sorted({*WALKED, *(name for name, page in READ.items() if any(b.language == "python" for b in page.blocks))})
TOML = [(name, block) for name, page in READ.items() for block in page.blocks if block.language == "toml"]
MOST_NOT_RUN = 4
"""So many blocks may say that they are not run; each has its reason beside it."""


def test_the_reader_sees_blocks_markers_and_commands() -> None:
    page = blocks.read(
        "Say `stratafl\nruns`.\n\n    stratafl run a.toml   # go\n\n```bash\nstratafl demo\nls\n```\n\n"
        '<!-- not run: no such file -->\n```python title="a.py"\nx = 1\n```\n- item\n\n  ```toml\n  [a]\n  ```\n'
        "<!-- hidden\n```python\ny = 2\n```\n-->\n"
    )
    bash, first, table, second = page.blocks
    assert (bash.language, bash.line) == ("bash", 7)
    assert first == Block("python", "x = 1\n", 13, "a.py", "no such file")
    assert table == Block("toml", "[a]\n", 18)
    assert second.text == "y = 2\n" and not second.not_run
    assert page.commands == ["stratafl run a.toml   # go", "stratafl demo"]
    assert page.named == ["stratafl runs"]


def test_languages_are_those_that_are_tried() -> None:
    odd = [(name, block.line) for name, page in READ.items() for block in page.blocks
           if block.language not in blocks.LANGUAGES]  # fmt: skip
    assert not odd
    assert {"README.md", "docs/tutorial.md", "docs/concepts.md"} <= set(PYTHON)


def test_few_blocks_are_left_out_and_each_says_why() -> None:
    left_out = [(name, block.not_run) for name, page in READ.items() for block in page.blocks if block.not_run]
    assert len(left_out) <= MOST_NOT_RUN, left_out
    assert all(len(why.split()) > 3 for _, why in left_out)


# -- Python ----------------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, from which a program may import; what a page registers or draws stays in
    it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    # trackers tell nobody
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setattr(rules, "_entries", dict(rules._entries))
    monkeypatch.setattr(models, "_models", dict(models._models))
    with torch.random.fork_rng(devices=[]):
        yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PYTHON])
def test_python_runs(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    space: dict[str, object] = {"__name__": "page"}
    for block in READ[name].blocks:
        if block.not_run:
            continue
        if block.title:
            (workplace / block.title).write_text(block.text)
        elif block.language == "python":
            # so that a traceback shows the page's own line
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(ROOT / name), "exec"), space)
        elif block.language == "bash" and name in WALKED:
            for line in blocks.commands_of(block):
                assert run(line, monkeypatch) == 0, line
    assert "goes on without it" not in caplog.text, "a callback of the page's has failed"


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


# -- TOML and JSON ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "block"), TOML, ids=[f"{name}:{block.line}" for name, block in TOML])
def test_toml_is_a_config_a_sweep_a_topology_or_a_network(name: str, block: Block, tmp_path: Path) -> None:
    assert not block.not_run
    for path in (ROOT / "examples").glob("*.toml"):
        shutil.copy(path, tmp_path)
    for other in READ[name].blocks:  # a page's own files go before the examples
        if other.title:
            (tmp_path / other.title).write_text(other.text)
    path = tmp_path / "this.toml"
    path.write_text(block.text)
    values = tomllib.loads(block.text)
    if "grid" in values:
        assert Sweep.load(path).entries
    elif "config" in values:
        assert DeploymentTopology.load(path).experiment
    elif "tier" in values:
        assert Network.load(path).tiers
    else:
        assert values
        Experiment.from_table(values)


@pytest.mark.parametrize(
    "name", [name for name, page in READ.items() if any(b.language == "json" for b in page.blocks)]
)
def test_json_is_read(name: str) -> None:
    for block in READ[name].blocks:
        if block.language == "json":
            text = block.text if block.text.startswith(("{", "[")) else f"{{{block.text}}}"
            assert json.loads(text)


# -- commands --------------------------------------------------------------------------------------


@functools.cache
def whole_command() -> click.Command:
    return typer.main.get_command(app)


def parsed(line: str) -> str:
    """The full name of the command that a line calls; a command or an option that nobody knows
    raises."""
    words = shlex.split(line, comments=True)
    command = whole_command()
    context, name, rest = None, words[0], words[1:]
    while True:
        for parameter in command.params:  # what acts while it is parsed, such as --install-completion, must not
            parameter.callback = None
        context = command.make_context(name, rest, parent=context)
        left = [*context._protected_args, *context.args]
        if not isinstance(command, click.Group) or not left:
            return context.command_path
        _, found, rest = command.resolve_command(context, left)
        assert found is not None
        command, name = found, found.name or ""


@pytest.mark.parametrize("line", ["stratafl rn x.toml", "stratafl run --neuer x.toml", "stratafl data lst", "stratafl"
                                  " sweep"])  # fmt: skip
def test_a_wrong_command_is_seen(line: str) -> None:
    with pytest.raises(click.UsageError):
        parsed(line)


def complaint(line: str, in_prose: bool) -> str:
    """What is wrong with a line, as the command line says it; prose may leave arguments out."""
    try:
        parsed(line)
    except click.exceptions.Exit:  # --help
        return ""
    except (click.MissingParameter, click.BadOptionUsage) as problem:
        return "" if in_prose else problem.format_message()
    except click.UsageError as problem:
        return problem.format_message()
    files = [word for word in shlex.split(line, comments=True) if word.startswith("examples/")]
    return "".join(f"there is no {file}" for file in files if not (ROOT / file).exists())


@pytest.mark.parametrize("name", [name for name, page in READ.items() if page.commands or page.named])
def test_commands_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = READ[name]
    tried = [(line, complaint(line, in_prose=False)) for line in page.commands]
    tried += [(line, complaint(line, in_prose=True)) for line in page.named]
    assert not [(line, why) for line, why in tried if why]


def test_parsing_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parsed("stratafl --install-completion") == "stratafl"
    assert not list(tmp_path.iterdir())


def test_commands_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("stratafl data prepare cifar10 --from hub") == "stratafl data prepare"
    assert sum(len(page.commands) for page in READ.values()) > 60
