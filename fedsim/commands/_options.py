"""Options that are known only when a command runs: they depend on the dataset, on the algorithm or on a run folder."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import tyro

from fedsim.names import look_up, parse_call

RUNS_CODE = (
    "If the configuration names Python code (FILE.py:CLASS or MODULE:CLASS), this code is run. If you did not write the "
    "configuration on this machine, fedsim prints the names and stops, unless you add --trust."
)


def shown_as(values: str) -> Any:
    """Returns a mark for ``Annotated`` that says how the help shows the values of an option, without its default."""
    return tyro.conf.arg(metavar=values, help_behavior_hint="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of the dataset, which may also be written after its name: 'people.csv(client="user", label="income")'.

    Attributes:
      client_column: Column of your own file that names the client of each row.
      label: Column of your own file that is predicted.
      features: Columns of your own file that are inputs, separated by commas, also patterns such as 'x*'; default: all other
        columns of numbers.
      task: Predict classes or numbers; default: numbers if the label has fractions.
      partition: How examples without clients are divided among clients, such as iid or 'dirichlet(alpha=0.1, clients=20)'.
      split: Set examples of each client of your own file apart for test, or whole clients; default: within_clients.
      missing: Refuse rows of your own file without a value, or drop them; default: refuse.
      header: Whether the first line of a CSV file has the names of the columns; default: yes, if it has no numbers.
    """

    client_column: Annotated[str | None, shown_as("COLUMN")] = None
    label: Annotated[str | None, shown_as("COLUMN")] = None
    features: Annotated[str | None, shown_as("COLUMNS")] = None
    task: Annotated[Literal["classification", "regression"] | None, shown_as("{classification,regression}")] = None
    partition: Annotated[str | None, shown_as("NAME")] = None
    split: Annotated[Literal["within_clients", "by_client"] | None, shown_as("{within_clients,by_client}")] = None
    missing: Annotated[Literal["refuse", "drop"] | None, shown_as("{refuse,drop}")] = None
    header: Annotated[bool | None, shown_as("{True,False}")] = None

    def given(self) -> dict[str, Any]:
        """Returns the options that are given, by their names in the dataset.

        >>> DataOptions(client_column="user", partition="dirichlet(alpha=0.1)").given()
        {'client': 'user', 'partition': 'dirichlet', 'alpha': 0.1}
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(DataOptions)}
        found = {"client" if name == "client_column" else name: value for name, value in values.items() if value is not None}
        if self.partition is not None:
            found["partition"], others = parse_call(self.partition)
            found |= others
        return found


class Option(NamedTuple):
    """An option of a command.

    Attributes:
      group: the heading under which the help lists the option.
      type: the type of its values, e.g. ``int | None``.
      default: its default; ``dataclasses.MISSING`` if the option must be given.
      help: what the help says about it.
    """

    group: str
    type: Any
    default: Any
    help: str


TRUST = Option(
    "", bool, False, "Run the Python code that the configuration of the folder names, also if you did not write it yourself."
)
_SEVERAL = "several processes, each with its own devices"
PROCESSES = {
    "distributed": Option(
        _SEVERAL, bool, False, "Share the run with the other processes that SLURM, Open MPI, GKE or a TPU pod has started."
    ),
    "coordinator_address": Option(
        _SEVERAL, str | None, None, "Elsewhere: host and port of process 0, such as node-1:1234; with the next two options."
    ),
    "num_processes": Option(_SEVERAL, int | None, None, "The number of processes."),
    "process_id": Option(_SEVERAL, int | None, None, "The number of this process, from 0."),
}


def options_of(cls: type, defaults: Mapping[str, Any], leave_out: Sequence[str] = ()) -> dict[str, Option]:
    """Returns the fields of `RunConfig` or `Settings` as options, with these defaults or else those of the fields.

    >>> from fedsim.experiment import Settings
    >>> options_of(Settings, {"lanes": 2})["lanes"].default
    2
    """
    types = get_type_hints(cls)
    return {
        field.name: Option(
            field.metadata["group"], types[field.name], defaults.get(field.name, field.default), field.metadata["help"]
        )
        for field in dataclasses.fields(cls)
        if field.name not in leave_out
    }


def parse(
    options: Mapping[str, Option], arguments: Sequence[str], program: str, description: str, main: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the values of all options by name.

    Args:
      options: the options by name; underscores in a name become hyphens on the command line.
      arguments: what the user gave. ``--help`` lists the options; see ``main``.
      program: the command, for the help.
      description: what the command does, for the help.
      main: if given, ``--help`` lists these alone, ``--help all`` lists all, and ``--help WORD`` those whose heading has
        the word.

    Raises:
      SystemExit: after ``--help`` (with status 0), or for wrong options (with status 2); the help or the error is printed.
      ValueError: no heading has the word after ``--help``.

    >>> options = {"batch_size": Option("training", int, 20, "Examples per step."), "clip": Option("", float | None, None, "")}
    >>> parse(options, ["--batch-size", "5"], "fedsim run", "Train.")
    {'batch_size': 5, 'clip': None}
    >>> parse(options, ["--help", "clock"], "fedsim run", "Train.", main=["batch_size"])
    Traceback (most recent call last):
    ...
    ValueError: There is no word in a heading 'clock'. There are all, training.
    """
    if main and (asked := {"--help", "-h"} & set(arguments)):
        topic = [*arguments, ""][arguments.index(asked.pop()) + 1]
        options, description = _topic(options, "" if topic.startswith("-") else topic, program, description, main)
        arguments = ["--help"]
    say_repeated(arguments)
    groups: dict[str, dict[str, Any]] = {}
    defaults: dict[str, dict[str, Any]] = {}
    for name, option in options.items():
        groups.setdefault(option.group, {})[name] = Annotated[option.type, tyro.conf.arg(help=option.help, **_shown(option))]
        default = tyro.MISSING if option.default is dataclasses.MISSING else option.default
        defaults.setdefault(option.group, {})[name] = default
    # For tyro, a group of options is a typed dictionary under its heading.
    typed: Any = TypedDict
    width = min(shutil.get_terminal_size().columns, 120)
    description = "\n\n".join(textwrap.fill(paragraph, width) for paragraph in description.split("\n\n"))
    headed = {title: Annotated[typed(title, group), tyro.conf.arg(name=title)] for title, group in groups.items()}
    about: dict[str, Any] = {"prog": program, "description": description, "config": (tyro.conf.OmitArgPrefixes,)}
    parsed = tyro.cli(typed("Options", headed), args=arguments, default=defaults, **about)
    return {name: value for group in parsed.values() for name, value in group.items()}


