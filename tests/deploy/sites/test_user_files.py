"""A user's own plugins and models: copied by `init`, found by nodes wherever they run, and noticed
when they change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from stratafl import InvalidInput
from stratafl.deploy.host.supervise import run_sites
from stratafl.deploy.sites.assemble import Assembled
from stratafl.deploy.sites.provision import DeploymentTopology, check_made_from, provision
from stratafl.deploy.sites.site import Site
from stratafl.deploy.sites.user_files import import_from

RULE = """
from stratafl import Rule, register
from stratafl.core.rule import average

@register("{name}")
def rule() -> Rule:
    "An average of one's own."
    return average()
"""
MODEL = """
from pathlib import Path
from torch import nn
from {helper} import WIDTH

class Net(nn.Module):
    def __init__(self, input_shape, classes, words=""):
        super().__init__()
        self.words = Path(words).read_text() if words else ""
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] ** 2, WIDTH), nn.Linear(WIDTH, classes))

    def forward(self, x):
        return self.layers(x)
"""
CONFIG = """
plugins = ["{plugin}"]
[tree]
shape = "2"
[model]
name = "{model}"
{words}
[method]
rules = ["{rule}"]
[schedule]
periods = [2]
"""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    import_from()


def study(folder: Path, *, width: int = 3, helper: str = "helping", nested: bool = False) -> DeploymentTopology:
    """A config with a plugin, and a model that imports a module and reads a file from beside it."""
    places = {"model": "nets/net.py", "plugin": "rules/my.py"} if nested else {"model": "net.py", "plugin": "my.py"}
    texts = {places["plugin"]: RULE.format(name="mine"), places["model"]: MODEL.format(helper=helper)}
    module = Path(places["model"]).parent.joinpath(*helper.split(".")).with_suffix(".py")
    texts |= {str(module): f"WIDTH = {width}\n", "words.txt": "some words"}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if "." in helper:
        (folder / module).with_name("__init__.py").write_text("")
    words = 'words = "words.txt"'
    config = CONFIG.format(model=f"{places['model']}:Net", plugin=places["plugin"], rule="mine", words=words)
    (folder / "run.toml").write_text(config)
    (folder / "topology.toml").write_text('config = "run.toml"\n')
    return DeploymentTopology.load(folder / "topology.toml")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("helper", ["helping", "parts.sizes"])
def test_every_site_has_them_and_finds_them_wherever_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: str, nested: bool
) -> None:
    made = study(tmp_path / "study", helper=helper, nested=nested)
    folders = provision(made, tmp_path / "sites")
    assert not any(str(tmp_path) in each for each in sys.path) and helper not in sys.modules
    for path in (tmp_path / "study").iterdir():
        path.rename(tmp_path / f"gone-{path.name}")
    monkeypatch.chdir("/")
    for folder in folders.values():
        here = Assembled.of(folder)
        leaf = here.leaf() if here.site.is_leaf else None
        here.durable.close()
        assert here.job.parameters == 64 * 3 + 3 + 3 * 10 + 10
        assert leaf is None or leaf.samples > 0
        assert here.experiment.model.params["words"] == str(folder / "code" / "words.txt")
        assert sys.path[0] == str(folder / "code")


def test_another_run_of_this_process_has_its_own(tmp_path: Path) -> None:
    for width in (3, 5):
        (folder := tmp_path / str(width)).mkdir()
        site = provision(study(folder, width=width), folder / "sites")["0"]
        here = Assembled.of(site)
        here.durable.close()
        assert here.leaf().engine.training.flat.parameters == here.job.parameters == (64 + 1 + 10) * width + 10


def test_a_file_is_found_beside_the_config_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rule.py").write_text(RULE.format(name="elsewhere"))
    (tmp_path / "study").mkdir()
    config = '[tree]\nshape = "2"\n[method]\nrules = ["elsewhere"]\n[schedule]\nperiods = [2]\n'
    (tmp_path / "study" / "run.toml").write_text('plugins = ["own/rule.py"]\n' + config)
    (tmp_path / "study" / "topology.toml").write_text('config = "run.toml"\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"study/own/rule\.py': cannot be imported: no such Python file"):
        provision(DeploymentTopology.load(Path("study/topology.toml")), Path("sites"))
    (tmp_path / "own").rename(tmp_path / "study" / "own")
    site = Site.load(provision(DeploymentTopology.load(Path("study/topology.toml")), Path("sites"))["0"])
    assert site.names == {"own/rule.py": "rule.py"} and set(site.files) == {"rule.py"}


def test_a_file_that_is_not_there_is_said_before_anything_is_written(tmp_path: Path) -> None:
    made = study(tmp_path)
    (tmp_path / "my.py").unlink()
    with pytest.raises(InvalidInput, match=r"plugins = '.*/my\.py': cannot be imported: no such Python file"):
        provision(made, tmp_path / "sites")
    assert not (tmp_path / "sites").exists()


@pytest.mark.parametrize("name", ["net.py", "my.py", "helping.py", "words.txt"])
def test_a_site_whose_file_is_gone_or_changed_says_so_and_starts_nothing(tmp_path: Path, name: str) -> None:
    folder = provision(study(tmp_path), tmp_path / "sites")["0"]
    path = folder / "code" / name
    path.write_text(path.read_text() + "\n")
    for start in (Assembled.of, lambda folder: run_sites([folder], print)):
        with pytest.raises(InvalidInput, match=rf"{name}': was changed"):
            start(folder)
    path.unlink()
    for start in (Assembled.of, lambda folder: run_sites([folder], print)):
        with pytest.raises(InvalidInput, match=rf"{name}': is missing"):
            start(folder)


@pytest.mark.parametrize("name", ["net.py", "helping.py", "words.txt"])
def test_going_on_with_a_file_that_changed_since_is_refused(tmp_path: Path, name: str) -> None:
    made = study(tmp_path)
    root = provision(made, tmp_path / "sites")["root"]
    check_made_from(root, made)
    (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
    with pytest.raises(InvalidInput, match=rf"{name} was changed"):
        check_made_from(root, made)


def test_a_run_without_files_of_one_s_own_has_none(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[tree]\nshape = "2"\n[schedule]\nperiods = [2]\n')
    (tmp_path / "topology.toml").write_text('config = "run.toml"\n')
    folders = provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    assert not any((folder / "code").exists() for folder in folders.values())
