"""What is written of a run, and what of it must be on disk before what."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._disk import writing
from fedsim.experiment._folder import RunFolder, lock
from fedsim.experiment._lines import Line, score
from fedsim.experiment._report import draw_learning_curve
from fedsim.experiment._writers import MetricsFile, TensorBoard

State = Any
Callback = Callable[[Line, State | None], object]

_SECONDS_PER_CHECKPOINT = 10.0


class Journal:
    """History, metrics file, TensorBoard, checkpoints and callbacks of one run.

    Args:
      paths: the run folder; None keeps the history alone.
      start: finished rounds at the start; lines beyond them, of a process that was killed, are cut off.
      checkpoints: None: none are written.
      callbacks: called with every line.
    """

    def __init__(
        self, paths: RunFolder | None, start: int, checkpoints: Checkpoints | None, callbacks: Sequence[Callback]
    ) -> None:
        self.history: list[Line] = []
        self.written: list[str] = []
        self._callbacks, self.checkpoints = callbacks, checkpoints
        self._file: MetricsFile | None = None
        self._tensorboard: TensorBoard | None = None
        self._lock = lock(paths.path) if paths else None
        if paths:
            try:
                self._open(paths, start)
            except BaseException:
                self.close()
                raise
        self._best_score: float | None = None
        self._best: tuple[int, State | None] | None = None
        for line in self.history:
            self._judge(line, None)
        self._saved, self._saved_at = start, time.monotonic()

    def _open(self, paths: RunFolder, start: int) -> None:
        self._file = MetricsFile(paths.metrics, keep_rounds=start)
        self.history = list(self._file.history)
        self.written = [f"{paths.path}/", "  config.json, metrics.jsonl"]
        try:
            self._tensorboard = TensorBoard(paths.path, keep_rounds=start)
            self.written.append("  tensorboard/")
        except ModuleNotFoundError:
            pass
        if self.checkpoints:
            self.written.append("  checkpoints/ (the last two and the best)")

    def write(self, lines: list[Line], state: State) -> None:
        self.history += lines
        if self._file:
            self._file.write(lines)
        if self._tensorboard:
            self._tensorboard.write(lines)
        for line in lines:
            at_hand = state if line is lines[-1] else None
            self._judge(line, at_hand)
            for callback in self._callbacks:
                callback(line, at_hand)

    def save(self, round: int, state: State, every: int | None, final: bool) -> None:
        """Saves if it is time to; the lines up to this round are on disk already."""
        due = round % every == 0 if every else time.monotonic() - self._saved_at > _SECONDS_PER_CHECKPOINT
        if self.checkpoints and (due or final) and round > self._saved:
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
        """The newest loss and accuracy, for the progress bar."""
        shown = {}
        for name, label in (("loss", "loss"), ("test_accuracy", "accuracy")):
            value = next((line[name] for line in reversed(self.history[-1000:]) if line.get(name) is not None), None)
            if value is not None:
                shown[label] = f"{value:.3f}"
        return shown

    def draw(self, path: Path, title: str) -> None:
        try:
            with writing(path):
                draw_learning_curve(self.history, path, title)
            self.written.append(f"  {path.name}")
        except ModuleNotFoundError:
            pass

    def close(self) -> None:
        if self._lock:
            self._lock.close()

    def _judge(self, line: Line, state: State | None) -> None:
        value = score(line)
        if value is not None and (self._best_score is None or value > self._best_score):
            self._best_score, self._best = value, (line["round"], state)
