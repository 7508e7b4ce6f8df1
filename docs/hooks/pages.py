"""Pages of the site that are no files in docs/, so that nothing is written twice.

The changelog and the contributor's guide are those at the root of the repository, the command
line's reference is its own help, and a notebook becomes a page with its pictures.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from stratafl.cli.main import app

ROOT = Path(__file__).parents[2]
FROM_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
PICTURES = {"image/png": "png", "image/svg+xml": "svg"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs: add what is not there as a file."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=from_root((ROOT / source).read_text())))
    files.append(File.generated(config, "cli.md", content=command_line()))
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        text, pictures = notebook(path.stem, json.loads(path.read_text()))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


OUTSIDE = {
    "torch.Tensor": "https://docs.pytorch.org/docs/stable/tensors.html",
    "torch.dtype": "https://docs.pytorch.org/docs/stable/tensor_attributes.html",
    "torch.nn.Module": "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html",
    "numpy.ndarray": "https://numpy.org/doc/stable/reference/generated/numpy.ndarray.html",
    "numpy.random.Generator": "https://numpy.org/doc/stable/reference/random/generator.html",
}
"""Pages of the types of other packages."""
STANDARD = "https://docs.python.org/3/library/{module}.html#{name}"


def on_post_page(output: str, **_: Any) -> str:
    """Called by mkdocs: make links of types of PyTorch, NumPy and Python in signatures."""
    return re.sub(r'<span title="([\w.]+)">(\w+)</span>', _linked, output)


def _linked(span: re.Match[str]) -> str:
    name, shown = span.groups()
    module, _, attribute = name.rpartition(".")
    page = OUTSIDE.get(name)
    if page is None and attribute and module in ("collections.abc", "pathlib", "typing"):
        page = STANDARD.format(module=module, name=name)
    return span[0] if page is None else f'<a href="{page}" title="{name}">{shown}</a>'


def from_root(text: str) -> str:
    """A page of the root, with its links as they are within docs/."""
    return re.sub(r"\]\(docs/", "](", text)


# -- the command line ------------------------------------------------------------------------------


def command_line() -> str:
    """Every command with its arguments and options."""
    command = typer.main.get_command(app)
    parts = ["# Commands and options", "What `stratafl COMMAND --help` says, of every command."]
    return "\n\n".join([*parts, *_commands(command, "stratafl")]) + "\n"


def _commands(command: click.Command, words: str) -> Iterator[str]:
    below = getattr(command, "commands", None)
    if words != "stratafl":
        yield f"{'##' if words.count(' ') == 1 else '###'} `{words}`"
        yield _plain(command.help or "")
    if below:
        for name, each in below.items():
            yield from _commands(each, f"{words} {name}")
        return
    context = click.Context(command, info_name=words)
    yield f"```text\n{' '.join([words, *command.collect_usage_pieces(context)])}\n```"
    rows = [_row(each, context) for each in command.params]
    yield "\n".join(["| | | default |", "|---|---|---|", *rows])


def _row(parameter: click.Parameter, context: click.Context) -> str:
    help = _plain(getattr(parameter, "help", None) or "")
    if isinstance(parameter, click.Argument):
        return f"| `{parameter.make_metavar(context)}` | {help} | |"
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    is_flag = getattr(parameter, "is_flag", False)
    metavar = "" if is_flag else f" {parameter.make_metavar(context)}"
    default = parameter.to_info_dict()["default"]
    is_told = default not in (None, (), []) and default is not False and not callable(default)
    return f"| `{names}{metavar}` | {help} | {f'`{default}`' if is_told else ''} |"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# -- notebooks -------------------------------------------------------------------------------------


def notebook(name: str, content: Mapping[str, Any]) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page of Markdown, and its pictures by file name."""
    title, *cells = content["cells"]
    parts = ["".join(title["source"]), f"[Download this notebook]({name}.ipynb){{ .md-button download }}"]
    pictures: dict[str, bytes] = {}
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            parts.append(_output(output, name, pictures))
    return "\n\n".join(filter(None, parts)) + "\n", pictures


def _output(output: Mapping[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    data = output.get("data", {})
    for kind, ending in PICTURES.items():
        if kind in data:
            file = f"{name}_{len(pictures)}.{ending}"
            text = "".join(data[kind])
            pictures[file] = text.encode() if ending == "svg" else base64.b64decode(text)
            return f"![{name}, picture {len(pictures)}]({file})"
    if "text/html" in data:
        return f'<div class="output" markdown="0">{"".join(data["text/html"])}</div>'
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"```{{ .text .output }}\n{text}\n```" if text else ""
