"""The options of `fedsim run` and `fedsim plan`: which there are, their defaults, and the configuration that they give."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import docstring_parser
import tyro

import fedsim
from fedsim import checks, datasets, experiment
from fedsim.commands._options import PROCESSES, TRUST, DataOptions, Option, options_of, parse
from fedsim.commands._training import SWEEP_MODE
from fedsim.configuration import algorithm_hyperparameters, fields_that_name, options_that_build
from fedsim.experiment import RunConfig, Settings
from fedsim.experiment.driving import check_trusted, stored_run, warn_of_changed_code
from fedsim.names import absolute, parse_call
from fedsim.sweeps import Range, drawn_settings

_FROM = Option(
    "",
    str | None,
    None,
    "Run folder whose configuration gives the defaults, to repeat that run or to vary it. Code that it names is run, "
    "see --trust.",
)
_SAMPLES = Option(
    "training",
    int | None,
    None,
    "Random search: run so many settings, each with a random one of an option's values, or a number from its range, such as "
    "'log_uniform(0.001, 1)'; --seed draws them.",
)
_SEEDS = Option("training", int | None, None, "Number of seeds, from --seed on: a run for each, see the sweeps above.")
_SWEEPS = (
    "Several values of numbers or names, separated by commas (--batch-size 10,20 --algorithm fedavg,scaffold), a name that is "
    "given several times, and --seeds make a sweep: a run for every combination and seed, in a folder each, and a table of "
    "their means and standard deviations."
)
# The options that `--help` shows without a word after it, with those of the algorithm that is named.
_MAIN = (
    "dataset", "data", "client_column", "label", "model", "algorithm", "rounds", "clients", "epochs", "batch_size",
    "client_learning_rate", "validation", "seeds", "folder", "from", "trust",
)  # fmt: skip
# The names that may have several values.
_NAMES = (*fields_that_name("code"), "client_optimizer", "client_schedule", "sampler", "dp_mechanism")


class Configured(NamedTuple):
    """What the options of `fedsim run` say.

    Attributes:
      config: the configuration of the run, or of the first run of a sweep.
      settings: how it is executed and reported.
      varied: the options with several values, which make a sweep; or the settings of a random search.
      differing: for each combination of several names, these and the fields in which its configuration differs from
        ``config``, such as the published hyperparameters of another dataset.
      seeds: the number of seeds or the seeds; None without ``--seeds`` and several values of ``--seed``.
      how: how the runs of a sweep run.
      others: the values of the command's own options, such as those of `PROCESSES`.
    """

    config: RunConfig
    settings: Settings
    varied: Any
    seeds: int | list[int] | None
    how: experiment.How | None
    others: dict[str, Any]
    differing: list[tuple[dict[str, str], dict[str, Any]]]
    samples: int | None = None

    def check_single(self, remedy: str) -> None:
        """Raises ``ValueError`` if the options are those of a sweep."""
        if self.varied or self.seeds:
            raise ValueError(f"Expected the options of a single run, got several values or seeds: {remedy}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices(DataOptions):
    """The options on which the other options and their defaults depend. They are read before these."""

    origin: Annotated[str | None, tyro.conf.arg(name="from")] = None
    dataset: str | None = None
    algorithm: str | None = None
    model: str | None = None
    epochs: str | None = None
    steps: str | None = None
    clients: str | None = None
    trust: bool = False
    seed: str | None = None


def configured(arguments: list[str], program: str, purpose: str, others: Mapping[str, Option]) -> Configured:
    """Returns what the arguments say.

    If options have several names, each combination of them has a configuration of its own, with the defaults of its dataset and
    algorithm. An option that only some of the algorithms have counts for these.

    Args:
      arguments: what the user gave.
      program: the command, for the help.
      purpose: what the command does, for the help.
      others: options of this command alone.

    Raises:
      SystemExit: after ``--help``, or for wrong options.
      ValueError: a value is out of its range, or a name is unknown.
    """
    single, names = _several_names(arguments)
    combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*names.values())]
    given = [[*single, *(part for name, value in each.items() for part in (_flag(name), value))] for each in combinations]
    known = [_known(own, program, others) for own in given]
    own_options = [each.of_config | each.of_algorithm for each in known]
    of_any = {name: option for options in own_options for name, option in options.items()}
    for name in ("clip", "compressor"):  # In some algorithms these are hyperparameters of their own.
        meanings = {each.of_config[name].help for each in known if name in each.of_config}
        if len(meanings) > 1 and any(argument.partition("=")[0] == _flag(name) for argument in arguments):
            raise ValueError(f"{_flag(name)} means different things in these algorithms: give it to one of them alone.")
    found = [
        _configured(_without(own, of_any, options), program, purpose, each, others)
        for own, each, options in zip(given, known, own_options, strict=True)
    ]
    if not names:
        return _sampled(found[0])
    base = dataclasses.asdict(found[0].config)
    differing = []
    for each in found:
        if (each.varied, each.seeds) != (found[0].varied, found[0].seeds):
            raise ValueError("Expected several values of options that all algorithms have: give those of one algorithm alone.")
        values = {name: value for name, value in dataclasses.asdict(each.config).items() if value != base[name]}
        differing.append(({name: getattr(each.config, name) for name in names}, values))
    texts = {name: list(dict.fromkeys(setting[name] for setting, _ in differing)) for name in names}
    return _sampled(found[0]._replace(varied=texts | found[0].varied, differing=differing))


def _sampled(found: Configured) -> Configured:
    """Returns what the options say, with the settings of a random search instead of all combinations, if it is one."""
    varied = found.varied
    ranges = [_flag(name) for name, values in varied.items() if isinstance(values, Range)]
    if found.samples is None:
        if ranges:
            raise ValueError(f"Expected --samples with a range of {ranges[0]}, got none: give the number of settings to draw.")
        return found
    if not varied:
        raise ValueError(
            f"Expected options with several values or a range for --samples {found.samples}, got none: give some, such as "
            "--client-learning-rate 'log_uniform(0.001, 1)'."
        )
    return found._replace(varied=drawn_settings(varied, found.samples, found.config.seed))


class _Known(NamedTuple):
    """The dataset, and the options that depend on `Choices`: those of the configuration, of the algorithm, and all.

    ``fixed`` has the fields of the configuration that the algorithm determines.
    """

    dataset: str
    of_config: dict[str, Option]
    of_algorithm: dict[str, Option]
    every: dict[str, Option]
    source: str
    fixed: dict[str, Any]


def _known(arguments: list[str], program: str, others: Mapping[str, Option]) -> _Known:
    """Returns the options that there are with the dataset, algorithm and model of the arguments."""
    chosen, _ = tyro.cli(Choices, args=arguments, prog=program, return_unknown_args=True, add_help=False)
    stored = _read_origin(chosen)
    dataset = chosen.dataset or stored["config"].get("dataset", "digits")
    dataset = datasets.with_hash(datasets.with_options(absolute(dataset), chosen.given()))
    algorithm = absolute(chosen.algorithm or stored["config"].get("algorithm", "fedavg"))
    seed = (chosen.seed or str(stored["config"].get("seed", 0))).partition(",")[0]
    # An unknown name, and what is wrong with a file, is the first error. A file is divided as the first run needs it.
    about = datasets.describe(datasets.with_seed(dataset, int(seed)) if seed.isdecimal() else dataset)
    cls = experiment.algorithm_class(algorithm)
    defaults, source = _defaults(chosen, stored["config"], dataset, algorithm, cls)
    if datasets.is_file(dataset) and "clients" not in stored["config"]:
        defaults["clients"] = min(10, about.splits["train"][0] or 10)
    of_config = options_of(RunConfig, defaults, _left_out(cls))
    for name in {"clip", "compressor"} & {field.name for field in dataclasses.fields(cls)}:  # They are the algorithm's own.
        of_config[name] = of_config[name]._replace(help=_documentation(cls, name))
    own = {
        name: Option("algorithm", kind, defaults.get(name, default), _documentation(cls, name))
        for name, (kind, default) in algorithm_hyperparameters(cls).items()
    }
    kinds = get_type_hints(DataOptions)
    of_data = {
        field.name: Option("data and model", kinds[field.name], None, _documentation(DataOptions, field.name))
        for field in dataclasses.fields(DataOptions)
    }
    options = {"from": _FROM, "trust": TRUST} | of_data | of_config | {"seeds": _SEEDS, "samples": _SAMPLES} | own
    options |= options_of(Settings, {**stored["settings"], "folder": None}) | {"sweep_mode": SWEEP_MODE} | dict(others)
    fixed = {field.name: field.default for field in dataclasses.fields(cls) if field.name == "weighting" and not field.init}
    return _Known(dataset, of_config, own, options, source, fixed)


def _configured(arguments: list[str], program: str, purpose: str, known: _Known, others: Mapping[str, Option]) -> Configured:
    """Returns what arguments without several names say."""
    arguments, varied = _several_values(arguments, known.of_config | known.of_algorithm)
    named = known.of_algorithm if any(argument.partition("=")[0] == "--algorithm" for argument in arguments) else {}
    about = f"{purpose} {known.source} {_SWEEPS}"
    main = [*_MAIN, *named, *(name for name in others if name not in PROCESSES)]
    values = parse(known.every, arguments, program, about, main) | {"dataset": known.dataset}
    seeds, how = _seeds_and_how(values, varied)
    for name in fields_that_name("code"):
        if values.get(name):
            values[name] = absolute(values[name])
    if values["data"]:
        values["data"] = str(Path(values["data"]).expanduser().resolve())
    general = {field.name: values[field.name] for field in dataclasses.fields(RunConfig) if field.name in values}
    config = RunConfig(**known.fixed, **general, hyperparameters={name: values[name] for name in known.of_algorithm})
    settings = Settings(**{field.name: values[field.name] for field in dataclasses.fields(Settings)})
    return Configured(config, settings, varied, seeds, how, {name: values[name] for name in others}, [], values["samples"])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _several_names(arguments: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the arguments without the options that have several names, and these with their names.

    Names are separated by commas outside of parentheses, or the option is given more than once.

    >>> _several_names(["--algorithm", "fedavg,fedprox(mu=1)", "--rounds=3"])
    (['--rounds=3'], {'algorithm': ['fedavg', 'fedprox(mu=1)']})
    >>> _several_names(["--dataset=mnist(alpha=1, clients=5)", "--rounds", "3", "--dataset=digits"])[1]
    {'dataset': ['mnist(alpha=1, clients=5)', 'digits']}
    """
    flags = {_flag(name): name for name in _NAMES}
    values: dict[str, list[str]] = {}
    places: dict[str, list[int]] = {}
    for at, argument in enumerate(arguments):
        flag, equals, text = argument.partition("=") if argument.startswith("--") else ("", "", "")
        name = flags.get(flag.replace("_", "-"))
        if name and (equals or at + 1 < len(arguments)):
            values.setdefault(name, []).extend(_split(text if equals else arguments[at + 1]))
            places.setdefault(name, []).extend([at] if equals else [at, at + 1])
    several = {name: texts for name, texts in values.items() if len(texts) > 1}
    for name, texts in several.items():
        if len(set(texts)) < len(texts):
            raise ValueError(f"Expected different values of {_flag(name)}, got {', '.join(texts)}: give every value once.")
    left_out = {at for name in several for at in places[name]}
    return [argument for at, argument in enumerate(arguments) if at not in left_out], several


