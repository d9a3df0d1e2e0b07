"""The command line, which calls the public API: ``fedsim run``, ``fedsim resume``, ``fedsim datasets``, ..."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import jax

import fedsim
from fedsim import _datasets_command, _reproduce_command, algorithms, checks, datasets, experiment, models
from fedsim._interrupts import LostInterruptsRepeated
from fedsim.configuration import algorithm_hyperparameters, fields_that_name, models_without_arguments
from fedsim.datasets import cache_folder
from fedsim.experiment import RunConfig, Settings, run_experiment
from fedsim.experiment.driving import RunRound, check_trusted, is_sweep, stored_run, warn_of_changed_code
from fedsim.names import absolute, did_you_mean, parse_call
from fedsim.planning._plan import duration
from fedsim.sweeps import change_rounds, sweep

_COMMANDS = """\
usage: fedsim COMMAND ...

  run [OPTIONS]      train and evaluate, and write the results to a run folder; `fedsim run --help` lists the options;
                     --client-learning-rate 0.01,0.1 --seeds 3 runs every combination
  plan [OPTIONS]     print what a round of such a run costs (messages, computation, memory, time), without running one
  resume FOLDER      continue a run or a sweep that was stopped; with --rounds N until round N, also if it was finished
  replay FOLDER --round R --client C
                     run one client's round of a run again, alone and in plain Python, for prints and a debugger
  datasets           list the datasets; `fedsim datasets describe NAME` describes one, `... convert IN OUT` converts files
  models             list the models
  algorithms         list the algorithms
  reproduce NAME     repeat a published experiment; without a name, list the experiments

