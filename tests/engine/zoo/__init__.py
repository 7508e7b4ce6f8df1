"""Small modules of every kind that users bring, by name."""

from tests.engine.zoo import layers, library, networks, unusual
from tests.engine.zoo.entry import Entry

ZOO: dict[str, Entry] = {}
for _part in (layers, networks, unusual, library):
    assert not ZOO.keys() & _part.ZOO.entries
    ZOO |= _part.ZOO.entries
