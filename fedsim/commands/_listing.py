"""Lists of what is registered, with the first line of each docstring; facts of one thing."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedsim.datasets import Description


def print_listing(things: Mapping[str, Any]) -> None:
    """Prints a line for each name, with the first line of the docstring of what it names.

    >>> class Mean: "Returns the mean."
    >>> class Median: "Returns the median."
    >>> print_listing({"mean": Mean, "median": Median})
    mean    Returns the mean.
    median  Returns the median.
    """
    width = max(map(len, things)) + 2
    for name, thing in things.items():
        print(f"{name:<{width}}{(thing.__doc__ or '').strip().partition(chr(10))[0]}")


def print_facts(facts: Iterable[tuple[str, str | Sequence[str]]]) -> None:
    """Prints a name and a wrapped text for each fact; facts without a text are left out.

    >>> print_facts([("task", "classification"), ("model", "")])
      task      classification
    """
    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    for name, text in facts:
        if not text:
            continue
        start = f"  {name:<9} "
        for paragraph in [text] if isinstance(text, str) else text:
            print(textwrap.fill(paragraph, width, initial_indent=start, subsequent_indent=" " * 14, break_on_hyphens=False))
            start = " " * 12


def shown_population(clients: int | None, examples: int | None) -> str:
    """Returns the numbers of clients and examples as text.

    >>> shown_population(None, 1000)
    'any number of clients, 1,000 examples'
    """
    shown = ["any number of" if count is None else f"{count:,}" for count in (clients, examples)]
    return f"{shown[0]} clients, {shown[1]} examples"


def print_task(about: Description) -> None:
    """Prints what a run with a file of one's own trains on: the task, the sizes of the splits, the features, the model.

    >>> print_task(Description(name="a", task="regression", splits={"train": (2, 30)}, default_model="linear_regression"))
      task      regression
      train     2 clients, 30 examples
      model     linear_regression
    """
    splits = [(split, shown_population(*counts)) for split, counts in about.splits.items()]
    model = about.default_model if isinstance(about.default_model, str) else "none that fits: give --model"
    print_facts([("task", about.task), *splits, *about.features.items(), ("model", model)])