def say_repeated(arguments: Sequence[str]) -> None:
    """Prints which options are given more than once: tyro takes the last value of each, and says nothing.

    >>> import contextlib
    >>> with contextlib.redirect_stderr(sys.stdout):
    ...     say_repeated(["--rounds", "3", "--clip=1", "--rounds=5"])
    fedsim: warning: --rounds 3 --rounds=5: the last one counts.
    """
    given: dict[str, list[str]] = {}
    texts: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            texts = given.setdefault(argument.partition("=")[0].replace("_", "-").replace("--no-", "--", 1), [])
            texts.append(argument)
        elif texts:
            texts[-1] += f" {argument}"
    for texts in given.values():
        if len(set(texts)) > 1:
            print(f"fedsim: warning: {' '.join(texts)}: the last one counts.", file=sys.stderr)


def _topic(
    options: Mapping[str, Option], topic: str, program: str, description: str, main: Sequence[str]
) -> tuple[dict[str, Option], str]:
    """Returns the options that ``--help TOPIC`` lists, and a description that says how to list others."""
    headings = list(dict.fromkeys(option.group for option in options.values() if option.group))
    if topic == "all":
        return dict(options), description
    others = (
        f"{program} --help all lists every option, and --help WORD those whose heading has the word: {'; '.join(headings)}."
    )
    if not topic:
        return {name: options[name] for name in main if name in options}, f"{description}\n\n{others}"
    found = {name: option for name, option in options.items() if topic.lower() in _words(option.group)}
    if not found:
        look_up("word in a heading", topic, dict.fromkeys(["all", *(word for each in headings for word in _words(each))]))
    return found, others


def _words(heading: str) -> list[str]:
    """Returns the words of a heading that may follow ``--help``.

    >>> _words("attacks and stragglers"), _words("client optimizer (SGD)")
    (['attacks', 'stragglers'], ['client', 'optimizer', 'sgd'])
    """
    return [word for word in re.findall(r"\w+", heading.lower()) if len(word) > 2 and word != "and"]


def _shown(option: Option) -> dict[str, Any]:
    """Returns how the help shows the values and the default of an option, where tyro would show ``None`` as one of them."""
    shown: dict[str, Any] = {}
    if isinstance(option.default, float):
        shown["help_behavior_hint"] = f"(default: {option.default:.4g})"
    given = [kind for kind in get_args(option.type) if kind is not type(None)]
    if type(None) in get_args(option.type) and len(given) == 1:
        shown["metavar"] = f"{{{','.join(get_args(given[0]))}}}" if get_args(given[0]) else given[0].__name__.upper()
        if option.default is None:
            shown["help_behavior_hint"] = ""
    return shown
