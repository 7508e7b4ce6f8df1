"""Runs whose parents wait by time, killed at any moment: they end with the bits of one that was
not."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.runs.broken.killed import is_writing, only, start
from tests.runs.conftest import Server, contents, records, wait

ROUNDS, KILLS = 30, 10
POLICIES = {
    "deadline": '["all", { deadline = 0.2 }]',
    "first": "[{ first = 0.5 }, { first = 2 }]",
    "both": "[{ deadline = 1.0 }, { first = 0.7, deadline = 0.3 }]",
    "buffers": '[{ deadline = 0.4, late = "counts" }, { buffer = 2 }]',
}
CONFIG = """
rounds = {rounds}

[tree]
shape = "2x4"

[model]
name = "mlp"
hidden = [16]

[method]
rules = ["mtgc", "scaffold"]

[schedule]
periods = [2, 2]
participation = [1.0, 3]
wait = {wait}

[client]
batch_size = 10

[storage]
checkpoint_every = 1
keep_state = true

[network]
leaf = {{ step_s = {{ name = "lognormal", median = 0.05, sigma = 1.0 }} }}
tier = [{{ up_mbit_s = 2, jitter_s = {{ name = "pareto", least = 0.01, alpha = 1.2 }} }}]
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_killed_again_and_again(server: Server, name: str, tmp_path: Path) -> None:
    config, chance = tmp_path / "study.toml", random.Random(name)
    config.write_text(CONFIG.format(wait=POLICIES[name], rounds=ROUNDS))
    code, said = server.run("run", config, "--quiet", "--runs", tmp_path / "whole")
    assert code == 0, said
    undisturbed = contents(only(tmp_path / "whole"))
    assert any(record["late"] for record in undisturbed["rounds"])
    process, run = start(server, tmp_path / "runs", config)
    for number in range(KILLS):
        if number:
            process = server.start("resume", run, "--quiet")
        before = records(run)
        if number % 3 == 0:
            wait(lambda before=before: records(run) >= min(before, 1) and is_writing(run))
        elif number % 3 == 1:
            wait(lambda before=before: records(run) > max(before - 2, 0) and not is_writing(run))
        else:
            moment = time.monotonic() + chance.uniform(0.0, 0.3)
            wait(lambda moment=moment, before=before: time.monotonic() > moment or records(run) > before + 2)
        process.kill(signal.SIGKILL)
        assert process.ends() == -signal.SIGKILL, process.said()
        assert records(run) < ROUNDS, "the run must not be over before the last kill"
    code, said = server.run("resume", run)
    assert code == 0, said
    assert contents(run) == undisturbed
