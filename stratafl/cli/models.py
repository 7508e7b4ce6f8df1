"""`stratafl models`: the networks that are known by name."""

from __future__ import annotations

import dataclasses
import json

from stratafl.cli.options import AsJson
from stratafl.cli.tables import Column, print_sentence, print_table


def models_command(as_json: AsJson = False) -> None:
    """List the models, with their parameters at the sizes of the paper's experiments."""
    from stratafl.models.registry import catalogue

    known = catalogue()
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in known]))
        return
    columns = (
        Column("name"),
        Column("what it is", prose=True),
        Column("input"),
        Column("classes", right=True),
        Column("parameters", right=True),
    )
    rows = [
        (each.name, each.description, "x".join(map(str, each.input_shape)), str(each.classes), f"{each.parameters:,}")
        for each in known
    ]
    print_table(columns, rows)
    print_sentence('your own: `name = "my_package.module:Class"` or `name = "my_model.py:Class"` in [model]')