def _split(text: str) -> list[str]:
    """Returns the parts of a text between the commas that are not inside of parentheses."""
    depths = itertools.accumulate((character in "([{") - (character in ")]}") for character in text)
    ends = [at for at, (character, depth) in enumerate(zip(text, depths, strict=True)) if character == "," and depth == 0]
    parts = [text[start + 1 : end].strip() for start, end in itertools.pairwise([-1, *ends, len(text)])]
    return [part for part in parts if part] or [text]


def _without(arguments: list[str], every: Mapping[str, Option], own: Mapping[str, Option]) -> list[str]:
    """Returns the arguments without the options of other algorithms.

    >>> options = {"mu": Option("", float, 0.1, ""), "adaptive": Option("", bool, False, "")}
    >>> _without(["--adaptive", "--mu", "1", "--rounds", "3"], options, {})
    ['--rounds', '3']
    """
    left, skip = [], False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_off = name.startswith("no_") and name[3:] in every and every[name[3:]].type is bool
        name = name[3:] if is_off else name
        if skip:
            skip = False
        elif argument.startswith("--") and name in every and name not in own:
            skip = not equals and every[name].type is not bool
        else:
            left.append(argument)
    return left


def _read_origin(chosen: Choices) -> dict[str, Any]:
    """Returns the stored configuration and settings of ``--from``, which may name code only if it is trusted."""
    if not chosen.origin:
        return {"config": {}, "settings": {}}
    stored = experiment.read_config(chosen.origin)
    stored_run(chosen.origin, stored)  # raises an error for values that this version does not know
    if not chosen.trust:
        check_trusted(chosen.origin, stored, [name for name in ("dataset", "algorithm", "model") if getattr(chosen, name)])
    warn_of_changed_code(chosen.origin, stored)
    return stored


