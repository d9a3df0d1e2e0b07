"""`run`: rounds, evaluations, metrics and checkpoints, until the last round or a signal."""

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
from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._config import RESUME_COMMAND, RunConfig
from fedsim.experiment._disk import WriteError, explained, is_full
from fedsim.experiment._divergence import LossMonitor
from fedsim.experiment._folder import RunFolder
from fedsim.experiment._identity import about, describe, population, title
from fedsim.experiment._journal import Callback, Journal
from fedsim.experiment._lines import Line, best_round, evaluation_line, round_lines
from fedsim.experiment._pace import Pace, cohorts
from fedsim.experiment._report import closing_table, devices_of
from fedsim.experiment._signals import Interruption
from fedsim.experiment._writers import read_metrics
from fedsim.samplers import Sampler
from fedsim.samplers._checked import checked_cohort

State = Any
Tested = Evaluation | Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What `run` returns.

    Attributes:
      state: the algorithm's state after ``round`` rounds.
      round: finished rounds; fewer than asked for only if a signal came.
      evaluation: of the last evaluation; None if there was none.
      history: the lines of ``metrics.jsonl``, those of earlier processes included.
      folder: the run folder, if there is one.
      interrupted: the signal that ended the run early; a program exits with ``128 + interrupted``.
    """

    state: State
    round: int
    evaluation: Tested | None
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
    evaluate: Callable[[State], Tested] | None = None,
    evaluate_every: int = 10,
    checkpoint_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    config: RunConfig | Mapping[str, Any] | None = None,
    settings: Any = None,
    rounds_per_dispatch: int | Literal["auto"] = "auto",
) -> Result:
    """Trains for a number of rounds; with a folder, goes on where an earlier process stopped.

    Several rounds go to the device at once, and the next ones are on their way before the last ones are read, so the device
    does not wait for the host. A run resumed on the same devices ends with the same bits as an
    unbroken one.

    Args:
      algorithm: any `Algorithm`, also one that overrides ``apply``.
      sampler: anything with ``cohort(round) -> Cohort``. The root key of its cohorts is that of the run: the initial state is
        drawn from it, too.
      rounds: how many.
      folder: the run folder; None writes nothing. If it holds the beginning of this run, the run is resumed; if no round of
        the run that it is of was finished, it is free for another one.
      test_data: evaluated by ``algorithm.evaluate(state, test_data)`` if it has that, else by its model on ``state.params``,
        and if clients have models of their own, by `fedsim.evaluate_personalized`, whose metrics are named ``personal_...``.
      evaluate: what to do instead: a function from the state to an `Evaluation` or to a mapping of names to numbers.
      evaluate_every: rounds between evaluations; there is always one after the last round.
      checkpoint_every: rounds between checkpoints; None: every ten seconds or so. The last two and the best are kept.
      callbacks: each is called with every line of the metrics as it is written, and with the state after that round where it
        is at hand (on evaluations, and at the end of a dispatch), else None.
      progress: whether to show a progress bar and a closing table, on stderr and stdout.
      config: what identifies the run, together with its clients' names and sizes; a folder with another one is refused.
        Default: what can be told from the arguments, which is all but functions, and so not models and optimizers.
      settings: recorded beside the config, a dataclass; not compared.
      rounds_per_dispatch: at most this many rounds go to the device at once; ``"auto"``: as many as a fraction of a second
        lasts.

    Raises:
      ValueError: a number is not positive, the data does not fit the model, the folder holds another run.
      OSError: the folder cannot be written to.

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
    most = None if rounds_per_dispatch == "auto" else rounds_per_dispatch
    checks.whole(1, or_none=True, checkpoint_every=checkpoint_every)
    if most is not None:
        checks.whole(1, rounds_per_dispatch=most, remedy="give a positive whole number, or 'auto'")
    first = checked_cohort(sampler, 0)
    checked_cohort(sampler, rounds - 1, first)  # A schedule that ends too early says so now, and not after its last round.
    algorithm.check(first.data)
    key = rng.stream(first.key, "init")
    like = jax.eval_shape(algorithm.init, key)
    test = evaluate or _default_test(algorithm, first.data, test_data, like)
    described = describe(algorithm, sampler, config, rounds=rounds, evaluate_every=evaluate_every)
    paths = None if folder is None else RunFolder(Path(folder))
    devices = devices_of(algorithm.execution)
    if paths:
        with _write_errors(paths, config):
            recorded = dataclasses.asdict(settings) if settings is not None else {}
            paths.claim(described, population(first.data), recorded, devices)

    full = algorithm.with_memory(like, first.data)
    keeps = any(map(is_rows, jax.tree.leaves(full, is_leaf=is_rows)))
    checkpoints = Checkpoints(paths.checkpoints, about(algorithm, first.data) if keeps else None) if paths else None
    if checkpoints and not Checkpoints.available():
        warnings.warn(
            "No checkpoints will be written: orbax-checkpoint is not installed (pip install 'fedsim-jax[run]').", stacklevel=2
        )
        checkpoints = None
    restored = checkpoints.newest(full) if checkpoints else None
    state, start = restored or (algorithm.with_memory(algorithm.init(key), first.data), 0)
    with _write_errors(paths, config):
        journal = Journal(paths, start, checkpoints, callbacks)
    monitor = LossMonitor(getattr(getattr(algorithm, "model", None), "num_classes", None))
    for line in journal.history:
        monitor.add(line)
    diverged = False

    boundaries = [rounds, *([evaluate_every] if test else []), *([checkpoint_every] if checkpoint_every else [])]
    pace = Pace(most, boundaries)
    evaluation = None
    last: _Dispatch | None = None
    compiled, mark = None, time.perf_counter()
    bar = tqdm(total=rounds, initial=start, unit="round", disable=not progress, dynamic_ncols=True, leave=True)

    def settle(dispatch: _Dispatch) -> None:
        """Waits for a dispatch, and does all that follows from it while the next one runs."""
        nonlocal evaluation, compiled, mark, diverged
        infos, lines = jax.device_get(dispatch.infos), len(journal.history)
        now = time.perf_counter()
        seconds, mark = now - mark, now
        compiled = compiled or (dispatch.stop, now)
        length = len(dispatch.cohorts)
        pace.measured(length, seconds)
        if isinstance(infos, RoundInfo):
            report_problems(algorithm, infos, dispatch.cohorts)
        journal.write(round_lines(infos, dispatch.stop - length, length, seconds), dispatch.state)
        if test and (dispatch.stop % evaluate_every == 0 or dispatch.stop == rounds):
            if evaluate or _is_personal(algorithm):
                jax.block_until_ready(state)  # It may have collectives, and a CPU can run one program with these at a time.
            evaluation = test(dispatch.state)
            journal.write([evaluation_line(evaluation, dispatch.stop)], dispatch.state)
        journal.save(dispatch.stop, dispatch.state, checkpoint_every, final=dispatch.stop == rounds)
        for line in journal.history[lines:]:
            monitor.add(line)
        if not diverged and (text := monitor.warning()):
            diverged = True
            warnings.warn(text, stacklevel=3)
        bar.set_postfix(journal.latest(), refresh=False)
        bar.update(length)

    with Interruption() as interruption, _write_errors(paths, config), _warnings_above(bar):
        position = start
        try:
            state = checkpoints.adopt(state) if checkpoints else state
            while position < rounds and not interruption.signal:
                try:
                    together = cohorts(sampler, position, pace.length(position), first)
                    state, infos = algorithm.apply_rounds(state, together, max_rounds=pace.limit)
                except Exception:
                    if last:
                        settle(last)
                    raise
                previous, last = last, _Dispatch(position + len(together), together, state, infos)
                position = last.stop
                if previous:
                    settle(previous)
            if last:
                settle(last)
            if position < rounds:
                journal.save(position, state, checkpoint_every, final=True)
        finally:
            bar.close()
            journal.close()
    if test and start == rounds:
        evaluation = test(state)

    # The first dispatch compiles, and what follows the last round is not training.
    rate = (position - compiled[0]) / (mark - compiled[1]) if compiled and position > compiled[0] else None
    if paths:
        with _write_errors(paths, config):
            journal.draw(paths.picture, title(described))
    stopped_by = interruption.signal if position < rounds else None
    if stopped_by:
        print(f"\n{stopped_by.name}: stopped after round {position} of {rounds}.", file=sys.stderr)
        print(_how_to_resume(paths, checkpoints, config), file=sys.stderr)
    elif progress:
        print(
            closing_table(
                journal.history,
                round=position,
                rounds=rounds,
                seconds=time.perf_counter() - began,
                rate=rate,
                devices=devices,
                written=journal.written,
                warning=monitor.warning(),
            )
        )
    return Result(
        state=state,
        round=position,
        evaluation=evaluation,
        history=journal.history,
        folder=paths.path if paths else None,
        interrupted=stopped_by,
    )


