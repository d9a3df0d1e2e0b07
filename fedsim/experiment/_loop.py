"""`run`, which trains, evaluates, and writes metrics and checkpoints until the last round or a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from tqdm import tqdm

from fedsim import distributed, rng
from fedsim.algorithm import Algorithm
from fedsim.configuration import Experiment, RunConfig, Settings
from fedsim.data import FederatedData
from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._default_evaluation import Scores, State
from fedsim.experiment._dispatch import DispatchedRounds, pipelined
from fedsim.experiment._folder import RunFolder
from fedsim.experiment._lines import Line, best_round
from fedsim.experiment._metrics_file import read_metrics
from fedsim.experiment._report import attackers_of, closing_table
from fedsim.experiment._run import Run, Stopwatch
from fedsim.experiment._run_log import Callback
from fedsim.experiment._signals import Interruption
from fedsim.samplers import Sampler

if TYPE_CHECKING:
    from fedsim.privacy import Guarantee


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of `run`.

    Attributes:
      state: the algorithm's state after ``round`` rounds.
      round: the number of finished rounds. It is less than ``rounds`` after a signal, or if the run was ``stopped``.
      evaluation, validation: the results of the last evaluation, on test and on validation data; None if there was none.
      history: the lines of ``metrics.jsonl``, including those of earlier processes.
      folder: the run folder, if there is one.
      stopped: why a rule or a callback ended the run early; None if none did.
      interrupted: the signal that ended the run early. By convention a program then exits with ``128 + interrupted``.
    """

    state: State
    round: int
    evaluation: Scores | None
    history: list[Line]
    folder: Path | None
    interrupted: signal.Signals | None = None
    validation: Scores | None = None
    stopped: str | None = None


