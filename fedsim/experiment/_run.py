"""`Run`: what a run knows between its first and its last round."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

from fedsim import checks, distributed, rng
from fedsim.algorithm import Algorithm
from fedsim.configuration import RunConfig
from fedsim.data import Cohort, FederatedData, is_rows, population_identity
from fedsim.durable_files import WriteError, is_full, replace_text
from fedsim.evaluation import Evaluation
from fedsim.execution import report_problems
from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._default_evaluation import Scores, State, default_evaluation, is_personal, ranking_metrics
from fedsim.experiment._disk import explained
from fedsim.experiment._dispatch import DispatchedRounds, DispatchLength, Rounds
from fedsim.experiment._divergence import LossMonitor
from fedsim.experiment._environment import code_of
from fedsim.experiment._folder import RunFolder, resume_command
from fedsim.experiment._identity import describe, process_identity, rows_identity, title
from fedsim.experiment._lines import Line, clients_table, evaluation_line, observed, plain, round_lines
from fedsim.experiment._report import devices_of
from fedsim.experiment._run_log import Callback, RunLog
from fedsim.experiment._stop_rules import check_has_clock, check_metrics, stop_rules
from fedsim.experiment._trust import imported_modules
from fedsim.rounds import RoundInfo
from fedsim.samplers import Observation, Sampler, check_fits, checked_cohort, is_steered

if TYPE_CHECKING:
    from fedsim.privacy import Guarantee


class Run(Rounds):
    """A run: its state, the rounds that come next, and its log.

    `fedsim.experiment.run` drives one run, and a sweep several at a time, see `Rounds`. Signals, progress and the display of
    warnings concern the driver.

    The arguments are those of `fedsim.experiment.run`, which also describes the errors. The folder is locked until `close`.

    Attributes:
      evaluation, validation: the results of the last evaluation, on test and on validation data; None if there was none.
      stopped: why the run ends before its last round, by a rule or a callback; None if it does not.
      log: the history, the metrics file and the checkpoints.
      monitor: watches the losses.
      paths: the run folder, if there is one.
      devices: a text that names the devices.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits").train
    >>> algorithm = fedsim.algorithms.FedSGD(model=fedsim.models.digits_logistic(), server_optimizer=optax.sgd(0.1))
    >>> run = Run(
    ...     algorithm, fedsim.UniformSampler(data, clients=2, seed=0), rounds=3, folder=None, test_data=None, evaluate=None,
    ...     evaluate_every=10, checkpoint_every=None, callbacks=[], config=None, settings=None, rounds_per_dispatch="auto")
    >>> sent = run.dispatch()
    >>> run.finish(sent._replace(infos=jax.device_get(sent.infos)), seconds=0.1)
    >>> run.position, [line["round"] for line in run.log.history]
    (1, [1])
    """

    def __init__(
        self,
        algorithm: Algorithm,
        sampler: Sampler,
        *,
        rounds: int,
        folder: str | Path | None,
        test_data: FederatedData | None,
        validation_data: FederatedData | None = None,
        stop_when: str | None = None,
        evaluate: Callable[[State], Scores] | None,
        evaluate_every: int,
        checkpoint_every: int | None,
        callbacks: Sequence[Callback],
        config: RunConfig | Mapping[str, Any] | None,
        settings: Any,
        rounds_per_dispatch: int | Literal["auto"],
        writers: str | None = None,
        privacy: Guarantee | None = None,
    ) -> None:
        checks.whole(1, rounds=rounds, evaluate_every=evaluate_every)
        fixed_length = None if rounds_per_dispatch == "auto" else rounds_per_dispatch
        checks.whole(1, or_none=True, checkpoint_every=checkpoint_every)
        if fixed_length is not None:
            checks.whole(1, rounds_per_dispatch=fixed_length, remedy="give a positive whole number, or 'auto'")
        self._evaluate_every, self._checkpoint_every, self._config = evaluate_every, checkpoint_every, config
        self._test_data, self.privacy = test_data, privacy
        first = checked_cohort(sampler, 0)
        check_fits(sampler, algorithm)
        if is_steered(sampler) or algorithm.execution.waits:
            fixed_length = 1
        if not is_steered(sampler):  # A schedule that is too short raises its error now instead of after its last round.
            checked_cohort(sampler, rounds - 1, first)
        algorithm.check(first.data)
        if privacy:
            privacy.check_run(algorithm, sampler)
            if privacy.matrix:
                privacy.epsilon(rounds)  # Raises if the noise is correlated between fewer rounds.
            if stop_when:
                raise ValueError(
                    f"Expected no stop_when with privacy, got stop_when={stop_when!r}: when the run ends would depend on "
                    "examples and numbers of clients without noise. Leave it out."
                )
        key = rng.stream(first.key, "init")
        like = jax.eval_shape(algorithm.init, key)
        self._compute_scores = (
            default_evaluation(algorithm, first.data, test_data, like, sampler=sampler)
            if evaluate is None
            else lambda state, finished: evaluate(state)
        )
        self._validate = default_evaluation(algorithm, first.data, validation_data, like, "validation_data", sampler)
        self._rules = dict(zip((stop_when or "").split(" or "), stop_rules(stop_when), strict=False))
        check_has_clock(self._rules.values(), algorithm, first)
        self._can_stop = bool(self._rules or callbacks)
        self.stopped: str | None = None
        self._stopped_by: str | None = None
        self._finished = 0
        for rule in self._rules.values() if self._validate is None else ():
            if rule.metric:
                raise ValueError(
                    f"Expected validation data for stop_when={stop_when!r}, got none: give validation_data (--validation 0.1). "
                    "A run that ends by its test data would report them too favourably."
                )
        if validation_data is not None and any(rule.metric for rule in self._rules.values()):
            check_metrics(self._rules.values(), ranking_metrics(algorithm, like, validation_data))
        # A CPU cannot run two programs with collectives at a time, and the code of users and personal evaluations may run some.
        is_cpu = jax.default_backend() == "cpu"
        self._evaluation_waits = is_cpu and (evaluate is not None or hasattr(algorithm, "evaluate") or is_personal(algorithm))
        self._callbacks_wait = is_cpu and bool(callbacks)
        boundaries = [rounds, *([evaluate_every] if self._compute_scores or self._validate or self._can_stop else [])]
        lengths = DispatchLength(fixed_length, [*boundaries, *([checkpoint_every] if checkpoint_every else [])])
        super().__init__(algorithm, sampler, first=first, rounds=rounds, lengths=lengths)
        self._described = describe(algorithm, sampler, config, rounds=rounds, evaluate_every=evaluate_every)
        self.paths = None if folder is None else RunFolder(Path(folder))
        self.devices = devices_of(algorithm.execution)
        with contextlib.ExitStack() as closing:  # It also closes what is open after an error.
            if self.paths or jax.process_count() > 1:
                with self.write_errors():
                    recorded = dataclasses.asdict(settings) if settings is not None else {}
                    compared = {"population": _drawn(config) | population_identity(first.data)}
                    others = {"test population": test_data, "validation population": validation_data}
                    compared |= {name: population_identity(data) for name, data in others.items() if data is not None}
                    code = code_of(algorithm, sampler, evaluate, *imported_modules(config))
                    distributed.check_alike(process_identity(self._described, compared, code), "configuration")
                    if self.paths:
                        write = functools.partial(
                            self.paths.initialize, self._described, compared, recorded, self.devices, code
                        )
                        if lock := distributed.in_first(write):
                            closing.enter_context(lock)

            full = algorithm.with_memory(like, first.data)
            has_rows = any(map(is_rows, jax.tree.leaves(full, is_leaf=is_rows)))
            identity = rows_identity(algorithm, first.data) if has_rows else None
            keeps = algorithm.execution.keeps_memories
            checkpoints = Checkpoints(self.paths.checkpoints, identity, keeps_memories=keeps) if self.paths else None
            if checkpoints and not Checkpoints.available():
                warnings.warn(
                    "No checkpoints will be written: orbax-checkpoint is not installed (pip install 'fedsim-jax[run]').",
                    stacklevel=3,
                )
                checkpoints = None
            self.state, self.position = newest_state(algorithm, first, checkpoints)
            distributed.check_alike({"newest checkpoint": self.position}, "run folder")
            with self.write_errors():
                self.log = RunLog(
                    self.paths,
                    self.position,
                    checkpoints,
                    callbacks,
                    self._is_evaluated,
                    evaluate_every,
                    writers,
                    self._described,
                )
                closing.callback(lambda: self.log.close(is_finished=self._finished == self.rounds))
                self.state = checkpoints.with_row_file(self.state) if checkpoints else self.state
                self.sampler = observed(sampler, self.log.history, self.position)
            self.evaluation: Scores | None = None
            self.validation: Scores | None = None
            self.monitor = LossMonitor.of(algorithm)
            for line in self.log.history:
                self.monitor.add(line)
            self._diverged = False
            last = [line for line in self.log.history if line["round"] == rounds and "seconds" not in line]
            if self.position == rounds and self._evaluates and not last:  # It is lost, or the run had more rounds before.
                with self.write_errors():
                    self._write_evaluation(rounds, self.state)
            self._finished = self.position
            self._stop_if_due()
            self._closing = closing.pop_all()

    @property
    def _evaluates(self) -> bool:
        return self._compute_scores is not None or self._validate is not None

    @property
    def waits(self) -> bool:
        # Where the run ends must not depend on how many rounds are sent to the devices at once.
        may_stop = self._can_stop and self._is_evaluated(self.position)
        waits = may_stop or is_steered(self.sampler) or self.algorithm.execution.waits
        return waits and self._finished < self.position

    def _stop_if_due(self) -> None:
        """Ends the run after the last finished round, if that was evaluated and a rule or a callback says so."""
        if not self._can_stop or not self.position or not self._is_evaluated(self.position) or self.position == self.rounds:
            return
        reasons = {"a callback": distributed.from_first(self.log.stopped_by)}
        reasons |= {text: rule.reason(self.log.history) for text, rule in self._rules.items()}
        self._stopped_by, self.stopped = next(((by, text) for by, text in reasons.items() if text), (None, None))
        if self.stopped:
            self.rounds = self.position

    def needs_state(self, stop: int) -> bool:
        is_scored = (self._evaluates or self._can_stop) and self._is_evaluated(stop)
        return stop == self.rounds or is_scored or self.log.is_due(stop, self._checkpoint_every)

    def finish(self, dispatch: DispatchedRounds, seconds: float, *, members: int = 1) -> None:
        """Evaluates and writes the results of a dispatch, while the next one runs; see `Rounds.finish`."""
        infos, stop, length = dispatch.infos, dispatch.stop, len(dispatch.cohorts)
        self.wait_for_others()
        lines = len(self.log.history)
        self.lengths.record(length, seconds)
        if isinstance(infos, RoundInfo):
            report_problems(self.algorithm, infos, dispatch.cohorts)
        measured = round_lines(infos, stop - length, length, seconds / members)
        measured = [{**line, **cohort.measures} for line, cohort in zip(measured, dispatch.cohorts, strict=True)]
        if is_steered(steered := self.sampler):
            ((cohort,), (line,)) = dispatch.cohorts, measured
            observation = Observation.of(cohort, jax.tree.map(lambda x: x[0], infos), steered.observes)
            line["observed"], self.sampler = observation.to_json(), steered.observe(observation)
        is_scored = self._evaluates and self._is_evaluated(stop)
        if (self._callbacks_wait and dispatch.state is not None) or (self._evaluation_waits and is_scored):
            jax.block_until_ready(self.state)
        self.log.write(measured, dispatch.state)
        if is_scored:
            self._write_evaluation(stop, dispatch.state)
        if dispatch.state is not None:  # A checkpoint that became due after `needs_state` waits for the next dispatch.
            self.log.save(stop, dispatch.state, self._checkpoint_every, final=stop == self.rounds)
        for line in self.log.history[lines:]:
            self.monitor.add(line)
        if not self._diverged and (text := self.monitor.warning()):
            self._diverged = True
            warnings.warn(text, stacklevel=3)
        self._finished = stop
        if stop == self.position:
            self._stop_if_due()
            if self.stopped and dispatch.state is not None:
                self.save(dispatch)

    def evaluate(self) -> Scores | None:
        """Returns the evaluation of the current state; None if the run has no evaluation."""
        return self._compute_scores(self.state, self.position) if self._compute_scores else None

    def validate(self) -> Scores | None:
        """Returns the evaluation of the current state on the validation data; None if the run has none."""
        return self._validate(self.state, self.position) if self._validate else None

    def _is_evaluated(self, round: int) -> bool:
        return round % self._evaluate_every == 0 or round == self.rounds

    def _write_evaluation(self, round: int, state: State) -> None:
        line: Line = {"round": round}
        if self._compute_scores:
            self.evaluation = self._compute_scores(state, round)
            line = evaluation_line(self.evaluation, round)
        if self._validate:
            self.validation = self._validate(state, round)
            more = evaluation_line(self.validation, round, "validation")
            better = line.get("better", {}) | more.get("better", {})
            line = line | more | ({"better": better} if better else {})
        if self.privacy:
            line["epsilon"] = plain(self.privacy.epsilon(round))
        self.log.write([line], state)

    def save(self, dispatch: DispatchedRounds) -> None:
        self.log.save(dispatch.stop, dispatch.state, self._checkpoint_every, final=True)

    def draw(self) -> None:
        if self.paths:
            with self.write_errors():
                self._write_clients(self.paths.clients)
                if not distributed.is_first():
                    return
                if self.position == self.rounds:
                    self.paths.record_end(round=self.position, rule=self._stopped_by, reason=self.stopped)
                self.log.draw(self.paths.path, title(self._described), self.sampler)

    def _write_clients(self, path: Path) -> None:
        """Writes a row for each client of the test data, if the evaluation has results for each of them."""
        if self.evaluation is None and self.position == self.rounds:
            self.evaluation = self.evaluate()  # The process that evaluated the last round may not have written the file.
        if not distributed.is_first():
            return
        evaluation, data = self.evaluation, self._test_data
        if isinstance(evaluation, Evaluation) and data is not None and (text := clients_table(evaluation, data)):
            replace_text(path, text)
        if path.exists():
            self.log.written.append(f"  {path.name}")

    def close(self) -> None:
        """Ends the writers and unlocks the folder."""
        self._closing.close()

    def how_to_resume(self) -> str:
        """Returns a sentence that says what was saved and how to continue."""
        if not self.paths or not self.log.checkpoints:
            return "Nothing was saved, because there is no run folder or orbax-checkpoint is not installed."
        return f"Saved in {self.paths.path}. To continue: {self._resume_command()}"

    @contextlib.contextmanager
    def write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.paths and (isinstance(error, WriteError) or is_full(error)):
                saved = Checkpoints(self.paths.checkpoints).rounds()
                raise explained(error, saved[-1] if saved else 0, self._resume_command()) from error
            raise

    def _resume_command(self) -> str:
        assert self.paths is not None
        if isinstance(self._config, RunConfig):
            return resume_command(self.paths.path) if self.paths.config.exists() else "the same command again"
        return f"the same call with folder='{self.paths.path}'"


def _drawn(config: Any) -> dict[str, str]:
    """Returns the dataset and the topology as they were drawn, if the seed is not a part of the configuration."""
    if not isinstance(config, RunConfig):
        return {}
    drawn = {"dataset": (config.drawn_dataset, config.dataset), "topology": (config.drawn_topology, config.topology)}
    return {name: text for name, (text, given) in drawn.items() if text is not None and text != given}


def newest_state(algorithm: Algorithm, first: Cohort, checkpoints: Checkpoints | None, **options: Any) -> tuple[State, int]:
    """Returns the newest saved state of a run and its round; without one, the state before the first round and 0.

    Args:
      algorithm: of the run.
      first: the cohort of the first round.
      checkpoints: None reads none.
      **options: those of `Checkpoints.newest`.
    """
    key = rng.stream(first.key, "init")
    full = algorithm.with_memory(jax.eval_shape(algorithm.init, key), first.data)
    restored = checkpoints.newest(full, **options) if checkpoints else None
    return restored or (algorithm.with_memory(algorithm.init(key), first.data), 0)


class Stopwatch:
    """Measures the wall time of dispatches.

    That of a dispatch begins when it is sent, or when the dispatch before it ends if that is later, and it ends with its last
    round. Rounds may end while the host evaluates or writes a checkpoint, so a thread notes when. What the host does while no
    rounds run is not counted.

    >>> watch = Stopwatch()
    >>> watch.start()
    >>> watch.follow(jax.numpy.zeros(3))
    >>> watch.lap(stop=2) >= 0, watch.rate(stop=2)
    (True, None)
    """

    def __init__(self) -> None:
        self._start = self._end = time.perf_counter()
        self._running: deque[tuple[float, threading.Thread, list[float]]] = deque()
        self._compiled: int | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Begins to measure a dispatch, before it is sent."""
        self._start = time.perf_counter()

    def follow(self, infos: Any) -> None:
        """Waits beside the caller for the dispatch that has been sent, which has these infos on the devices."""
        ends: list[float] = []

        def wait() -> None:
            with contextlib.suppress(Exception):  # It is raised where the infos are read.
                jax.block_until_ready(infos)
            ends.append(time.perf_counter())

        waiting = threading.Thread(target=wait)  # Not a daemon: Python must not end while it is inside of JAX.
        waiting.start()
        if jax.process_count() > 1:  # Nothing runs beside rounds that processes share, see `Rounds.wait_for_others`.
            waiting.join()
        self._running.append((self._start, waiting, ends))

    def lap(self, stop: int) -> float:
        """Returns the seconds of the oldest dispatch that was followed, after it has ended. Its last round is ``stop``."""
        start, waiting, ends = self._running.popleft()
        waiting.join()
        end = max(ends[0], self._end)  # Of two threads, the later one may have noted its time first.
        seconds, self._end = end - max(start, self._end), end
        if self._compiled is None:
            self._compiled = stop
        else:
            self._seconds += seconds
        return seconds

    def rate(self, stop: int) -> float | None:
        """Returns the rounds per second up to round ``stop``; None if there was one dispatch.

        The first dispatch, which includes compilation, is not counted, and neither are evaluations and checkpoints.
        """
        return (stop - self._compiled) / self._seconds if self._compiled is not None and self._seconds else None