class _Dispatch(NamedTuple):
    stop: int
    cohorts: list[Cohort]
    state: State
    infos: Any


def _is_personal(algorithm: Algorithm) -> bool:
    return hasattr(algorithm, "personal_params")


def _default_test(
    algorithm: Algorithm, train: FederatedData, data: FederatedData | None, like: State
) -> Callable[[State], Tested] | None:
    if data is None:
        return None
    own, model = getattr(algorithm, "evaluate", None), getattr(algorithm, "model", None)
    if own is not None:
        return lambda state: own(state, data)
    if model is None or not hasattr(like, "params"):
        raise ValueError(
            f"{type(algorithm).__name__} cannot be evaluated on test_data, for want of a model or of state.params: give it a "
            "method evaluate(state, data), or give run evaluate=, a function of the state."
        )
    model.check(data)
    execution = algorithm.execution if isinstance(algorithm.execution, Jit) else Jit()
    shapes = [[leaf.shape for leaf in jax.tree.leaves(of)] for of in (like.params, jax.eval_shape(model.init, rng.root(0)))]

    def test(state: State) -> Evaluation:
        # A server that has only a part of the model, or several, has none to evaluate but the clients'.
        whole = evaluate_model(model, state.params, data, execution=execution) if shapes[0] == shapes[1] else Evaluation({}, {})
        if not _is_personal(algorithm):
            return whole
        own = evaluate_personalized(algorithm, state, train, data, execution=execution)
        overall = whole.overall | {f"personal_{name}": value for name, value in own.overall.items()}
        return Evaluation(overall, whole.clients | {f"personal_{name}": mean for name, mean in own.clients.items()})

    if shapes[0] != shapes[1] and not _is_personal(algorithm):
        raise ValueError(
            f"The parameters of {type(algorithm).__name__}'s state are not those of its model, so they cannot be evaluated on "
            "test_data: give it a method evaluate(state, data), or give run evaluate=, a function of the state."
        )
    return test


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
    """Returns the state that a run folder holds, and its round.

    Args:
      folder: the run folder.
      algorithm: the algorithm of the run.
      which: the last state, or that of the best evaluation.
      data: the population, which tells the shapes of examples. Only an algorithm without a model needs it, and only if its
        clients keep something between rounds.

    Raises:
      ValueError: there is no such checkpoint, or it belongs to another algorithm or model.

    >>> import optax, fedsim
    >>> algorithm = fedsim.algorithms.FedSGD(model=fedsim.models.digits_logistic(), server_optimizer=optax.sgd(0.1))
    >>> restore("no such folder", algorithm)
    Traceback (most recent call last):
    ...
    ValueError: no such folder holds no last checkpoint.
    """
    paths = RunFolder(Path(folder))
    model = getattr(algorithm, "model", None)
    if data is None:
        examples = model.dummy_examples(0) if model else {"x": np.zeros(0)}
        data = FederatedData(examples, np.zeros(2, np.int64), ["client"])
    like = algorithm.with_memory(jax.eval_shape(algorithm.init, rng.root(0)), data)
    checkpoints = Checkpoints(paths.checkpoints, {"algorithm": type(algorithm).__name__})
    if which == "last":
        restored = checkpoints.newest(like, apart=True)
    else:
        there = checkpoints.rounds()
        round = best_round([line for line in read_metrics(paths.metrics) if line["round"] in there])
        restored = None if round is None else (checkpoints.load(round, like, apart=True), round)
    if restored is None:
        raise ValueError(f"{folder} holds no {which} checkpoint.")
    return restored
