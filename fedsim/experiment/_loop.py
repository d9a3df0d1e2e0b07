"""`run`, which trains, evaluates, and writes metrics and checkpoints until the last round or a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from fedsim import checks, rng
from fedsim.algorithm import Algorithm
from fedsim.data import Cohort, FederatedData
from fedsim.data._client_rows import is_rows
from fedsim.evaluation import Evaluation, evaluate_personalized
from fedsim.evaluation import evaluate as evaluate_model
from fedsim.execution import Jit, RoundInfo, report_problems
from fedsim.experiment._build import Experiment
from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._config import RESUME_COMMAND, RunConfig, Settings
from fedsim.experiment._disk import WriteError, explained, is_full
from fedsim.experiment._dispatch import DispatchLength, cohorts
from fedsim.experiment._divergence import LossMonitor
from fedsim.experiment._folder import RunFolder
from fedsim.experiment._identity import describe, population, rows_identity, title
from fedsim.experiment._lines import Line, best_round, evaluation_line, round_lines
from fedsim.experiment._report import closing_table, devices_of
from fedsim.experiment._run_log import Callback, RunLog
from fedsim.experiment._signals import Interruption
from fedsim.experiment._writers import read_metrics
from fedsim.samplers import Sampler
from fedsim.samplers._checked import checked_cohort

State = Any
Scores = Evaluation | Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of `run`.

    Attributes:
      state: the algorithm's state after ``round`` rounds.
      round: the number of finished rounds. It is less than ``rounds`` only after a signal.
      evaluation: the result of the last evaluation; None if there was none.
      history: the lines of ``metrics.jsonl``, including those of earlier processes.
      folder: the run folder, if there is one.
      interrupted: the signal that ended the run early. By convention a program then exits with ``128 + interrupted``.
    """

    state: State
    round: int
    evaluation: Scores | None
    history: list[Line]
    folder: Path | None
    interrupted: signal.Signals | None = None


