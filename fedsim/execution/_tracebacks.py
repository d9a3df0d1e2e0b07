"""Tracebacks of errors in a user's code, without the frames of the machinery between `apply` and this code."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import jax

_INTERNAL = tuple(str(Path(__file__).parents[1] / package) for package in ("execution", "primitives", "rounds"))


class WithoutInternalFrames:
    """A context that leaves the frames of fedsim's execution, primitives and rounds out of tracebacks, but for the last frame.

    JAX leaves out its own frames in the same way. ``JAX_TRACEBACK_FILTERING=off`` keeps all.

    >>> with WithoutInternalFrames():
    ...     raise ValueError("no clients")
    Traceback (most recent call last):
    ...
    ValueError: no clients
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or getattr(jax.config, "jax_traceback_filtering", None) == "off":
            return
        frames = []
        while traceback is not None:
            frames.append(traceback)
            traceback = traceback.tb_next
        shorter: TracebackType | None = None
        for each in reversed(frames):
            if shorter is None or not each.tb_frame.f_code.co_filename.startswith(_INTERNAL):
                shorter = TracebackType(shorter, each.tb_frame, each.tb_lasti, each.tb_lineno)
        error.__traceback__ = shorter
