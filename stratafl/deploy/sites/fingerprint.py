"""What a site works with: its config, the version of the protocol and the user's files. All of a
run must have the same; the version of stratafl is told beside it.

What has its default is left out, so that a version with one more key of the config works with one
that has not got it. A version in which a default is another one, or a key means something else, has
another `PROTOCOL`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from stratafl.base import files, version
from stratafl.base.errors import one_line
from stratafl.deploy.protocol.job import VERSION
from stratafl.deploy.protocol.messages import PROTOCOL
from stratafl.deploy.sites.user_files import CODE
from stratafl.experiment.experiment import Experiment
from stratafl.runs import format
from stratafl.runs.provenance import shorten

LONGEST = 60
"""Characters of a value that is told; of a longer one, as of a file, a digest is."""


def made_of(folder: Path, experiment: Experiment, code: Mapping[str, str]) -> dict[str, str]:
    """One short text for each part. `code` are the files as `init` put them there; they are read as
    they are now."""
    told = {VERSION: version.__version__, "protocol": str(PROTOCOL)}
    usual = _texts(Experiment())
    told |= {key: text for key, text in _texts(experiment).items() if text != usual.get(key)}
    for place in code:
        told[f"{CODE}/{place}"] = _digest(files.read_bytes(folder / CODE / place))
    return told


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What differs, in one line, as far as both sides told of it. What only one of them did has its
    default with the other, if they speak the same protocol."""
    if mine.get("protocol") == theirs.get("protocol"):
        usual = {key: text for key, text in _texts(Experiment()).items() if key in mine.keys() ^ theirs.keys()}
        mine, theirs = {**usual, **mine}, {**usual, **theirs}
    both = [key for key in sorted(mine.keys() & theirs.keys()) if mine[key] != theirs[key]]
    told = [f"{key} is {one_line(theirs[key], LONGEST)} there and {one_line(mine[key], LONGEST)} here" for key in both]
    alone = sorted(mine.keys() ^ theirs.keys())
    return shorten(told or [f"{one_line(key, LONGEST)} is only {'here' if key in mine else 'there'}" for key in alone])


def _texts(experiment: Experiment) -> dict[str, str]:
    """Each key of a config, and its value as a short text."""
    texts = {key: json.dumps(value) for key, value in format.flat_config(experiment.to_table()).items()}
    return {key: text if len(text) <= LONGEST else _digest(text.encode()) for key, text in texts.items()}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