def run(
    algorithm: Algorithm,
    sampler: Sampler,
    *,
    rounds: int,
    folder: str | Path | None = None,
    test_data: FederatedData | None = None,
    evaluate: Callable[[State], Scores] | None = None,
    evaluate_every: int = 10,
    checkpoint_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    config: RunConfig | Mapping[str, Any] | None = None,
    settings: Any = None,
    rounds_per_dispatch: int | Literal["auto"] = "auto",
) -> Result:
    """Trains for a number of rounds. With a folder, it continues a run that an earlier process started there.

    Several rounds are sent to the device at once, and the next ones are sent before the results of the last ones are read, so
    the device does not wait for the host. A run that is resumed on the same devices ends with the same bits as an uninterrupted
    one. A loss that rises above its start, or becomes enormous, is reported by a warning.

    Args:
      algorithm: any `Algorithm`, including one that overrides ``apply``.
      sampler: an object with a method ``cohort(round) -> Cohort``. The initial state is drawn from the root key of its cohorts.
      rounds: the number of rounds.
      folder: the run folder; None writes nothing. If it holds an unfinished run with the same identity (see ``config``), that
        run is resumed. If it holds another run, it is refused, unless no round of that run was finished.
      test_data: evaluated by ``algorithm.evaluate(state, test_data)`` if there is such a method, otherwise with the algorithm's
        model and ``state.params``. If clients have personal models, these are also evaluated, by
        `fedsim.evaluate_personalized`, and the names of their metrics begin with ``personal_``.
      evaluate: replaces the evaluation on ``test_data`` by a function from the state to an `Evaluation` or to a mapping of
        names to numbers.
      evaluate_every: the number of rounds between evaluations. There is always one after the last round.
      checkpoint_every: the number of rounds between checkpoints; None saves about every ten seconds. The last two checkpoints
        and the best one are kept.
      callbacks: functions that are called with every line of the metrics, and with the state after that round if it is
        available (at evaluations, and at the end of a dispatch), otherwise with None.
      progress: whether to show a progress bar on stderr and a closing table on stdout.
      config: the identity of the run, together with the clients' names and sizes. By default it consists of the arguments,
        except functions, and therefore without models and optimizers.
      settings: a dataclass that is recorded with the config and not compared.
      rounds_per_dispatch: the maximum number of rounds that are sent to the device at once. ``"auto"`` sends as many as take a
        fraction of a second.

    Raises:
      ValueError: a number is not positive, the data does not fit the model, or the folder holds another run.
      OSError: a file cannot be written, for example because the disk is full. The message names the file, the last saved
        round, and how to continue.

    >>> import jax.numpy as jnp, numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 8, 8, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2))
    >>> sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    >>> result = run(algorithm, sampler, rounds=3, test_data=data, progress=False)
    >>> result.round, sorted(result.evaluation.overall), len(result.history)
    (3, ['accuracy', 'loss'], 4)
    """
    began = time.perf_counter()
    checks.whole(1, rounds=rounds, evaluate_every=evaluate_every)
    fixed_length = None if rounds_per_dispatch == "auto" else rounds_per_dispatch
    checks.whole(1, or_none=True, checkpoint_every=checkpoint_every)
    if fixed_length is not None:
        checks.whole(1, rounds_per_dispatch=fixed_length, remedy="give a positive whole number, or 'auto'")
    first = checked_cohort(sampler, 0)
    # A schedule that is too short raises its error now instead of after its last round.
    checked_cohort(sampler, rounds - 1, first)
    algorithm.check(first.data)
    key = rng.stream(first.key, "init")
    like = jax.eval_shape(algorithm.init, key)
    compute_scores = evaluate or _default_evaluation(algorithm, first.data, test_data, like)
    described = describe(algorithm, sampler, config, rounds=rounds, evaluate_every=evaluate_every)
    paths = None if folder is None else RunFolder(Path(folder))
    devices = devices_of(algorithm.execution)
    if paths:
        with _write_errors(paths, config):
            recorded = dataclasses.asdict(settings) if settings is not None else {}
            paths.initialize(described, population(first.data), recorded, devices)

    full = algorithm.with_memory(like, first.data)
    has_rows = any(map(is_rows, jax.tree.leaves(full, is_leaf=is_rows)))
    checkpoints = Checkpoints(paths.checkpoints, rows_identity(algorithm, first.data) if has_rows else None) if paths else None
    if checkpoints and not Checkpoints.available():
        warnings.warn(
            "No checkpoints will be written: orbax-checkpoint is not installed (pip install 'fedsim-jax[run]').", stacklevel=2
        )
        checkpoints = None
    restored = checkpoints.newest(full) if checkpoints else None
    state, start = restored or (algorithm.with_memory(algorithm.init(key), first.data), 0)
    with _write_errors(paths, config):
        log = RunLog(paths, start, checkpoints, callbacks)
    monitor = LossMonitor(getattr(getattr(algorithm, "model", None), "num_classes", None))
    for line in log.history:
        monitor.add(line)
    diverged = False

    boundaries = [rounds, *([evaluate_every] if compute_scores else []), *([checkpoint_every] if checkpoint_every else [])]
    lengths = DispatchLength(fixed_length, boundaries)
    evaluation = None
    last: _Dispatch | None = None
    compiled, mark = None, time.perf_counter()
    bar = tqdm(total=rounds, initial=start, unit="round", disable=not progress, dynamic_ncols=True, leave=True)

    def finish(dispatch: _Dispatch) -> None:
        """Waits for a dispatch, then evaluates and writes its results while the next one runs."""
        nonlocal evaluation, compiled, mark, diverged
        infos, lines = jax.device_get(dispatch.infos), len(log.history)
        now = time.perf_counter()
        seconds, mark = now - mark, now
        compiled = compiled or (dispatch.stop, now)
        length = len(dispatch.cohorts)
        lengths.record(length, seconds)
        if isinstance(infos, RoundInfo):
            report_problems(algorithm, infos, dispatch.cohorts)
        log.write(round_lines(infos, dispatch.stop - length, length, seconds), dispatch.state)
        if compute_scores and (dispatch.stop % evaluate_every == 0 or dispatch.stop == rounds):
            if evaluate or _is_personal(algorithm):
                jax.block_until_ready(state)  # A CPU cannot run two programs with collectives at a time.
            evaluation = compute_scores(dispatch.state)
            log.write([evaluation_line(evaluation, dispatch.stop)], dispatch.state)
        log.save(dispatch.stop, dispatch.state, checkpoint_every, final=dispatch.stop == rounds)
        for line in log.history[lines:]:
            monitor.add(line)
        if not diverged and (text := monitor.warning()):
            diverged = True
            warnings.warn(text, stacklevel=3)
        bar.set_postfix(log.latest(), refresh=False)
        bar.update(length)

    with Interruption() as interruption, _write_errors(paths, config), _warnings_above(bar):
        position = start
        try:
            state = checkpoints.with_row_file(state) if checkpoints else state
            while position < rounds and not interruption.signal:
                try:
                    together = cohorts(sampler, position, lengths.next(position), first)
                    state, infos = algorithm.apply_rounds(state, together, max_rounds=lengths.limit)
                except Exception:
                    if last:
                        finish(last)
                    raise
                previous, last = last, _Dispatch(position + len(together), together, state, infos)
                position = last.stop
                if previous:
                    finish(previous)
            if last:
                finish(last)
            if position < rounds:
                log.save(position, state, checkpoint_every, final=True)
        finally:
            bar.close()
            log.close()
    if compute_scores and start == rounds:
        evaluation = compute_scores(state)

    # Without the first dispatch, which includes compilation, and without the time after the last round.
    rate = (position - compiled[0]) / (mark - compiled[1]) if compiled and position > compiled[0] else None
    if paths:
        with _write_errors(paths, config):
            log.draw(paths.picture, title(described))
    stopped_by = interruption.signal if position < rounds else None
    if stopped_by:
        print(f"\n{stopped_by.name}: stopped after round {position} of {rounds}.", file=sys.stderr)
        print(_how_to_resume(paths, checkpoints, config), file=sys.stderr)
    elif progress:
        print(
            closing_table(
                log.history,
                round=position,
                rounds=rounds,
                seconds=time.perf_counter() - began,
                rate=rate,
                devices=devices,
                written=log.written,
                warning=monitor.warning(),
            )
        )
    return Result(
        state=state,
        round=position,
        evaluation=evaluation,
        history=log.history,
        folder=paths.path if paths else None,
        interrupted=stopped_by,
    )


