"""Small modules of every kind that users bring, by name."""

from tests.engine.zoo import (
    calling,
    computing,
    families,
    images,
    in_place,
    layers,
    library,
    running,
    sequences,
    sharing,
    tables,
    tasks,
    unreached,
)
from tests.engine.zoo.entry import Entry

PARTS = (
    layers, images, sequences, tables, unreached, sharing, in_place, running, calling, library, families, tasks,
    computing,
)  # fmt: skip
ZOO: dict[str, Entry] = {}
for _part in PARTS:
    assert not ZOO.keys() & _part.ZOO.entries, ZOO.keys() & _part.ZOO.entries
    ZOO |= _part.ZOO.entries