A first example, which takes a minute and needs no network: fedsim run
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    The status is 0 after success, 2 for wrong input, 1 for other errors, and 128 plus the number of a signal.

    Args:
      arguments: the command and its options; default: ``sys.argv[1:]``.

    >>> main(["--version"]) == 0  # doctest: +ELLIPSIS
    fedsim ...
    True
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in arguments or bool(os.environ.get("FEDSIM_TRACEBACK"))
    arguments = [argument for argument in arguments if argument != "--traceback"]
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    show_warning, warnings.showwarning = warnings.showwarning, _warning_printer()
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "plan": _plan,
        "resume": _resume,
        "replay": _replay,
        "datasets": _datasets_command.main,
        "models": lambda _: _list((name, _first_line(models.MODELS[name])) for name in models_without_arguments()),
        "reproduce": _reproduce_command.main,
        "algorithms": lambda _: _list((name, _first_line(cls)) for name, cls in sorted(_algorithms().items())),
    }
    try:
        if command in ("--help", "-h", "help"):
            print(_COMMANDS, end="")
            return 0
        if command == "--version":
            print(f"fedsim {fedsim.__version__}")
            return 0
        if command not in commands:
            raise ValueError(f"There is no command {command!r}.{did_you_mean(command, commands)} See fedsim --help.")
        if command in ("run", "plan", "resume", "replay", "reproduce"):
            _keep_compiled_programs()
        with LostInterruptsRepeated():
            return commands[command](rest)
    except KeyboardInterrupt:
        print("fedsim: aborted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fedsim datasets | head`; Python would report the error again when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except jax.errors.JaxRuntimeError as error:
        if show_traceback or "ut of memory" not in str(error):
            raise
        print("fedsim: error: Out of memory. Use a smaller --batch-size, --lanes or --clients.", file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        if show_traceback:
            traceback.print_exc()
        print(f"fedsim: error: {_where(error)}{error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1
    finally:
        warnings.showwarning = show_warning


def _warning_printer() -> Callable[..., None]:
    """Prints each warning once, in one line and without the place in the source code."""
    printed: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        text = f"{'' if issubclass(category, UserWarning) else f'{category.__name__}: '}{message}"
        if text not in printed:
            printed.add(text)
            print(f"fedsim: warning: {text}", file=sys.stderr)

    return show


def _where(error: BaseException) -> str:
    """Returns the file and line of an error in a user's own file; empty for other errors."""
    own = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("fedsim_user_")}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {type(error).__name__}: " if frames else ""


def _run(arguments: list[str]) -> int:
    about = "Train, evaluate, and write metrics, checkpoints and a picture to a run folder."
    config, settings, varied, seeds, how = _configured(arguments, "fedsim run", about)
    if settings.folder is None:
        parts = [parse_call(part)[0].rpartition(":")[2].lower() for part in (config.dataset, config.algorithm)]
        name = "-".join([*parts, *(["sweep"] if varied or seeds else []), time.strftime("%Y%m%d-%H%M%S")])
        settings = dataclasses.replace(settings, folder=str(Path("runs") / name))
    return _train(config, settings, varied, seeds, how)


def _plan(arguments: list[str]) -> int:
    about = "Print what a round of the run with these options costs, without running a round or writing a file."
    config, settings, *_ = _configured(arguments, "fedsim plan", about)
    _use_devices(settings)
    algorithm, sampler, _ = experiment.build(config, settings)
    plan = fedsim.plan(algorithm, sampler.cohort(0))
    print(plan)
    if plan.seconds is not None:
        total = duration(plan.seconds * config.rounds)
        print(f"{config.rounds:,} rounds: about {total}, without compilation, evaluation and checkpoints")
    if type(algorithm).apply is fedsim.Algorithm.apply:
        print(fedsim.audit(algorithm, sampler.cohort(0)))
    return 0


def _configured(
    arguments: list[str], program: str, about: str
) -> tuple[RunConfig, Settings, dict[str, list[float]], int | list[int] | None, experiment.How | None]:
    """Parses the options in two steps: dataset, model, algorithm and ``--from`` determine the other options and defaults."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--from", dest="origin")
    first.add_argument("--dataset")
    first.add_argument("--algorithm")
    first.add_argument("--model")
    first.add_argument("--epochs", nargs="?")
    first.add_argument("--steps", nargs="?")
    first.add_argument("--trust", action="store_true")
    chosen, _ = first.parse_known_args(arguments)
    stored = experiment.read_config(chosen.origin) if chosen.origin else {"config": {}, "settings": {}}
    if chosen.origin:
        stored_run(chosen.origin, stored)  # raises an error for values that this version does not know
        if not chosen.trust:
            check_trusted(chosen.origin, stored, [name for name in ("dataset", "algorithm", "model") if getattr(chosen, name)])
        warn_of_changed_code(chosen.origin, stored)
    base, previous = stored["config"], {**stored["settings"], "folder": None}
    dataset = absolute(chosen.dataset or base.get("dataset", "digits"))
    algorithm = absolute(chosen.algorithm or base.get("algorithm", "fedavg"))
    datasets.describe(dataset)  # an unknown name is the first error
    cls = experiment.algorithm_class(algorithm)
    model = chosen.model or (base.get("model") if dataset == base.get("dataset") else None)
    defaults = experiment.published(dataset, algorithm, model)
    # A default in the class, for example of client_learning_rate, has priority over those of the dataset.
    general = {field.name for field in dataclasses.fields(RunConfig)} - {"nonfinite"}
    own = {field.name: field.default for field in dataclasses.fields(cls) if field.name in general}
    own = {name: default for name, default in own.items() if default is not dataclasses.MISSING}
    values = {**defaults.values, **own, **base}
    if dataset == base.get("dataset"):
        values |= base["hyperparameters"] if algorithm == base["algorithm"] else {}
    else:
        values |= {"data": None, "model": None}
    # --steps replaces the default of --epochs and the other way round, because `RunConfig` refuses both.
    given = {name for name in ("epochs", "steps") if getattr(chosen, name) not in (None, "None")}
    values |= {"epochs": 1} if given == {"steps"} else {"steps": None} if given == {"epochs"} else {}
    source = (
        f"Defaults: those of {chosen.origin}."
        if base
        else f"Source of the defaults for {dataset} with {algorithm}: {defaults.source}."
    )
    values |= {"dataset": dataset, "algorithm": algorithm}
    return _parse(arguments, cls, values, previous, program, f"{about} {source} {_SWEEPS}")


def _resume(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(_RESUME)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    folder, *rest = arguments
    stored = experiment.read_sweep(folder) or experiment.read_config(folder)
    stored_run(folder, stored)
    options = {"rounds": _ROUNDS} | _options(Settings, stored["settings"], leave_out=["folder"]) | {"trust": _TRUST}
    if "seeds" in stored:
        options["how"] = _HOW._replace(default=stored.get("how"))
    chosen = _tyro(options, rest, "fedsim resume FOLDER", f"Continue the run or the sweep in a folder. {_RUNS_CODE}")
    if not chosen.pop("trust"):
        check_trusted(folder, stored)
    how, rounds = chosen.pop("how", None), chosen.pop("rounds")
    settings = Settings(**chosen, folder=folder)
    if rounds is not None:
        _use_devices(settings)
        change_rounds(folder, rounds, settings)
        stored = experiment.read_sweep(folder) or experiment.read_config(folder)
    config, _ = stored_run(folder, stored)
    return _train(config, settings, stored.get("varied", {}), stored.get("seeds"), how)


def _replay(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(_REPLAY)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    folder, *rest = arguments
    stored = {"settings": {}} if is_sweep(folder) else experiment.read_config(folder)
    names = "execution", "devices", "lanes", "memory", "deterministic"
    speed = {name: option for name, option in _options(Settings, stored["settings"]).items() if name in names}
    chosen = _tyro({"round": _ROUND, "client": _CLIENT, "trust": _TRUST} | speed, rest, "fedsim replay FOLDER", _REPLAY_ABOUT)
    if "hyperparameters" in stored.get("config", {}):
        stored_run(folder, stored)
    if "config" in stored and not chosen["trust"]:
        check_trusted(folder, stored)
    settings = Settings(**{name: chosen[name] for name in speed})
    _use_devices(settings)
    of_run = RunRound.read(folder, chosen["round"], settings)
    print(of_run.table() if chosen["client"] is None else of_run.replay(chosen["client"]))
    return 0


def _use_devices(settings: Settings) -> None:
    with warnings.catch_warnings():
        # If JAX has started already, the caller has chosen its devices.
        warnings.simplefilter("ignore", UserWarning)
        fedsim.use_all_cores(settings.devices)


def _train(
    config: RunConfig, settings: Settings, varied: Mapping[str, Sequence[float]], seeds: int | Sequence[int] | None,
    how: experiment.How | None,
) -> int:  # fmt: skip
    _use_devices(settings)
    result: Any
    if varied or seeds:
        result = sweep(config, settings, varied, seeds or 1, how, table=True)
    else:
        built = experiment.build(config, settings)
        result = run_experiment(built, config, settings, progress=settings.progress, table=True)
    return 128 + result.interrupted if result.interrupted else 0


def _keep_compiled_programs() -> None:
    """Makes JAX store compiled programs in fedsim's cache folder, unless the user has chosen another folder."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _parse(
    arguments: list[str], cls: type[fedsim.Algorithm], defaults: Mapping[str, Any], previous: Mapping[str, Any], program: str,
    about: str,
) -> tuple[RunConfig, Settings, dict[str, list[float]], int | list[int] | None, experiment.How | None]:  # fmt: skip
    """Returns the configuration, the settings, the options with several values, the seeds and how members of a sweep run.

    The seeds are None without ``--seeds``.
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    leave_out = ["hyperparameters"] + [name for name in ("model", "weighting") if name not in fields]
    if "client_optimizer" not in fields:
        leave_out += [
            field.name
            for field in dataclasses.fields(RunConfig)
            if field.metadata.get("group", "").startswith("client optimizer") and field.name not in fields
        ]
    own = {
        name: _Option("algorithm", kind, defaults.get(name, default), _documentation(cls, name))
        for name, (kind, default) in algorithm_hyperparameters(cls).items()
    }
    origin = _Option(
        "",
        str | None,
        None,
        "Run folder whose configuration gives the defaults, to repeat that run or to vary it. Code that it names is run, "
        "see --trust.",
    )
    of_config = _options(RunConfig, defaults, leave_out)
    options = {"from": origin, "trust": _TRUST} | of_config | {"seeds": _SEEDS} | own | _options(Settings, previous)
    options["how"] = _HOW
    arguments, varied = _several_values(arguments, {**of_config, **own})
    chosen = _tyro(options, arguments, program, about)
    seeds = chosen["seeds"]
    checks.whole(1, or_none=True, seeds=seeds)
    if "seed" in varied:
        if seeds is not None:
            raise ValueError(f"Expected several values of --seed or a number --seeds, got both: leave out --seeds {seeds}.")
        seeds = varied.pop("seed")
    if (how := chosen["how"]) and not varied and seeds is None:
        raise ValueError(
            f"Expected several values of an option or --seeds with --how, got --how {how} for a single run: leave it out."
        )
    general = {field.name: chosen[field.name] for field in dataclasses.fields(RunConfig) if field.name in chosen}
    for name in fields_that_name("code"):
        if general.get(name):
            general[name] = absolute(general[name])
    if general.get("data"):
        general["data"] = str(Path(general["data"]).expanduser().resolve())
    config = RunConfig(**general, hyperparameters={name: chosen[name] for name in own})
    settings = Settings(**{field.name: chosen[field.name] for field in dataclasses.fields(Settings)})
    return config, settings, varied, seeds, how


def _several_values(arguments: list[str], options: Mapping[str, _Option]) -> tuple[list[str], dict[str, list[Any]]]:
    """Returns the arguments with the first of several values of an option, and all values by option.

    >>> _several_values(["--rate=0.1,1", "--size", "3"], {"rate": _Option("", float, 1.0, ""), "size": _Option("", int, 1, "")})
    (['--rate=0.1', '--size', '3'], {'rate': [0.1, 1.0]})
    """
    numbers = {
        f"--{name.replace('_', '-')}": (name, kind)
        for name, option in options.items()
        for kind in (float, int)
        if option.type is kind or set(get_args(option.type)) == {kind, type(None)}
    }
    found, varied, option = [], {}, ""
    for argument in arguments:
        name, equals, text = argument.partition("=") if argument.startswith("--") else (option, "", argument)
        option = argument
        field, kind = numbers.get(name.replace("_", "-"), (None, None))
        if field and kind and "," in text:
            try:
                varied[field] = [kind(value) for value in text.split(",")]
            except ValueError:
                kinds = "whole numbers" if kind is int else "numbers"
                raise ValueError(f"Expected {kinds} separated by commas after {name}, got {text!r}.") from None
            if len(set(varied[field])) < len(varied[field]):
                raise ValueError(f"Expected different values of {name}, got {text}: give every value once.")
            argument = f"{name}={text.partition(',')[0]}" if equals else text.partition(",")[0]
        found.append(argument)
    return found, varied


class _Option(NamedTuple):
    group: str
    type: Any
    default: Any
    help: str


_RUNS_CODE = (
    "If the configuration names Python code (FILE.py:CLASS or MODULE:CLASS), this code is run. If you did not write the "
    "configuration on this machine, fedsim prints the names and stops, unless you add --trust."
)
_TRUST = _Option(
    "", bool, False, "Run the Python code that the configuration of the folder names, also if you did not write it yourself."
)
_SWEEPS = (
    "Several values of numbers, separated by commas (--batch-size 10,20), and --seeds make a sweep: a run for "
    "every combination and seed, in a folder each, and a table of their means and standard deviations."
)
_SEEDS = _Option("training", int | None, None, "Number of seeds, from --seed on: a run for each, see the sweeps above.")
_HOW = _Option(
    "execution (speed only)",
    experiment.How | None,
    None,
    "How the runs of a sweep run: devices: one at a time on each device; vmap: side by side; sequential: one at a time on all "
    "devices; default: devices on a CPU, vmap on a GPU or TPU.",
)
_RESUME = f"""\
usage: fedsim resume FOLDER [OPTIONS]

Continue the run or the sweep in FOLDER with the configuration that is stored there; with --rounds N until round N.
{textwrap.fill(_RUNS_CODE, 100)}
`fedsim resume FOLDER --help` lists the options."""


_REPLAY_ABOUT = (
    "Run one client's round of the run in FOLDER again, alone and in plain Python, so that prints and breakpoints in the "
    f"algorithm work. Nothing is written into the folder. {_RUNS_CODE}"
)
_REPLAY = f"""\
usage: fedsim replay FOLDER --round R [--client C] [OPTIONS]

{textwrap.fill(_REPLAY_ABOUT, 100)}
Without --client, list the clients of the round. `fedsim replay FOLDER --help` lists the options."""
_ROUNDS = _Option(
    "training",
    int | None,
    None,
    "New number of rounds. The result is that of a run that had this number from the start. It is refused where this is not "
    "possible, for example because the learning rate depends on the number.",
)
_ROUND = _Option("", int, dataclasses.MISSING, "The round, from 1 as in metrics.jsonl.")
_CLIENT = _Option(
    "", str | None, None, "Id of a client, or its position in the population; default: list the clients of the round."
)


def _options(cls: type, defaults: Mapping[str, Any], leave_out: Sequence[str] = ()) -> dict[str, _Option]:
    """Returns the fields of a configuration as options."""
    types = get_type_hints(cls)
    return {
        field.name: _Option(
            field.metadata["group"], types[field.name], defaults.get(field.name, field.default), field.metadata["help"]
        )
        for field in dataclasses.fields(cls)
        if field.name not in leave_out
    }


def _tyro(options: Mapping[str, _Option], arguments: list[str], program: str, description: str) -> dict[str, Any]:
    """Parses options with tyro, which needs one dataclass per group. Wrong input and ``--help`` raise ``SystemExit``."""
    try:
        import tyro
    except ModuleNotFoundError as error:
        raise ImportError("The command line needs tyro: pip install 'fedsim-jax[run]'.") from error
    groups: dict[str, list[Any]] = {}
    for name, option in options.items():
        about: dict[str, Any] = {"name": name.replace("_", "-"), "help": option.help}
        field: dict[str, Any] = {}
        if option.default is not dataclasses.MISSING:
            field["default"] = option.default
            shown = f"{option.default:.4g}" if isinstance(option.default, float) else option.default
            about["help_behavior_hint"] = "" if shown is None else f"(default: {shown})"
        if type(None) in get_args(option.type) and len(get_args(option.type)) == 2:
            given = get_args(option.type)[0]  # Otherwise tyro shows {None}|INT.
            about["metavar"] = f"{{{','.join(get_args(given))}}}" if get_args(given) else given.__name__.upper()
        kind: Any = Annotated[option.type, tyro.conf.arg(**about)]
        groups.setdefault(option.group, []).append((f"{name}_", kind, dataclasses.field(**field)))
    fields = []
    for number, (title, members) in enumerate(groups.items()):
        group: Any = dataclasses.make_dataclass(f"Group{number}", members, kw_only=True)
        group.__doc__ = ""
        fields.append((f"group{number}", Annotated[group, tyro.conf.arg(name=title)]))
    root: Any = dataclasses.make_dataclass("Options", fields, kw_only=True)
    parsed: Any = tyro.cli(root, args=arguments, prog=program, description=description, config=(tyro.conf.OmitArgPrefixes,))
    return {field.name[:-1]: getattr(part, field.name) for part in vars(parsed).values() for field in dataclasses.fields(part)}


def _algorithms() -> dict[str, type[fedsim.Algorithm]]:
    return {**algorithms.ALGORITHMS, **fedsim.decentralized.ALGORITHMS}


def _list(rows: Iterable[tuple[str, str]]) -> int:
    table = list(rows)
    width = max(len(name) for name, _ in table) + 2
    for name, text in table:
        print(f"{name:<{width}}{text}")
    return 0


def _documentation(cls: type, name: str) -> str:
    """Returns the description of a field in the ``Attributes`` section of a class or of its nearest ancestor with one."""
    for base in cls.__mro__:
        found = re.search(rf"^  {name}: (.*(?:\n {{3,}}.*)*)", inspect.cleandoc(base.__doc__ or ""), re.MULTILINE)
        if found:
            text = " ".join(found[1].split())
            return text[0].upper() + text[1:] if text[0].isascii() else text
    return "Learning rate of the server." if name == "server_learning_rate" else f"The field {name} of {cls.__name__}."


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]