def run_experiment(
    experiment: Experiment, config: RunConfig, settings: Settings, *, progress: bool, callbacks: Sequence[Callback] = ()
) -> Result:
    """Runs what `build` has built from the configuration, in the folder of the settings; see `run`."""
    algorithm, sampler, test_data = experiment
    return run(
        algorithm,
        sampler,
        rounds=config.rounds,
        folder=settings.folder,
        test_data=test_data if hasattr(algorithm, "model") or hasattr(algorithm, "evaluate") else None,
        evaluate_every=config.evaluate_every,
        checkpoint_every=settings.checkpoint_every,
        callbacks=callbacks,
        progress=progress,
        config=config,
        settings=settings,
        rounds_per_dispatch=settings.rounds_per_dispatch or "auto",
    )


class _Dispatch(NamedTuple):
    stop: int
    cohorts: list[Cohort]
    state: State
    infos: Any


def _is_personal(algorithm: Algorithm) -> bool:
    return hasattr(algorithm, "personal_params")


def _default_evaluation(
    algorithm: Algorithm, train: FederatedData, data: FederatedData | None, like: State
) -> Callable[[State], Scores] | None:
    if data is None:
        return None
    own, model = getattr(algorithm, "evaluate", None), getattr(algorithm, "model", None)
    if own is not None:
        return lambda state: own(state, data)
    if model is None or not hasattr(like, "params"):
        raise ValueError(
            f"{type(algorithm).__name__} cannot be evaluated on test_data, because it has no model or no state.params. Define "
            "a method evaluate(state, data), or pass evaluate=, a function of the state, to run."
        )
    model.check(data)
    execution = algorithm.execution if isinstance(algorithm.execution, Jit) else Jit()
    shapes = [[leaf.shape for leaf in jax.tree.leaves(of)] for of in (like.params, jax.eval_shape(model.init, rng.root(0)))]

    def evaluation(state: State) -> Evaluation:
        # A server with only a part of the model, or with several models, has no model of its own to evaluate.
        whole = evaluate_model(model, state.params, data, execution=execution) if shapes[0] == shapes[1] else Evaluation({}, {})
        if not _is_personal(algorithm):
            return whole
        own = evaluate_personalized(algorithm, state, train, data, execution=execution)
        overall = whole.overall | {f"personal_{name}": value for name, value in own.overall.items()}
        return Evaluation(overall, whole.clients | {f"personal_{name}": mean for name, mean in own.clients.items()})

    if shapes[0] != shapes[1] and not _is_personal(algorithm):
        raise ValueError(
            f"state.params of {type(algorithm).__name__} has other shapes than the parameters of its model, so it cannot be "
            "evaluated on test_data. Define a method evaluate(state, data), or pass evaluate=, a function of the state, to run."
        )
    return evaluation