def _defaults(
    chosen: Choices, base: Mapping[str, Any], dataset: str, algorithm: str, cls: type[fedsim.Algorithm]
) -> tuple[dict[str, Any], str]:
    """Returns the defaults of the options, and a sentence that says whence they are."""
    is_same_dataset = parse_call(dataset)[0] == parse_call(base.get("dataset", ""))[0]  # perhaps with other options
    model = chosen.model or (base.get("model") if is_same_dataset else None)
    published = experiment.published(dataset, algorithm, model)
    # A default in the class, for example of client_learning_rate, has priority over those of the dataset.
    general = {field.name for field in dataclasses.fields(RunConfig)} - {"nonfinite", "client_optimizer"}
    own = {field.name: field.default for field in dataclasses.fields(cls) if field.name in general}
    own = {name: default for name, default in own.items() if default is not dataclasses.MISSING}
    values = {**published.values, **own, **base}
    values |= base["hyperparameters"] if algorithm == base.get("algorithm") else {}
    values |= {} if is_same_dataset else {"data": None, "model": None}
    if algorithm == "dssgd" and not base and (chosen.clients or "").isdecimal():  # see `experiment.published`
        values["server_learning_rate"] = 1 / max(1, int(chosen.clients or 1))
    # --steps replaces the default of --epochs and the other way round, because `RunConfig` refuses both.
    given = {name for name in ("epochs", "steps") if getattr(chosen, name) is not None}
    values |= {"epochs": 1} if given == {"steps"} else {"steps": None} if given == {"epochs"} else {}
    values |= {"dataset": dataset, "algorithm": algorithm}
    if base:
        return values, f"Defaults: those of {chosen.origin}."
    return values, f"Source of the defaults for {dataset} with {algorithm}: {published.source}."


