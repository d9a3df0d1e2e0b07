"""Ctrl-C while Python collects garbage, which it does often while modules are imported and while a run starts."""

from __future__ import annotations

import _thread
import sys
import threading
import time
from typing import Any

_SECONDS_UNTIL_REPEATED = 0.2


class LostInterruptsRepeated:
    """A context in which a Ctrl-C that Python would ignore is repeated a moment later.

    Python ignores exceptions in callbacks of its garbage collector, and JAX has one, which runs often while a program starts.
    """

    def __enter__(self) -> LostInterruptsRepeated:
        self._previous, sys.unraisablehook = sys.unraisablehook, self._repeat
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._previous

    def _repeat(self, ignored: Any) -> None:
        if ignored.exc_type is not KeyboardInterrupt:
            self._previous(ignored)
            return
        ended = threading.Event()

        def interrupt() -> None:
            # Before this method has ended, the interrupt would be lost again, and a thread may take long to start.
            ended.wait()
            time.sleep(_SECONDS_UNTIL_REPEATED)
            _thread.interrupt_main()

        threading.Thread(target=interrupt, daemon=True).start()
        ended.set()
