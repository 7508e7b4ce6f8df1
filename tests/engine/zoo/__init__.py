"""Small modules of every kind that users bring, by name."""

from tests.engine.zoo import (
    calling,
    families,
    images,
    in_place,
    layers,
    library,
    running,
    sequences,
    sharing,
    tables,
    unreached,
)
from tests.engine.zoo.entry import Entry

ZOO: dict[str, Entry] = {}
for _part in (layers, images, sequences, tables, unreached, sharing, in_place, running, calling, library, families):
    assert not ZOO.keys() & _part.ZOO.entries, ZOO.keys() & _part.ZOO.entries
    ZOO |= _part.ZOO.entries
