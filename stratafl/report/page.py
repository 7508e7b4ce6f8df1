"""One HTML page with everything in it: data, style, scripts and the plotting library. It asks nobody for anything.

What users wrote (names, config values) travels as JSON that the browser does not run, is put into the page as text
only, and a content security policy allows exactly the scripts below, by their hashes, and no connection elsewhere.
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

from stratafl.errors import MissingExtra

SCRIPTS = ("state.js", "charts.js", "tree.js", "tables.js", "main.js")


def page(data: Mapping[str, Any], title: str = "stratafl report", *, live: bool = False) -> str:
    """live: whether the page asks the server it came from for newer data."""
    scripts = [plotly_source(), "\n".join(asset(name) for name in SCRIPTS)]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    connections = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connections}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(title),
        "policy": html.escape(policy),
        "style": asset("page.css"),
        "data": embedded(data),
        "live": "live" if live else "",
        "plotly": scripts[0],
        "script": scripts[1],
    }
    # one pass over the template, so that nothing inserted is looked at again
    pieces = asset("page.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def plotly_source() -> str:
    """plotly.js as the package ships it, made safe to stand in a script element."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtra("a report", "plotly", "report") from None
    return get_plotlyjs().replace("</script", "<\\/script")


@functools.cache
def asset(name: str) -> str:
    return files("stratafl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
