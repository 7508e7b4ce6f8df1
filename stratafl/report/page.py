"""One HTML page with everything in it: data, style and scripts. It asks nobody for anything.

What users wrote (names, config values) travels as JSON that the browser does not run, is put into
the page as text only, and a content security policy allows exactly the script below, by its hash,
and no connection elsewhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "state.js",
    "scale.js",
    "chart.js",
    "curves.js",
    "summary.js",
    "export.js",
    "timeline.js",
    "tree.js",
    "tables.js",
    "main.js",
)


def page(data: Mapping[str, Any], title: str = "stratafl report", *, live: bool = False) -> str:
    """live: whether the page asks the server it came from for newer data."""
    script = "\n".join(asset(name) for name in SCRIPTS)
    connections = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connections}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(title),
        "policy": html.escape(policy),
        "style": asset("page.css"),
        "data": embedded(data),
        "live": "live" if live else "",
        "script": script,
    }
    # one pass over the template, so that nothing inserted is looked at again
    pieces = asset("page.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def asset(name: str) -> str:
    """The text of a file that comes with the package for the page."""
    return files("stratafl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
