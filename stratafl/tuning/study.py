"""Search with one Optuna study per network; every trial is reported to all studies.

A setting that one study suggests is trained once and priced for every network. The next suggestion
depends on the seed, the number of earlier suggestions and their results, and on nothing else: so an
interrupted search continues as it would have without the interruption.
"""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratafl.base.errors import InvalidInput, MissingExtra, UserCodeError, error_message
from stratafl.tuning.task import GridPoint, TuningTask
from stratafl.tuning.trials import CostLimits, StopConditions, TrialRunner, TuningTrial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

JOURNAL = "optuna.journal"
FINALISTS = 3
"""Number of settings per network that are repeated with other seeds. A run that can no longer be
one of them is stopped."""
MAX_REPEATED_SUGGESTIONS = 10
"""Number of repeated suggestions in a row after which an untried setting is sampled."""
ENUMERABLE = 20_000
"""Maximum number of settings that are enumerated to find untried ones."""
STARTUP_TRIALS = 8
"""Number of random settings before the search uses results."""
REPEATED = "again"
BASELINE = "as given"


def optuna() -> Any:
    """Import Optuna, without its messages."""
    try:
        import optuna
    except ImportError:
        raise MissingExtra("stratafl tune", "optuna", "plan") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Search:
    """Trials so far, and the choice of the next."""

    def __init__(self, task: TuningTask, runner: TrialRunner, folder: Path):
        self.task, self.runner, self.space = task, runner, task.space
        self.trials: dict[GridPoint, TuningTrial] = {}
        """Trials by setting, in their order."""
        self.baseline: TuningTrial | None = None
        self.is_exhausted = False
        package = optuna()
        backend = package.storages.journal.JournalFileBackend(str(folder / JOURNAL))
        self._storage = storage = package.storages.JournalStorage(backend)
        self.studies: dict[str, Study] = {
            network.name: package.create_study(storage=storage, study_name=network.name, load_if_exists=True)
            for network in task.networks
        }
        self._distributions = {
            axis.name: package.distributions.IntDistribution(0, len(axis.labels) - 1)
            if axis.is_ordered
            else package.distributions.CategoricalDistribution(axis.labels)
            for axis in self.space.axes
        }

    @property
    def count(self) -> int:
        """Number of settings that were tried, without the given experiment."""
        return len(self.trials) - (self.space.baseline in self.trials)

    def begin(self, stop_conditions: StopConditions) -> None:
        """Run the given experiment to the target or its end, without cost limits.

        If it cannot be set up, the exception is raised to the user.
        """
        experiment, no_limits = self.task.experiment, dict.fromkeys(self.studies, math.inf)
        try:
            trial = self.runner.run_trial(experiment, BASELINE, stop_conditions, no_limits, failed_again=True)
        except InvalidInput as problem:
            if problem.field != "evaluation.stop_when":
                raise
            target = self.task.target
            raise InvalidInput("--target", f"{target.metric}={target.value:g}", problem.allowed) from None
        if trial.outcome == "failed":
            raise InvalidInput("CONFIG", experiment.method.name or BASELINE, f"fails as given: {trial.reason}")
        self.baseline = trial
        for network in self.task.networks:
            for kind in (self.task.minimise, *self.task.budgets):
                if trial.cost(network.name, kind) == 0:
                    option = "--minimize" if kind == self.task.minimise else "--budget"
                    raise InvalidInput(option, kind, f"the network {network.name} says nothing of it: all is 0")
        if self.space.baseline is not None:
            self.trials[self.space.baseline] = trial
            self._report(self.space.baseline, trial)

    def run(self, stop_conditions: StopConditions) -> None:
        """Run trials until there are enough; raises if a signal or the time limit ends it."""
        for setting in self._journal_settings():
            if setting not in self.trials:
                self._run_trial(setting, stop_conditions)
        names = list(self.studies)
        while self.count < self.task.trials:
            study = self.studies[names[self.count % len(names)]]
            trial = self._suggest(study)
            if trial is None:
                self.is_exhausted = True
                return
            self._run_trial(self._setting(trial.params), stop_conditions)

    def cost_limits(self) -> dict[str, float]:
        """Cost below which a run is repeated with other seeds, by network."""
        limits = {}
        for name in self.studies:
            values = sorted(trial.objective_value(name, self.task) for trial in self.trials.values())
            limits[name] = values[FINALISTS - 1] if len(values) >= FINALISTS else math.inf
        return limits

    def attempt(
        self, setting: GridPoint | None, seed: int, stop_conditions: StopConditions, cost_limits: CostLimits
    ) -> TuningTrial:
        """Run a setting, or the given experiment; one that cannot be set up has failed."""
        is_baseline = setting is None or setting == self.space.baseline
        label = BASELINE if setting is None or is_baseline else self.space.label(setting)
        try:
            experiment = self.task.experiment if setting is None or is_baseline else self.space.experiment_of(setting)
            return self.runner.run_trial(experiment.replace(seed=seed), label, stop_conditions, cost_limits)
        except UserCodeError:
            raise
        except (InvalidInput, RuntimeError) as problem:
            self.runner.say(f"{label}: {error_message(problem)}")
            return TuningTrial.failed(self.task, error_message(problem))

    def _run_trial(self, setting: GridPoint, stop_conditions: StopConditions) -> None:
        trial = self.attempt(setting, self.task.experiment.seed, stop_conditions, self.cost_limits())
        self.trials[setting] = trial
        self._report(setting, trial)

    # -- Optuna's side -----------------------------------------------------------------------------

    def _journal_settings(self) -> list[GridPoint]:
        """Settings of the journal in their order; the setting of an interrupted trial is last."""
        running = optuna().trial.TrialState.RUNNING
        entries = [
            (trial.state == running, trial.datetime_start or trial.datetime_complete, self._setting(trial.params))
            for study in self.studies.values()
            for trial in study.trials
            if set(trial.params) == set(self._distributions) and REPEATED not in trial.user_attrs
        ]
        return list(dict.fromkeys(setting for *_, setting in sorted(entries, key=lambda entry: entry[:2])))

    def _suggest(self, study: Study) -> Trial | None:
        """Suggest a setting that was not tried; None if all were."""
        if self.space.size <= len(self.trials):
            return None
        state = optuna().trial.TrialState
        for _ in range(MAX_REPEATED_SUGGESTIONS):
            study.sampler = self._sampler(study)
            trial = study.ask(self._distributions)
            if self._setting(trial.params) not in self.trials:
                return trial
            trial.set_user_attr(REPEATED, True)
            study.tell(trial, state=state.FAIL)
        study.enqueue_trial(self._params(self._untried(len(study.trials))))
        return study.ask(self._distributions)

    def _sampler(self, study: Study) -> Any:
        seed = random.Random(f"{self.task.experiment.seed} {study.study_name} {len(study.trials)}").getrandbits(32)
        return optuna().samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True)

    def _untried(self, number: int) -> GridPoint:
        rng = random.Random(f"{self.task.experiment.seed} {number}")
        ranges = [range(len(axis.values)) for axis in self.space.axes]
        if self.space.size <= ENUMERABLE:
            return rng.choice([choice for choice in itertools.product(*ranges) if choice not in self.trials])
        while True:
            setting = tuple(rng.choice(choice) for choice in ranges)
            if setting not in self.trials:
                return setting

    def _report(self, setting: GridPoint, trial: TuningTrial) -> None:
        """Report a trial to all studies that do not have it."""
        package = optuna()
        states = package.trial.TrialState
        for name, study in self.studies.items():
            suggestions = [
                suggestion
                for suggestion in study.trials
                if suggestion.params and self._setting(suggestion.params) == setting
            ]
            value = trial.objective_value(name, self.task)
            state = states.FAIL if trial.outcome == "failed" else states.COMPLETE if value < math.inf else states.PRUNED
            if any(suggestion.state == state and REPEATED not in suggestion.user_attrs for suggestion in suggestions):
                continue
            final_value = value if state == states.COMPLETE else None
            # pruned trials are ranked by the distance from the target that they stayed at
            has_distance = state == states.PRUNED and trial.distance_to_target < math.inf
            steps = {0: trial.distance_to_target} if has_distance else {}
            running = next((suggestion for suggestion in suggestions if suggestion.state == states.RUNNING), None)
            if running is not None:
                suggestion = package.trial.Trial(study, self._id_of(name, running.number))
                for step, distance in steps.items():
                    suggestion.report(distance, step)
                study.tell(suggestion, final_value, state=state)
            else:
                completed = package.trial.create_trial(
                    state=state,
                    value=final_value,
                    params=self._params(setting),
                    distributions=self._distributions,
                    intermediate_values=steps,
                )
                study.add_trial(completed)

    def _id_of(self, study: str, number: int) -> int:
        """Id of a trial in the storage of the studies."""
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
