"""The log of a run: metrics, checkpoints and callbacks, written in an order that survives a killed process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim import distributed
from fedsim.durable_files import writing
from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._folder import RunFolder
from fedsim.experiment._lines import Line, score, score_name
from fedsim.experiment._metrics_file import MetricsFile
from fedsim.experiment._report import draw_learning_curve
from fedsim.experiment._writers import Writer, open_writers
from fedsim.plots import plot_nodes, plot_progress, plot_timeline
from fedsim.run_files import scalar_metrics, shown_number
from fedsim.samplers import Sampler
from fedsim.systems import ClockedSampler, ScheduledSampler

State = Any
Callback = Callable[[Line, State | None], object]

STOP = "stop"  # what a callback returns to end the run
_SECONDS_PER_CHECKPOINT = 10.0
_LAST = "  checkpoints/ (the last two)"


class RunLog:
    """The history, metrics file, further writers, checkpoints and callbacks of one run.

    Args:
      paths: the run folder, which the caller has locked; without one, only the history is recorded. If several processes share
        the run, process 0 writes and calls the callbacks, and all record the history.
      start: the number of finished rounds at the start. Lines of later rounds, written by a process that was killed, are
        deleted.
      checkpoints: None writes no checkpoints.
      callbacks: functions that are called with every line.
      evaluated: whether the run has an evaluation after a round.
      evaluate_every: the number of rounds between evaluations. Only these evaluations may be the best one, whose checkpoint is
        kept: that after the last round is deleted if the run gets more rounds, and the last checkpoint is kept anyway.
      writers: their names, see `open_writers`.
      config: the configuration that writers get.

    Attributes:
      history: all lines of the run, including those of earlier processes.
      written: a list of what is in the folder, for the closing table.
      stopped_by: why the run ends at its next evaluation, if a callback returned ``"stop"``; otherwise None.
    """

    def __init__(
        self,
        paths: RunFolder | None,
        start: int,
        checkpoints: Checkpoints | None,
        callbacks: Sequence[Callback],
        evaluated: Callable[[int], bool],
        evaluate_every: int,
        writers: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        paths = paths if distributed.is_first() else None
        self.history: list[Line] = []
        self.written: list[str] = []
        self.stopped_by: str | None = None
        self._callbacks, self.checkpoints, self._evaluate_every = callbacks, checkpoints, evaluate_every
        self._file: MetricsFile | None = None
        self._writers: dict[str, Writer] = {}
        if paths:
            try:
                self._open(paths, start, evaluated, writers, config or {})
            except BaseException:
                self.close()
                raise
        self.history = distributed.from_first(self.history)
        self._best_score: float | None = None
        self._best: tuple[int, State | None] | None = None
        for line in self.history:
            self._update_best(line, None)
        self._saved, self._saved_at = start, time.monotonic()

    def _open(
        self,
        paths: RunFolder,
        start: int,
        evaluated: Callable[[int], bool],
        writers: str | None,
        config: Mapping[str, Any],
    ) -> None:
        self._file = MetricsFile(paths.metrics, start, evaluated)
        self.history = list(self._file.history)
        self.written = [f"{paths.path}/", "  config.json, metrics.jsonl"]
        self._writers = open_writers(writers, paths.path, config, self.history)
        self.written += [f"  {name}/" for name in self._writers]
        if self.checkpoints:
            self.written.append(_LAST)

    def write(self, lines: list[Line], state: State) -> None:
        """Writes lines and calls the callbacks; ``state`` belongs to the last line."""
        self.history += lines
        if self._file:
            self._file.write(lines)
        for writer in self._writers.values():
            writer.write(lines)
        for line in lines:
            state_of_line = state if line is lines[-1] else None
            self._update_best(line, state_of_line)
            for callback in self._callbacks if distributed.is_first() else ():
                if callback(line, state_of_line) == STOP and self.stopped_by is None:
                    self.stopped_by = f"a callback said so after round {line['round']}"

    def is_due(self, round: int, every: int | None) -> bool:
        """Returns whether a checkpoint is due after a round: after every ``every`` rounds, or else about every ten seconds."""
        if self.checkpoints is None or every:
            return self.checkpoints is not None and round % (every or 1) == 0
        return distributed.from_first(time.monotonic() - self._saved_at > _SECONDS_PER_CHECKPOINT)

    def save(self, round: int, state: State, every: int | None, final: bool) -> None:
        """Writes a checkpoint if it is due, when the lines up to this round are on the disk."""
        if self.checkpoints and (final or self.is_due(round, every)) and round > self._saved:
            if self._file:
                self._file.sync()
            for writer in self._writers.values():
                writer.sync()
            keep = {self._saved, round}
            if self._best:
                keep.add(self._best[0])
                if self._best[1] is not None:
                    self.checkpoints.save(*self._best)
                    self._best = self._best[0], None
            self.checkpoints.save(round, state)
            self.checkpoints.keep_only(keep)
            self._saved, self._saved_at = round, time.monotonic()

    def latest(self) -> dict[str, str]:
        """Returns the newest training loss and accuracy, for the progress bar."""
        shown = {}
        for name in ("loss", "validation_accuracy", "test_accuracy"):
            value = next((line[name] for line in reversed(self.history[-1000:]) if line.get(name) is not None), None)
            if value is not None:
                shown[name] = shown_number(value, digits=3)
        return shown

    def draw(self, folder: Path, title: str, sampler: Sampler) -> None:
        """Draws the run's pictures, if matplotlib is installed: the learning curve, and those of a clock or of nodes."""
        pictures: dict[str, Callable[[Path], object]] = {
            "learning_curve.png": lambda path: draw_learning_curve(self.history, path, title)
        }
        if isinstance(sampler, ScheduledSampler | ClockedSampler):
            names = [
                name
                for line in self.history
                if (name := score_name(line) or next(iter(scalar_metrics(line, "test")), None)) and line[name] is not None
            ]
            if names:
                pictures["progress.png"] = lambda path: plot_progress({title: self.history}, names[-1]).savefig(path)
            ids = sampler.data.client_ids
            pictures["timeline.png"] = lambda path: plot_timeline(sampler.schedule, client_ids=ids).savefig(path)
        seen = {name for line in self.history for name in line}
        metrics = [name for name in ("accuracy", "loss") if f"test_personal_{name}_clients_mean" in seen]
        if "consensus_distance" in seen and metrics:
            pictures["nodes.png"] = lambda path: plot_nodes({title: self.history}, metrics[0]).savefig(path)
        for name, draw in pictures.items():
            try:
                with writing(folder / name):
                    draw(folder / name)
                self.written.append(f"  {name}")
            except ImportError:
                pass

    def close(self, is_finished: bool = False) -> None:
        """Ends the writers, after the last round or before it."""
        for writer in self._writers.values():
            writer.close(is_finished)

    def _update_best(self, line: Line, state: State | None) -> None:
        value = None if line["round"] % self._evaluate_every else score(line)
        if value is not None and (self._best_score is None or value > self._best_score):
            self._best_score, self._best = value, (line["round"], state)
            self.written = [text.replace(_LAST, "  checkpoints/ (the last two and the best)") for text in self.written]
