"""What a site works with: its config, its version of stratafl and the user's files. All of a run
must have the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from stratafl.base import files, version
from stratafl.base.errors import line
from stratafl.config.schema import Config
from stratafl.deploy.protocol.messages import PROTOCOL
from stratafl.deploy.sites.user_files import CODE
from stratafl.runs import layout
from stratafl.runs.origins import in_short

LONGEST = 60
"""Characters of a value that is told; of a longer one, as of a file, a digest is."""


def made_of(folder: Path, config: Config, code: Mapping[str, str]) -> dict[str, str]:
    """One short text for each part. `code` are the files as `init` put them there; they are read as
    they are now."""
    told = {"stratafl": version.__version__, "protocol": str(PROTOCOL)}
    for key, value in layout.flat_config(config.as_dict()).items():
        text = json.dumps(value)
        told[key] = text if len(text) <= LONGEST else _digest(text.encode())
    for place in code:
        told[f"{CODE}/{place}"] = _digest(files.read_bytes(folder / CODE / place))
    return told


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What differs, in one line, as far as both sides told of it."""
    both = [key for key in sorted(mine.keys() & theirs.keys()) if mine[key] != theirs[key]]
    told = [f"{key} is {line(theirs[key], LONGEST)} there and {line(mine[key], LONGEST)} here" for key in both]
    alone = sorted(mine.keys() ^ theirs.keys())
    return in_short(told or [f"{line(key, LONGEST)} is only {'here' if key in mine else 'there'}" for key in alone])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
