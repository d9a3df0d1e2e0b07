"""Ctrl-C and SIGTERM as a wish to stop soon."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interruption:
    """While entered, the first SIGINT or SIGTERM is only noted; the second acts as it would have without this.

    Python allows signal handlers in the main thread alone: elsewhere this does nothing.

    >>> with Interruption() as interruption:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interruption.signal
    <Signals.SIGINT: 2>
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # A handler that was not installed from Python cannot be put back; the default is the nearest to it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
