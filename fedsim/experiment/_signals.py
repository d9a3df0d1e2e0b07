"""Ctrl-C and SIGTERM as a request to stop after the rounds that are running."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from fedsim import distributed


class Interruption:
    """A context in which the first SIGINT or SIGTERM is only recorded. The second one has its usual effect.

    Python allows signal handlers only in the main thread. In other threads the context has no effect.

    Attributes:
      signal: the signal that was received; None before that.

    >>> with Interruption() as interruption:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interruption.signal
    <Signals.SIGINT: 2>
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def received(self) -> signal.Signals | None:
        """Returns the signal that any process of the run has received; None before that. All processes have to call it."""
        numbers = [number for number in distributed.of_all(self.signal) if number]
        if numbers:
            self.signal = signal.Signals(numbers[0])
        return self.signal

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # Python cannot reinstall a handler that was not installed from Python; the default is the closest to it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
