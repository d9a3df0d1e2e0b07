"""`load`: a run that is stored in a folder, as one object."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsim.algorithm import Algorithm
from fedsim.configuration import RunConfig, Settings, build
from fedsim.data import FederatedData
from fedsim.evaluation import evaluate_personalized
from fedsim.experiment._default_evaluation import Scores, State, default_evaluation
from fedsim.experiment._folder import RunFolder, is_sweep, read_config, stored_run, warn_of_changed_code
from fedsim.experiment._lines import Line, observed
from fedsim.experiment._loop import restore
from fedsim.experiment._metrics_file import read_metrics
from fedsim.samplers import Sampler

if TYPE_CHECKING:
    from fedsim.privacy import Guarantee


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredRun:
    """A run that `load` has read from its folder.

    Attributes:
      folder: where it is stored.
      config: its configuration.
      algorithm: with its model, optimizers and execution.
      sampler: of its cohorts, ``sampler.data`` is the training data.
      test_data, validation_data: what it was evaluated on; ``validation_data`` is None if it had none.
      state: the algorithm's state after ``round`` rounds, from a checkpoint.
      round: the number of rounds.
      privacy: the guarantee of differential privacy; None if the run has none.
      history: the lines of ``metrics.jsonl``.

    >>> [field.name for field in dataclasses.fields(StoredRun)][:3]
    ['folder', 'config', 'algorithm']
    """

    folder: Path
    config: RunConfig
    algorithm: Algorithm
    sampler: Sampler
    test_data: FederatedData
    validation_data: FederatedData | None
    state: State
    round: int
    history: list[Line]
    privacy: Guarantee | None = None

    @property
    def model(self) -> Any:
        """The algorithm's model."""
        return self.algorithm.model  # type: ignore[attr-defined]

    @property
    def train_data(self) -> FederatedData:
        """The training data."""
        return self.sampler.data

    def metrics(self) -> dict[str, np.ndarray]:
        """Returns the numbers of ``metrics.jsonl`` by name, ``float64 [lines]``; NaN where a line has none of this name.

        Rounds and evaluations have lines of their own. ``pandas.DataFrame(run.metrics())`` is a table of them.
        """
        kinds = (int, float, type(None))
        names = {name: None for line in self.history for name, value in line.items() if isinstance(value, kinds)}
        columns = {name: [line.get(name) for line in self.history] for name in names}
        return {name: np.array([np.nan if value is None else value for value in of], float) for name, of in columns.items()}

    def evaluate(self, data: FederatedData | None = None, *, personalized: bool = False) -> Scores:
        """Evaluates the state as the run did.

        Args:
          data: what it is evaluated on; default: the test data.
          personalized: whether each client's own model is evaluated, see `fedsim.evaluate_personalized`.
        """
        data = self.test_data if data is None else data
        if personalized:
            return evaluate_personalized(self.algorithm, self.state, self.train_data, data)
        scores = default_evaluation(self.algorithm, self.train_data, data, self.state)
        assert scores is not None
        return scores(self.state)


def load(folder: str | Path, *, which: Literal["last", "best"] = "last", settings: Settings | None = None) -> StoredRun:
    """Returns the run in a folder that ``fedsim run`` has written: its configuration, data, algorithm, state and metrics.

    The configuration may name Python code (``FILE.py:CLASS``), which is run: look at a folder that you did not write.

    Args:
      folder: of the run.
      which: ``"last"`` for the newest checkpoint, ``"best"`` for that of the best evaluation.
      settings: how rounds and evaluations are run; default: the settings that are stored.

    Raises:
      ValueError: there is no run, or no such checkpoint, the folder holds a sweep, or the run was started in Python.

    >>> load("no such folder")
    Traceback (most recent call last):
    ...
    ValueError: There is no run in no such folder: cannot read no such folder/config.json (FileNotFoundError).
    """
    if is_sweep(folder):
        raise ValueError(f"Expected the folder of one run, got that of a sweep, {folder}: name the folder of one of its runs.")
    stored = read_config(folder)
    warn_of_changed_code(folder, stored)
    config, own = stored_run(folder, stored)
    experiment = build(config, settings or own)
    state, round = restore(folder, experiment.algorithm, which, experiment.sampler.data)
    history = read_metrics(RunFolder(Path(folder)).metrics)
    experiment = experiment._replace(sampler=observed(experiment.sampler, history, round))
    return StoredRun(
        folder=Path(folder), config=config, **experiment._asdict(), state=state, round=round, history=history,
    )  # fmt: skip
