"""The notebooks run from their first cell to their last, and are committed with what they show."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_there_and_small(path: Path) -> None:
    content = json.loads(path.read_text())
    assert path.stat().st_size < MOST_BYTES
    outputs = [output for cell in content["cells"] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not any(output.get("name") == "stderr" for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # Jupyter's own are not ours to mend
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    before = [len(cell.get("outputs", [])) for cell in notebook.cells]
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        coalesce_streams=True,  # a kernel may send what one cell prints in several messages
        resources={"metadata": {"path": tmp_path}},
    )
    client.execute()  # a cell that raises ends the test with its traceback
    assert [len(cell.get("outputs", [])) for cell in notebook.cells] == before
