"""The site: complete, offline, and its generated parts those of the package."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import stratafl
from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"


def loaded(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference() -> None:
    named = set(re.findall(r"^::: stratafl\.(\w+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE))
    assert set(stratafl.__all__) - {"__version__", "price"} <= named


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_pages_at_the_root_lead_somewhere(name: str) -> None:
    """Those within docs/ are held by the site's strict build."""
    prose = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


def test_the_reference_of_options_is_as_written_from_them() -> None:
    page = DOCS / "config.md"
    assert loaded(DOCS / "hooks/options.py").with_reference(page.read_text()) == page.read_text()  # type: ignore[attr-defined]


def test_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    script = loaded(DOCS / "pictures/draw.py")
    script.HERE = tmp_path  # type: ignore[attr-defined]
    script.main()  # type: ignore[attr-defined]
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn and drawn == {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}


def test_arguments_in_docstrings_are_shown_as_a_list() -> None:
    listed = loaded(DOCS / "hooks/arguments.py").listed  # type: ignore[attr-defined]
    text = "Do it.\n\nmodel: a module.\ndata, test: pairs of\n    tensors.\n\nNote: this is prose."
    shown = "Do it.\n\n- `model`: a module.\n- `data, test`: pairs of\n  tensors.\n\nNote: this is prose."
    assert listed(text) == shown.replace("Note:", "- `Note`:")


def test_types_of_other_packages_are_links() -> None:
    hook = loaded(DOCS / "hooks/pages.py")
    signature = '<span title="torch.Tensor">Tensor</span> <span title="collections.abc.Sequence">Sequence</span>'
    linked = hook.on_post_page(signature + '<span title="int">int</span>')  # type: ignore[attr-defined]
    assert linked.count('<a href="https://docs.') == 2 and '<span title="int">' in linked
    assert "library/collections.abc.html#collections.abc.Sequence" in linked


def test_a_notebook_becomes_a_page_with_its_pictures() -> None:
    hook = loaded(DOCS / "hooks/pages.py")
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [
            {"output_type": "stream", "name": "stdout", "text": ["1\n"]},
            {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["<Figure>"]}},
        ]},
    ]  # fmt: skip
    text, pictures = hook.notebook("mine", {"cells": cells})  # type: ignore[attr-defined]
    assert text.startswith("# Title\n\n[Download this notebook](mine.ipynb)")
    assert "```python\nprint(1)\n```\n\n```{ .text .output }\n1\n```" in text
    assert pictures == {"mine_0.png": b"\0\0\0"} and "](mine_0.png)" in text


def test_the_command_line_is_in_its_reference() -> None:
    page = loaded(DOCS / "hooks/pages.py").command_line()  # type: ignore[attr-defined]
    assert "## `stratafl run`" in page and "### `stratafl data prepare`" in page
    assert "`--set, -s SECTION.KEY=VALUE`" in page and "### `stratafl cost timeline`" in page


# -- built -----------------------------------------------------------------------------------------


class Asked(HTMLParser):
    """What a browser fetches by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") not in ("stylesheet", "icon", "preconnect", "preload"):
            return
        self.addresses += [given[name] or "" for name in ("src", "href") if name in given and tag != "a"]


@pytest.mark.slow
def test_the_site_is_built_strictly_and_asks_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        asked = Asked()
        asked.feed(page.read_text())
        assert asked.addresses and not [each for each in asked.addresses if re.match(r"(https?:)?//", each)], page
    reference = (tmp_path / "site" / "api.html").read_text()
    assert '; default: "steps".' in reference
    assert re.search(r'<a [^>]*href="#stratafl\.core\.rule\.Rows"', reference), "types are links"
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style