def run(
    algorithm: Algorithm,
    sampler: Sampler,
    *,
    rounds: int,
    folder: str | Path | None = None,
    test_data: FederatedData | None = None,
    validation_data: FederatedData | None = None,
    stop_when: str | None = None,
    evaluate: Callable[[State], Scores] | None = None,
    evaluate_every: int = 10,
    checkpoint_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    config: RunConfig | Mapping[str, Any] | None = None,
    settings: Any = None,
    rounds_per_dispatch: int | Literal["auto"] = "auto",
    table: bool | None = None,
    writers: str | None = None,
    privacy: Guarantee | None = None,
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
      validation_data: evaluated in the same way, with names of metrics that begin with ``validation_``. The best checkpoint is
        then chosen by these, and not by the test data.
      stop_when: rules that end the run after an evaluation, joined by "or", see `STOP_RULES`: ``"no_better(evaluations=5)"``,
        no better validation loss in five evaluations; ``"reached(value=0.9)"``, a validation accuracy;
        ``"spent(megabytes=100)"`` or ``"spent(seconds=3600)"``, what clients send and receive, or simulated seconds.
      evaluate: replaces the evaluation on ``test_data`` by a function from the state to an `Evaluation` or to a mapping of
        names to numbers. Numbers that are a `fedsim.metrics.Score` say which values are better.
      evaluate_every: the number of rounds between evaluations. There is always one after the last round.
      checkpoint_every: the number of rounds between checkpoints; None saves about every ten seconds. The last two checkpoints
        and the best one are kept; the best is judged by the accuracy, otherwise by the loss, otherwise by the first metric that
        says which values are better (`fedsim.metrics.better_of`), and if there is none, there is no best one.
      callbacks: functions that are called with every line of the metrics, and with the state after that round if it is
        available (at evaluations, and at the end of a dispatch), otherwise with None. If one returns ``"stop"``, the run ends
        after the next multiple of ``evaluate_every`` rounds. Callbacks do not get the lines of earlier processes, so the same
        call with the folder of such a run goes on with its next rounds, until one returns ``"stop"`` again.
      progress: whether to show a progress bar on stderr.
      config: the identity of the run, together with the clients' names and sizes. By default it consists of the arguments,
        except functions, and therefore without models and optimizers.
      settings: a dataclass that is recorded with the config and not compared.
      rounds_per_dispatch: the maximum number of rounds that are sent to the device at once. ``"auto"`` sends as many as take a
        fraction of a second.
      table: whether to print a closing table on stdout; None prints it if ``progress`` is true.
      writers: where metrics are written besides ``metrics.jsonl``, separated by commas: ``"tensorboard"``, ``"wandb"``
        (Weights & Biases), ``"mlflow"``, or ``"none"``; None is TensorBoard if tensorboardX is installed. All write into the
        folder, unless the environment variables ``WANDB_MODE`` and ``MLFLOW_TRACKING_URI`` name another place. A run that
        continues goes on in the same run of Weights & Biases and MLflow, and no round is written twice. What they have is never
        deleted, such as the last evaluation of a run that gets more rounds.
      privacy: the guarantee of the algorithm with this sampler, ``Guarantee.of(algorithm, sampler, delta=...)``: the lines of
        evaluations then have ``epsilon`` after their round, and the closing table what it means. It takes no ``stop_when``.

    Raises:
      ImportError: the library of one of the ``writers`` is not installed.
      ValueError: a number is not positive, the data does not fit the model, the folder holds another run, or ``privacy`` is of
        another one.
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
    current = Run(
        algorithm,
        sampler,
        rounds=rounds,
        folder=folder,
        test_data=test_data,
        validation_data=validation_data,
        stop_when=stop_when,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        callbacks=callbacks,
        config=config,
        settings=settings,
        rounds_per_dispatch=rounds_per_dispatch,
        writers=writers,
        privacy=privacy,
    )
    log, watch, start = current.log, Stopwatch(), current.position
    stopped_by: signal.Signals | None = None
    progress = progress and distributed.is_first()
    bar = tqdm(total=rounds, initial=start, unit="round", disable=not progress, dynamic_ncols=True, leave=True)

    @distributed.losses_named(current.how_to_resume)
    def dispatch() -> DispatchedRounds | None:
        nonlocal stopped_by
        current.wait_for_others()
        stopped_by = interruption.received()
        can_go_on = current.position < current.rounds and not current.waits and not stopped_by
        if not can_go_on:
            return None
        watch.start()
        sent = current.dispatch()
        watch.follow(sent.infos)
        return sent

    @distributed.losses_named(current.how_to_resume)
    def finish(dispatch: DispatchedRounds) -> None:
        dispatch = dispatch._replace(infos=jax.device_get(dispatch.infos))
        current.finish(dispatch, watch.lap(dispatch.stop))
        bar.set_postfix(log.latest(), refresh=False)
        bar.update(len(dispatch.cohorts))

    with Interruption() as interruption, current.write_errors(), warnings_above(bar):
        try:
            if last := pipelined(dispatch, finish):
                with distributed.losses_named(current.how_to_resume):
                    current.save(last)
        finally:
            bar.close()
            current.close()
    current.draw()
    position = current.position
    stopped_by = stopped_by if position < current.rounds else None
    if not distributed.is_first():
        pass  # Process 0 says what follows.
    elif stopped_by:
        print(f"\n{stopped_by.name}: stopped after round {position} of {rounds}.", file=sys.stderr)
        print(current.how_to_resume(), file=sys.stderr)
    elif progress if table is None else table:
        print(
            closing_table(
                log.history,
                round=position,
                rounds=rounds,
                seconds=time.perf_counter() - began,
                rate=watch.rate(position),
                devices=current.devices,
                attackers=attackers_of(current.sampler),
                written=log.written,
                warning=current.monitor.warning(),
                stopped=current.stopped,
                privacy=privacy,
            )
        )
    return Result(
        state=current.state,
        round=position,
        evaluation=current.evaluation or current.evaluate(),
        history=log.history,
        folder=current.paths.path if current.paths else None,
        interrupted=stopped_by,
        validation=current.validation or current.validate(),
        stopped=current.stopped,
    )


def run_experiment(experiment: Experiment, config: RunConfig, settings: Settings, **options: Any) -> Result:
    """Runs what `build` has built from the configuration, in the folder of the settings; see `run` for the options.

    >>> from fedsim.configuration import build
    >>> config, settings = RunConfig(model="digits_logistic", rounds=2, clients=2), Settings()
    >>> run_experiment(build(config, settings), config, settings, progress=False).round
    2
    """
    return run(experiment.algorithm, experiment.sampler, **arguments_of(experiment, config, settings), **options)


def arguments_of(experiment: Experiment, config: RunConfig, settings: Settings) -> dict[str, Any]:
    """Returns the arguments of `run` that a configuration determines, except the algorithm and the sampler.

    >>> from fedsim.configuration import build
    >>> config, settings = RunConfig(rounds=7), Settings()
    >>> arguments = arguments_of(build(config, settings), config, settings)
    >>> arguments["rounds"], arguments["rounds_per_dispatch"]
    (7, 'auto')
    """
    can_evaluate = hasattr(experiment.algorithm, "model") or hasattr(experiment.algorithm, "evaluate")
    return {
        "rounds": config.rounds,
        "folder": settings.folder,
        "test_data": experiment.test_data if can_evaluate else None,
        "validation_data": experiment.validation_data if can_evaluate else None,
        "stop_when": config.stop_when,
        "evaluate_every": config.evaluate_every,
        "checkpoint_every": settings.checkpoint_every,
        "config": config,
        "settings": settings,
        "privacy": experiment.privacy,
        "rounds_per_dispatch": settings.rounds_per_dispatch or "auto",
        "writers": settings.writers,
    }


@contextlib.contextmanager
def warnings_above(bar: tqdm[Any]) -> Iterator[None]:
    """Shows warnings above the progress bar instead of in the middle of it.

    >>> with tqdm(total=2, disable=True) as bar, warnings_above(bar):
    ...     warnings.showwarning.__name__
    'show_above'
    """
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
    round = saved_round(folder, which)
    if which == "last" and (restored := checkpoints.newest(like, separate_rows=True)):
        return restored
    return checkpoints.load(round, like, separate_rows=True), round


def saved_round(folder: str | Path, which: Literal["last", "best"]) -> int:
    """Returns the round of the newest checkpoint of a run, or of that of its best evaluation.

    Raises:
      ValueError: there is none.

    >>> saved_round("no such folder", "best")
    Traceback (most recent call last):
    ...
    ValueError: There is no best checkpoint in no such folder.
    """
    paths = RunFolder(Path(folder))
    saved = Checkpoints(paths.checkpoints).rounds()
    round = saved[-1] if saved else None
    if which == "best":
        round = best_round([line for line in read_metrics(paths.metrics) if line["round"] in saved])
    if round is None:
        raise ValueError(f"There is no {which} checkpoint in {folder}.")
    return round
