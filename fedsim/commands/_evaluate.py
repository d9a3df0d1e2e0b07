"""``fedsim evaluate``: evaluates the model of a run."""

from __future__ import annotations

import textwrap
from typing import Literal

from fedsim import experiment
from fedsim.commands._options import RUNS_CODE, TRUST, Option
from fedsim.commands._training import options_of_stored_run
from fedsim.experiment.driving import evaluation_line

_ABOUT = f"Evaluate the model of the run in FOLDER. Nothing is written into the folder. {RUNS_CODE}"
_USAGE = f"""\
usage: fedsim evaluate FOLDER [--split test|validation|train] [--which last|best] [--personalized] [OPTIONS]

{textwrap.fill(_ABOUT, 100)}
`fedsim evaluate FOLDER --help` lists the options."""
_OPTIONS = {
    "split": Option("", Literal["test", "validation", "train"], "test", "The examples: test, validation or training data."),
    "which": Option("", Literal["last", "best"], "last", "The checkpoint: the newest one, or that of the best evaluation."),
    "personalized": Option("", bool, False, "Evaluate each client's own model, if the algorithm has such models."),
    "trust": TRUST,
}


def main(arguments: list[str]) -> int:
    """Runs ``fedsim evaluate`` with these arguments and returns the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    folder, *rest = arguments
    chosen, settings = options_of_stored_run(folder, rest, _OPTIONS, "fedsim evaluate FOLDER", _ABOUT)
    run = experiment.load(folder, which=chosen["which"], settings=settings)
    data = {"test": run.test_data, "validation": run.validation_data, "train": run.train_data}[chosen["split"]]
    if data is None:
        raise ValueError("The run has no validation data: give --split test or train.")
    evaluation = run.evaluate(data, personalized=chosen["personalized"])
    print(f"{chosen['split']} data, {data.num_examples:,} examples of {data.num_clients:,} clients, after round {run.round}\n")
    print(experiment.evaluation_table(evaluation_line(evaluation, run.round, chosen["split"]), chosen["split"]))
    return 0