def _how_to_resume(paths: RunFolder | None, checkpoints: Checkpoints | None, config: Any) -> str:
    if not paths or not checkpoints:
        return "Nothing was saved, because there is no run folder or orbax-checkpoint is not installed."
    return f"Saved in {paths.path}. To continue: {_resume_command(paths, config)}"


def _resume_command(paths: RunFolder, config: Any) -> str:
    if isinstance(config, RunConfig):
        return f"{RESUME_COMMAND} {shlex.quote(str(paths.path))}" if paths.config.exists() else "the same command again"
    return f"the same call with folder='{paths.path}'"


@contextlib.contextmanager
def _write_errors(paths: RunFolder | None, config: Any) -> Iterator[None]:
    """Adds to an error about a file of the run how to continue the run."""
    try:
        yield
    except OSError as error:
        if paths and (isinstance(error, WriteError) or is_full(error)):
            saved = Checkpoints(paths.checkpoints).rounds()
            raise explained(error, saved[-1] if saved else 0, _resume_command(paths, config)) from error
        raise


@contextlib.contextmanager
def _warnings_above(bar: tqdm[Any]) -> Iterator[None]:
    """Shows warnings above the progress bar instead of in the middle of it."""
    show = warnings.showwarning

    def show_above(*arguments: Any, **keywords: Any) -> None:
        with bar.external_write_mode(file=sys.stderr):
            show(*arguments, **keywords)

    warnings.showwarning = show_above
    try:
        yield
    finally:
        warnings.showwarning = show


def restore(
    folder: str | Path,
    algorithm: Algorithm,
    which: Literal["last", "best"] = "last",
    data: FederatedData | None = None,
) -> tuple[State, int]:
    """Returns a saved state of a run and its round.

    Args:
      folder: the run folder.
      algorithm: the algorithm of the run.
      which: ``"last"`` for the newest checkpoint, ``"best"`` for that of the best evaluation.
      data: the population, for the shapes of its examples. It is necessary only for an algorithm without a model whose clients
        have memory between rounds.

    Raises:
      ValueError: there is no such checkpoint, or it belongs to another algorithm or model.

    >>> import optax, fedsim
    >>> algorithm = fedsim.algorithms.FedSGD(model=fedsim.models.digits_logistic(), server_optimizer=optax.sgd(0.1))
    >>> restore("no such folder", algorithm)
    Traceback (most recent call last):
    ...
    ValueError: There is no last checkpoint in no such folder.
    """
    paths = RunFolder(Path(folder))
    model = getattr(algorithm, "model", None)
    if data is None:
        examples = model.dummy_examples(0) if model else {"x": np.zeros(0)}
        data = FederatedData(examples, np.zeros(2, np.int64), ["client"])
    like = algorithm.with_memory(jax.eval_shape(algorithm.init, rng.root(0)), data)
    checkpoints = Checkpoints(paths.checkpoints, {"algorithm": type(algorithm).__name__})
    if which == "last":
        restored = checkpoints.newest(like, separate_rows=True)
    else:
        saved = checkpoints.rounds()
        round = best_round([line for line in read_metrics(paths.metrics) if line["round"] in saved])
        restored = None if round is None else (checkpoints.load(round, like, separate_rows=True), round)
    if restored is None:
        raise ValueError(f"There is no {which} checkpoint in {folder}.")
    return restored
