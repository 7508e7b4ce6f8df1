"""The search: a study of Optuna's per network, all of which hear of every run.

A setting that one study suggests is trained once, priced for every network, and told to all. What
is suggested next depends on the seed, how many were suggested before and what came of them, and on
nothing else: so a search that was interrupted goes on as it would have.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratafl.base.errors import InvalidInput, MissingExtra, UserCodeError, error_message
from stratafl.tune.space import GridPoint
from stratafl.tune.task import TuningTask
from stratafl.tune.trials import CostLimits, StopConditions, TrialRunner, TuningTrial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

JOURNAL = "optuna.journal"
FINALISTS = 3
"""Settings per network that are repeated with further seeds. A run is stopped when it cannot be one
of them any more."""
MAX_REPEATED_SUGGESTIONS = 10
"""Suggestions in a row that were tried before; then one that was not is drawn."""
ENUMERABLE = 20_000
"""Settings that are counted out to find those that were not tried."""
STARTUP_TRIALS = 8
"""Settings that are drawn before anything is concluded from them."""
AGAIN = "again"
BASELINE = "as given"


def optuna() -> Any:
    """The package Optuna, told to be quiet."""
    try:
        import optuna
    except ImportError:
        raise MissingExtra("a plan", "optuna", "plan") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Search:
    """What was tried so far, and what to try next."""

    def __init__(self, question: TuningTask, trainer: TrialRunner, folder: Path):
        self.question, self.trainer, self.space = question, trainer, question.space
        self.tried: dict[GridPoint, TuningTrial] = {}
        """The runs that were tried, in their order."""
        self.baseline: TuningTrial | None = None
        self.is_exhausted = False
        package = optuna()
        backend = package.storages.journal.JournalFileBackend(str(folder / JOURNAL))
        self._storage = storage = package.storages.JournalStorage(backend)
        self.studies: dict[str, Study] = {
            network.name: package.create_study(storage=storage, study_name=network.name, load_if_exists=True)
            for network in question.networks
        }
        self._distributions = {axis.name: _distribution(axis.labels, axis.is_ordered) for axis in self.space.axes}

    @property
    def count(self) -> int:
        """Settings tried, besides the config as given."""
        return len(self.tried) - (self.space.usual in self.tried)

    def begin(self, watch: StopConditions) -> None:
        """The config as given: to the target or its end, whatever it costs.

        One that cannot be set up is the user's to mend, so the complaint goes up.
        """
        config, free = self.question.config, dict.fromkeys(self.studies, math.inf)
        try:
            tried = self.trainer.tried(config, BASELINE, watch, free, failed_again=True)
        except InvalidInput as problem:
            if problem.field != "stop_when":
                raise
            target = self.question.target
            raise InvalidInput("--target", f"{target.metric}={target.value:g}", problem.allowed) from None
        if tried.outcome == "failed":
            raise InvalidInput("CONFIG", config.method.get("name", BASELINE), f"fails as given: {tried.reason}")
        self.baseline = tried
        for network in self.question.networks:
            for kind in (self.question.minimise, *self.question.budgets):
                if tried.cost(network.name, kind) == 0:
                    option = "--minimise" if kind == self.question.minimise else "--budget"
                    raise InvalidInput(option, kind, f"the network {network.name} says nothing of it: all is 0")
        if self.space.usual is not None:
            self.tried[self.space.usual] = tried
            self._tell_all(self.space.usual, tried)

    def run(self, watch: StopConditions) -> None:
        """Try settings until there are enough; raises where a signal or the time ends it."""
        for setting in self._remembered():
            if setting not in self.tried:
                self._try(setting, watch)
        names = list(self.studies)
        while self.count < self.question.trials:
            study = self.studies[names[self.count % len(names)]]
            trial = self._suggested(study)
            if trial is None:
                self.is_exhausted = True
                return
            self._try(self._setting(trial.params), watch)

    def bars(self) -> dict[str, float]:
        """What a run must cost less than to be repeated with further seeds, by network."""
        found = {}
        for name in self.studies:
            known = sorted(each.wins(name, self.question) for each in self.tried.values())
            found[name] = known[FINALISTS - 1] if len(known) >= FINALISTS else math.inf
        return found

    def attempt(self, setting: GridPoint | None, seed: int, watch: StopConditions, bars: CostLimits) -> TuningTrial:
        """A run of a setting, or of the config as given; one that cannot be set up has failed."""
        is_given = setting is None or setting == self.space.usual
        label = BASELINE if setting is None or is_given else self.space.label(setting)
        try:
            config = self.question.config if setting is None or is_given else self.space.config_of(setting)
            return self.trainer.tried(replace(config, run=replace(config.run, seed=seed)), label, watch, bars)
        except UserCodeError:
            raise
        except (InvalidInput, RuntimeError) as problem:
            self.trainer.say(f"{label}: {error_message(problem)}")
            return TuningTrial.failed(self.question, error_message(problem))

    def _try(self, setting: GridPoint, watch: StopConditions) -> None:
        tried = self.attempt(setting, self.question.config.run.seed, watch, self.bars())
        self.tried[setting] = tried
        self._tell_all(setting, tried)

    # -- Optuna's side -----------------------------------------------------------------------------

    def _remembered(self) -> list[GridPoint]:
        """Settings of the journal in their order, that of an interrupted trial last."""
        running = optuna().trial.TrialState.RUNNING
        kept = [
            (trial.state == running, trial.datetime_start or trial.datetime_complete, self._setting(trial.params))
            for study in self.studies.values()
            for trial in study.trials
            if set(trial.params) == set(self._distributions) and AGAIN not in trial.user_attrs
        ]
        return list(dict.fromkeys(setting for *_, setting in sorted(kept, key=lambda each: each[:2])))

    def _suggested(self, study: Study) -> Trial | None:
        """A trial of a setting that was not tried; None where all were."""
        if self.space.size <= len(self.tried):
            return None
        state = optuna().trial.TrialState
        for _ in range(MAX_REPEATED_SUGGESTIONS):
            study.sampler = self._sampler(study)
            trial = study.ask(self._distributions)
            if self._setting(trial.params) not in self.tried:
                return trial
            trial.set_user_attr(AGAIN, True)
            study.tell(trial, state=state.FAIL)
        study.enqueue_trial(self._params(self._untried(len(study.trials))))
        return study.ask(self._distributions)

    def _sampler(self, study: Study) -> Any:
        seed = random.Random(f"{self.question.config.run.seed} {study.study_name} {len(study.trials)}").getrandbits(32)
        return optuna().samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True)

    def _untried(self, number: int) -> GridPoint:
        draw = random.Random(f"{self.question.config.run.seed} {number}")
        ranges = [range(len(axis.values)) for axis in self.space.axes]
        if self.space.size <= ENUMERABLE:
            return draw.choice([each for each in itertools.product(*ranges) if each not in self.tried])
        while True:
            setting = tuple(draw.choice(each) for each in ranges)
            if setting not in self.tried:
                return setting

    def _tell_all(self, setting: GridPoint, tried: TuningTrial) -> None:
        """Every study that has not heard of it."""
        package = optuna()
        state = package.trial.TrialState
        for name, study in self.studies.items():
            same = [trial for trial in study.trials if trial.params and self._setting(trial.params) == setting]
            running = [trial for trial in same if trial.state == state.RUNNING]
            value = tried.wins(name, self.question)
            ending = state.FAIL if tried.outcome == "failed" else state.COMPLETE if value < math.inf else state.PRUNED
            if any(trial.state == ending and AGAIN not in trial.user_attrs for trial in same):
                continue
            # ranked among those that did not get there by how far from it they stayed
            steps = {0: tried.shortfall} if ending == state.PRUNED and tried.shortfall < math.inf else {}
            if running:
                trial = package.trial.Trial(study, self._id_of(name, running[0].number))
                for step, shortfall in steps.items():
                    trial.report(shortfall, step)
                study.tell(trial, value if ending == state.COMPLETE else None, state=ending)
            else:
                told_value = value if ending == state.COMPLETE else None
                made = package.trial.create_trial(
                    state=ending,
                    value=told_value,
                    params=self._params(setting),
                    distributions=self._distributions,
                    intermediate_values=steps,
                )
                study.add_trial(made)

    def _id_of(self, study: str, number: int) -> int:
        """What the storage calls a trial of a study."""
        storage = self._storage
        return int(storage.get_trial_id_from_study_id_trial_number(storage.get_study_id_from_name(study), number))

    def _params(self, setting: GridPoint) -> dict[str, Any]:
        return {
            axis.name: place if axis.is_ordered else axis.labels[place]
            for axis, place in zip(self.space.axes, setting, strict=True)
        }

    def _setting(self, params: dict[str, Any]) -> GridPoint:
        return tuple(
            int(params[axis.name]) if axis.is_ordered else axis.labels.index(params[axis.name])
            for axis in self.space.axes
        )


def _distribution(labels: Sequence[str], is_ordered: bool) -> Any:
    kinds = optuna().distributions
    return kinds.IntDistribution(0, len(labels) - 1) if is_ordered else kinds.CategoricalDistribution(list(labels))