def _left_out(cls: type[fedsim.Algorithm]) -> list[str]:
    """Returns the fields of `RunConfig` that have no meaning for an algorithm."""
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    left_out = ["hyperparameters"] + [name for name in ("weighting",) if name not in fields]
    if "model" not in fields:
        left_out += options_that_build("model")
    if "client_optimizer" not in fields:
        left_out += [
            field.name
            for field in dataclasses.fields(RunConfig)
            if field.metadata.get("group", "").startswith("client optimizer") and field.name not in fields
        ]
    return left_out


def _seeds_and_how(
    values: Mapping[str, Any], varied: dict[str, list[Any]]
) -> tuple[int | list[int] | None, experiment.How | None]:
    """Returns the seeds and how the members of a sweep run. Several values of ``--seed`` are removed from ``varied``."""
    seeds, how = values["seeds"], values["sweep_mode"]
    checks.whole(1, or_none=True, seeds=seeds)
    if "seed" in varied:
        if seeds is not None:
            raise ValueError(f"Expected several values of --seed or a number --seeds, got both: leave out --seeds {seeds}.")
        seeds = varied.pop("seed")
    if how and not varied and seeds is None:
        raise ValueError(
            f"Expected several values of an option or --seeds with --sweep-mode, got --sweep-mode {how} for a "
            "single run: leave it out."
        )
    return seeds, how


def _several_values(arguments: list[str], options: Mapping[str, Option]) -> tuple[list[str], dict[str, Any]]:
    """Returns the arguments with the first of several values of an option, and all values, or their `Range`, by option.

    >>> _several_values(["--rate=0.1,1", "--size", "3"], {"rate": Option("", float, 1.0, ""), "size": Option("", int, 1, "")})
    (['--rate=0.1', '--size', '3'], {'rate': [0.1, 1.0]})
    >>> _several_values(["--rate", "0.1,1", "--rate", "3"], {"rate": Option("", float, 1.0, "")})
    (['--rate', '0.1', '--rate', '3'], {})
    """
    numbers = {
        f"--{name.replace('_', '-')}": (name, kind)
        for name, option in options.items()
        for kind in (float, int)
        if option.type is kind or set(get_args(option.type)) == {kind, type(None)}
    }
    found, option = [], ""
    varied: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=") if argument.startswith("--") else (option, "", argument)
        option = argument
        field, kind = numbers.get(name.replace("_", "-"), (None, None))
        if field:
            varied.pop(field, None)  # Of an option that is given again, the last value counts.
        if field and kind and (drawn := Range.read(text, whole=kind is int)):
            varied[field] = drawn
            first = str(drawn.value(0))
            argument = f"{name}={first}" if equals else first
        elif field and kind and "," in text:
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


def _documentation(cls: type, name: str) -> str:
    """Returns the description of a field in the ``Attributes`` section of a class or of its nearest ancestor with one.

    >>> _documentation(fedsim.algorithms.FedProx, "server_learning_rate")
    'Learning rate of the server.'
    """
    for base in cls.__mro__:
        for entry in docstring_parser.parse(base.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE).params:
            if entry.arg_name == name and entry.description:
                text = " ".join(entry.description.split())
                return text[0].upper() + text[1:] if text[0].isascii() else text
    return "Learning rate of the server." if name == "server_learning_rate" else f"The field {name} of {cls.__name__}."
