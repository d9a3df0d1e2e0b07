"""The options of a run on the command line that takes a second."""

from __future__ import annotations

SMALL = [
    "--model",
    "digits_logistic",
    "--rounds",
    "4",
    "--clients",
    "3",
    "--epochs",
    "1",
    "--evaluate-every",
    "2",
    "--execution",
    "jit",
]
