"""Builds the objects of a run from a configuration: classes from names, optimizers from numbers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from fedsim import aggregators, algorithms, attacks, compressors, datasets, models, systems
from fedsim.algorithm import Algorithm
from fedsim.compressors import Compressor
from fedsim.configuration._client_optimizer import client_optimizer as make_client_optimizer
from fedsim.configuration._config import RunConfig, Settings, options_of_samplers, options_that_build, topology_with_seed
from fedsim.configuration._scheduled import following, prepared, scheduled
from fedsim.configuration._validation import with_validation
from fedsim.data import Batches, FederatedData, population_identity
from fedsim.execution import Execution, share_programs
from fedsim.model import Model
from fedsim.names import check_options, did_you_mean, import_reference, look_up, make, parse_call, required
from fedsim.partitioners import hide_labels, only_labelled
from fedsim.pinned_files import pinned_path
from fedsim.rounds import Staleness, are_alike, numbers_of, with_numbers
from fedsim.samplers import SAMPLERS, Attacked, PoissonSampler, Sampler, Stragglers, check_fits, checked_cohort
from fedsim.saved_arrays import read_params

if TYPE_CHECKING:
    from fedsim.privacy import Guarantee

_SIMPLE = (float, int, str, bool)


class Experiment(NamedTuple):
    """The arguments of `fedsim.experiment.run`.

    Attributes:
      algorithm: the algorithm, with its model, optimizers and execution.
      sampler: a sampler of cohorts of the training data.
      test_data: the test data.
      validation_data: the validation data; None if there are none.
      privacy: the guarantee of differential privacy; None if the run has none.
    """

    algorithm: Algorithm
    sampler: Sampler
    test_data: FederatedData
    validation_data: FederatedData | None = None
    privacy: Guarantee | None = None


class Hyperparameter(NamedTuple):
    """A field of an algorithm that can be given on a command line.

    Attributes:
      type: a simple type, a ``Literal`` or an optional type.
      default: the default; ``dataclasses.MISSING`` if there is none.
    """

    type: Any
    default: Any


def build(
    config: RunConfig, settings: Settings, execution: Execution | None = None, splits: datasets.FederatedSplits | None = None
) -> Experiment:
    """Loads the data and builds the algorithm and the sampler.

    Names of the form ``FILE.py:NAME`` and ``MODULE:NAME`` are imported, which runs their code.

    Args:
      config: the configuration.
      settings: the settings, of which only the execution is used.
      execution: replaces that of the settings.
      splits: replace the dataset, which is then not loaded.

    Raises:
      ValueError: the dataset, model or algorithm is unknown; the algorithm does not have a hyperparameter or refuses its
        value; or a cohort is larger than the population.

    >>> experiment = build(RunConfig(dataset="digits", algorithm="fedprox"), Settings())
    >>> experiment.algorithm.mu, experiment.sampler.clients
    (0.1, 10)
    """
    (experiment,) = build_members([config], settings, execution, splits)
    return experiment


def build_members(
    configs: Sequence[RunConfig], settings: Settings, execution: Execution | None = None,
    splits: datasets.FederatedSplits | None = None,
) -> list[Experiment]:  # fmt: skip
    """Builds the objects of several runs, which share the data, models and samplers that are equal.

    Runs with different seeds have different data if the dataset is drawn with the seed, see `RunConfig.drawn_dataset`.

    Args:
      configs: one or more.
      settings, execution, splits: see `build`.

    Raises:
      ValueError: see `build`. If there are several configurations, all are checked before the first run.

    >>> one, other = build_members([RunConfig(), RunConfig(client_learning_rate=0.5)], Settings())
    >>> one.sampler is other.sampler, one.algorithm is other.algorithm
    (True, False)
    """
    class_of, load = functools.cache(algorithm_class), functools.cache(functools.partial(_load, configs, splits))

    models_of: Callable[..., Model | None] = functools.cache(_model_of)
    defaults: dict[str, Any] = {}  # the model and the names of the options by dataset, which do not depend on the seed
    made = []
    for i, config in enumerate(configs):  # Wrong options of an algorithm are reported before a dataset is downloaded.
        cls = class_of(config.algorithm)
        if config.dataset not in defaults:
            about = datasets.describe(config.drawn_dataset)
            defaults[config.dataset] = about.default_model, frozenset(about.defaults)
        parts = {name: getattr(config, name) for name in options_that_build("model")}
        model = models_of(cls, config.dataset, *defaults[config.dataset], **parts)
        nodes = load()[i].train.num_clients if "topology" in _fields(cls) else None
        made.append(_algorithm(cls, model, config, execution or settings.executor(), nodes))
    samplers: dict[Any, Sampler] = {}
    experiments = []
    for algorithm, config, own in zip(made, configs, load(), strict=True):
        key = id(own.train), *(getattr(config, name) for name in options_of_samplers())
        if key not in samplers:
            samplers[key] = _sampler(_with_few_labels(own.train, type(algorithm), config), config, algorithm)
        algorithm = _reporting_for(algorithm, samplers[key])
        experiment = Experiment(algorithm, samplers[key], own.test, own.validation)
        experiments.append(_with_privacy(_with_virtual_clock(experiment, config), config))
    _share_programs([experiment.algorithm for experiment in experiments], configs)
    return experiments


def _fields(cls: type[Algorithm]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _load(configs: Sequence[RunConfig], given: datasets.FederatedSplits | None) -> list[datasets.FederatedSplits]:
    """Loads the dataset of each run: equal ones once, so that the runs share its memory."""
    if given is not None:
        return [given] * len(configs)
    loaded: dict[Any, datasets.FederatedSplits] = {}
    divided: dict[Any, datasets.FederatedSplits] = {}
    files: list[tuple[Any, datasets.FederatedSplits]] = []
    of_configs = []
    for config in configs:
        if (name := (config.drawn_dataset, config.data)) not in loaded:
            new = datasets.load(config.drawn_dataset, data=config.data)
            # A dataset with clients of its own, of which none are left out, is the same for all seeds.
            mapped = [_mapped(new.train), _mapped(new.test)]
            loaded[name] = next((known for place, known in files if place == mapped), new)
            if None not in mapped:
                files.append((mapped, loaded[name]))
        key = id(loaded[name]), config.validation, config.validation and config.seed
        if key not in divided:
            divided[key] = with_validation(loaded[name], config.validation, config.seed)
        of_configs.append(divided[key])
    return of_configs


def _mapped(data: FederatedData) -> Any:
    """Returns the population and the places in files that the columns are mapped from; None if some are not mapped."""
    places = []
    for column in data.columns.values():
        if not isinstance(column, np.memmap) or not column.filename:
            return None
        whole = column
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        places.append((str(column.filename), whole.offset + column.ctypes.data - whole.ctypes.data, column.strides))
    return population_identity(data), places


def _with_few_labels(data: FederatedData, cls: type[Algorithm], config: RunConfig) -> FederatedData:
    """Returns the training data with the labels of the config. Algorithms that need labels get only examples that have one."""
    if config.labels is None:
        return data
    few = hide_labels(data, fraction=config.labels, seed=config.seed)
    return few if cls.capabilities.unlabelled else only_labelled(few)


def _with_virtual_clock(experiment: Experiment, config: RunConfig) -> Experiment:
    """Simulates the events of a run, if the configuration has a virtual clock; see `simulate`."""
    if not config.clock_options:
        return experiment
    if hasattr(experiment.algorithm, "topology"):
        _check_no_server(experiment.algorithm, config)
        return experiment
    synchronization = synchronization_of(config)
    if config.deliveries is not None:
        return _as_delivered(experiment, config, synchronization)
    traces = config.client_traces and systems.Traces.read(pinned_path(config.client_traces), config.client_traces_period)
    rates = {name: _law(name, getattr(config, name)) for name in ("download_rate", "upload_rate") if getattr(config, name)}
    faults = config.faults and systems.FaultSchedule.read(pinned_path(config.faults))
    made = scheduled(
        experiment.algorithm,
        experiment.sampler,
        rounds=config.rounds,
        synchronization=synchronization,
        devices=systems.Devices(_law("seconds", config.step_seconds or "1"), availability=traces or None, **rates),
        faults=faults
        or systems.Faults(
            message_loss=config.message_loss, client_failures=config.client_failures, recovery=config.client_recovery
        ),
        policy=systems.Policy(timeout=config.response_timeout, retries=config.retries, late=config.late_updates),
    )
    return experiment._replace(algorithm=made.algorithm, sampler=made.sampler)


def synchronization_of(config: RunConfig) -> systems.Synchronization:
    """Returns the synchronization model that a configuration names; by default, rounds are synchronous.

    >>> synchronization_of(RunConfig(synchronization="stale_synchronous(bound=2)"))
    StaleSynchronous(bound=2, versions=None)
    """
    text = config.synchronization or "synchronous"
    return make("synchronization", text, systems.SYNCHRONIZATIONS, systems.Synchronization)


def _as_delivered(experiment: Experiment, config: RunConfig, synchronization: systems.Synchronization) -> Experiment:
    """Lets a run aggregate what has arrived in a deployment, by its record."""
    of_deployment = {"deliveries", "synchronization", "response_timeout", "late_updates"}
    if others := [name for name in config.clock_options if name not in of_deployment]:
        raise ValueError(
            f"Expected no virtual clock with deliveries={config.deliveries!r}, the updates of a deployment, got "
            f"{others[0]}={getattr(config, others[0])!r}: leave it out."
        )
    assert config.deliveries is not None
    record = systems.Deliveries.read(pinned_path(config.deliveries))
    if record.is_of_own_data:
        raise ValueError(
            f"Expected the record of a deployment whose nodes had shares of the dataset, got deliveries={config.deliveries!r}, "
            "of nodes with data of their own (--node-data): repeat it in Python, by Deliveries.read(...).sampler(...) or "
            ".schedule(...) and a sampler of the population of all nodes."
        )
    if not record.has_server_steps:
        if others := [name for name in config.clock_options if name != "deliveries"]:
            raise ValueError(
                f"Expected no synchronization model with deliveries={config.deliveries!r}, the rounds of a deployment that had "
                f"none, got {others[0]}={getattr(config, others[0])!r}: leave it out."
            )
        return experiment._replace(sampler=record.sampler(experiment.sampler, config.rounds))
    name = type(synchronization).__name__
    if record.synchronization is not None and record.synchronization != name:
        raise ValueError(
            f"Expected the synchronization model of the deployment, {record.synchronization}, with "
            f"deliveries={config.deliveries!r}, got {name}: give its --synchronization, or its folder by --from."
        )
    ready = prepared(experiment.algorithm, experiment.sampler, synchronization)
    made = following(ready.algorithm, experiment.sampler, record.schedule(config.rounds), mixing=ready.mixing)
    return experiment._replace(algorithm=made.algorithm, sampler=made.sampler)


def _with_privacy(experiment: Experiment, config: RunConfig) -> Experiment:
    """Adds the guarantee of differential privacy, if the configuration has one, and the noise that its ε needs."""
    if not config.is_private:
        return experiment
    from fedsim import privacy  # Other runs need not wait for it.

    assert config.dp_delta is not None
    algorithm, sampler, delta = experiment.algorithm, experiment.sampler, config.dp_delta
    if config.noise_kind == "distributed":
        algorithm = privacy.with_likely_minimum(algorithm, sampler)
    elif config.noise_kind != "independent":
        cache = datasets.cache_folder() / "noise"
        kind: Any = config.noise_kind
        algorithm = privacy.correlated(algorithm, privacy.noise_matrix(kind, sampler, rounds=config.rounds, cache=cache))
    if config.dp_epsilon is not None:
        algorithm = privacy.calibrated(algorithm, sampler, epsilon=config.dp_epsilon, delta=delta, rounds=config.rounds)
    return experiment._replace(algorithm=algorithm, privacy=privacy.Guarantee.of(algorithm, sampler, delta=delta))


def _check_no_server(algorithm: Algorithm, config: RunConfig) -> None:
    """Raises ``ValueError`` for options of the virtual clock that only algorithms with a server have."""
    others = set(config.clock_options) - {"step_seconds", "message_loss"}
    if others:
        raise ValueError(f"{type(algorithm).__name__} has no server, so it takes no {', '.join(sorted(others))}: leave it out.")


def _law(name: str, text: str) -> systems.Law | float:
    """Returns the number in a text, or the law that it names."""
    try:
        return float(text)
    except ValueError:
        return make(f"law of {name}", text, systems.LAWS, systems.Law)


def _algorithm(
    cls: type[Algorithm], model: Model | None, config: RunConfig, execution: Execution, nodes: int | None = None
) -> Algorithm:
    hyperparameters = algorithm_hyperparameters(cls)
    unknown = sorted(set(config.hyperparameters) - set(hyperparameters))
    if unknown:
        known = ", ".join(hyperparameters) or "none"
        raise ValueError(
            f"{cls.__name__} has no hyperparameter {unknown[0]!r}.{did_you_mean(unknown[0], hyperparameters)} It has: {known}."
        )
    _check_weighting(cls, config)
    _check_labels(cls, model, config)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    given: dict[str, Any] = {"batches": _batches(config, fields["batches"]), "execution": execution}
    own: dict[str, Any] = dict(config.hyperparameters)
    if model is not None:
        given["model"] = model
    if "client_optimizer" in fields:
        given["client_optimizer"] = make_client_optimizer(config)
    if "server_optimizer" in fields and "server_learning_rate" not in fields:
        given["server_optimizer"] = optax.sgd(float(own.pop("server_learning_rate", 1.0)))
    settable = {field.name for field in dataclasses.fields(RunConfig)}
    copied = [name for name in fields if name in settable and name not in given and not options_that_build(name)]
    given |= {name: getattr(config, name) for name in copied}
    if "compressor" in fields:
        if config.error_feedback:
            raise ValueError(
                f"{cls.__name__} has a compressor of its own, for which error_feedback=True has no meaning: leave it out."
            )
        if config.compressor is not None:
            given["compressor"] = make("compressor", config.compressor, compressors.COMPRESSORS, Compressor)
        config = dataclasses.replace(config, compressor=None)
    if "clip" in fields:  # It is the algorithm's own, and no norm that an aggregator clips updates to.
        config = dataclasses.replace(config, clip=None)
    given |= _communication(cls, fields["aggregator"], config) | _graph(cls, config, nodes)
    if "server_optimizer" in given and config.aggregator is not None:
        _check_sum(given["aggregator"], config)
    made = cls(**given, **own)
    if missing := [name for name in cls.capabilities.needed if getattr(made, name) is None]:
        raise ValueError(
            f"{cls.__name__} needs {missing[0]}, which no option gives, and is another algorithm without: give FILE.py:CLASS, "
            f"a class in your file that derives from {cls.__name__} and has a default for {missing[0]}, or use Python."
        )
    return made


def _check_weighting(cls: type[Algorithm], config: RunConfig) -> None:
    """Raises ``ValueError`` for a weighting of clients that an algorithm neither takes nor has anyway."""
    own = next((field for field in dataclasses.fields(cls) if field.name == "weighting"), None)
    if (own is None or not own.init) and config.weighting not in ("examples", own and own.default):
        raise ValueError(
            f"{cls.__name__} determines the weights of clients itself, so it takes no weighting, got weighting="
            f"{config.weighting!r}: leave it out."
        )


def _check_labels(cls: type[Algorithm], model: Model | None, config: RunConfig) -> None:
    """Raises ``ValueError`` for hidden labels where nobody reads labels: the examples without one would be left out."""
    if config.labels is not None and (model is None or "y" not in model.features):
        what = f"{cls.__name__} without a model" if model is None else f"a model that reads {', '.join(model.features)}"
        raise ValueError(
            f"Expected an algorithm and a model that read labels, the feature 'y', with labels={config.labels}, got {what}: "
            "leave labels out."
        )


def _share_programs(algorithms: Sequence[Algorithm], configs: Sequence[RunConfig]) -> None:
    """Lets runs that differ in numbers, such as learning rates, share programs."""
    groups: list[tuple[_WithRates, list[Algorithm], list[dict[str, Any]]]] = []
    for algorithm, config in zip(algorithms, configs, strict=True):
        fields = {field.name for field in dataclasses.fields(algorithm) if field.init}
        rates: dict[str, Any] = {}  # of the optimizers, by the optimizer's field
        if "client_optimizer" in fields:
            rates["client_optimizer"] = config.client_learning_rate
        if "server_optimizer" in fields and "server_learning_rate" not in fields:
            rate: Any = config.hyperparameters.get("server_learning_rate", 1.0)
            rates["server_optimizer"] = float(rate)
        if not rates or type(algorithm).apply is not Algorithm.apply:
            continue
        numbers = numbers_of(algorithm)
        make = _WithRates.of(algorithm, config, numbers)
        group = next((known for known in groups if are_alike(known[0], make)), None)
        if group is None:
            groups.append(group := (make, [], []))
        group[1].append(algorithm)
        group[2].append(numbers | rates)
    for make, members, values in groups:
        share_programs(members, make, values)


@dataclasses.dataclass(frozen=True, eq=False)
class _WithRates:
    """Makes an algorithm from its numbers and the learning rates of its optimizers, so that runs share programs.

    Attributes:
      rest: the algorithm without what the numbers determine.
      client: the configuration of the clients' optimizer, without its learning rate.
    """

    rest: Algorithm
    client: RunConfig

    @classmethod
    def of(cls, algorithm: Algorithm, config: RunConfig, numbers: Mapping[str, Any]) -> _WithRates:
        fields = {field.name for field in dataclasses.fields(algorithm)}
        left_out = [*numbers, *({"client_optimizer", "server_optimizer", "execution", "nonfinite"} & fields)]
        names = options_that_build("client_optimizer")
        if config.client_schedule == "constant":
            names.remove("rounds")
        own = {name: getattr(config, name) for name in names if name != "client_learning_rate"}
        return cls(with_numbers(algorithm, dict.fromkeys(left_out)), RunConfig(**own))

    def __call__(self, client_optimizer: Any = None, server_optimizer: Any = None, **numbers: Any) -> Algorithm:
        """Returns the algorithm with these numbers and these learning rates of its optimizers."""
        if client_optimizer is not None:
            config = dataclasses.replace(self.client, client_learning_rate=client_optimizer)
            numbers["client_optimizer"] = make_client_optimizer(config)
        if server_optimizer is not None:
            numbers["server_optimizer"] = optax.sgd(server_optimizer)
        return with_numbers(self.rest, numbers)


def _communication(cls: type[Algorithm], field: dataclasses.Field[Any], config: RunConfig) -> dict[str, Any]:
    """Returns the fields ``aggregator`` and ``downlink``: updates are clipped, then compressed, then aggregated."""
    names = "aggregator", "compressor", "clip", "downlink", "dp_epsilon", "dp_noise"
    given = [name for name in names if getattr(config, name) is not None]
    if not given:
        return {}
    if not cls.capabilities.aggregators or cls.apply is not Algorithm.apply:
        raise ValueError(f"{cls.__name__} aggregates updates in its own way and takes no {' or '.join(given)}. Leave them out.")
    aggregator: Any
    if config.aggregator is not None:
        _check_inner(config.aggregator)
        aggregator = make("aggregator", config.aggregator, aggregators.AGGREGATORS, aggregators.Aggregator)
    elif config.dp_clip is not None:
        aggregator = _mechanism(config, config.dp_clip)
    else:
        own = field.default_factory
        aggregator = own() if callable(own) else field.default
    if config.compressor is not None:
        compressor = make("compressor", config.compressor, compressors.COMPRESSORS, Compressor)
        compressor = compressors.ErrorFeedback(compressor) if config.error_feedback else compressor
        aggregator = aggregators.Compressed(compressor, inner=aggregator)
    if config.clip is not None:
        aggregator = aggregators.Clipped(config.clip, inner=aggregator)
    downlink = None
    if config.downlink is not None:
        downlink = make("compressor", config.downlink, compressors.COMPRESSORS, Compressor)
    return {"aggregator": aggregator, "downlink": downlink}


def _mechanism(config: RunConfig, clip: str) -> aggregators.Aggregator:
    """Returns the aggregator with noise, whose matrix and whose noise for an ε `_with_privacy` finds."""
    noise = 1.0 if config.dp_noise is None else config.dp_noise
    if config.noise_kind != "distributed":
        norm = aggregators.AdaptiveClip() if clip == "adaptive" else float(clip)
        return aggregators.GaussianMechanism(noise, clip=norm, denominator=config.clients)
    kind, mechanism = "dp_mechanism", aggregators.DistributedMechanism
    own = {"noise_multiplier": noise, "clip": float(clip), "clients": config.clients}
    check_options(kind, "distributed", mechanism, parse_call(config.dp_mechanism)[1], reserved=own)
    return make(kind, config.dp_mechanism, {"distributed": mechanism}, mechanism, **own)


def _graph(cls: type[Algorithm], config: RunConfig, nodes: int | None) -> dict[str, Any]:
    """Returns the topology, the weights and the robust mixing of an algorithm without a server."""
    if nodes is None:
        if config.topology is not None or config.mixing != "auto" or config.robust_mixing is not None:
            raise ValueError(
                f"{cls.__name__} has a server, so it takes no topology, mixing or robust_mixing: leave them out, or choose an "
                "algorithm without a server, such as dpsgd."
            )
        return {}
    from fedsim import decentralized  # imports SciPy and networkx, which other runs need not wait for

    default: Any = getattr(cls, "default_topology", "ring")
    text = config.drawn_topology or topology_with_seed(default, config.seed)
    topology = make("topology", text, decentralized.TOPOLOGIES, decentralized.Topology, nodes=nodes)
    robust = config.robust_mixing and make(
        "robust mixing", config.robust_mixing, decentralized.ROBUST_MIXING, decentralized.RobustMixing
    )
    return {"topology": topology, "robust_mixing": robust} | ({} if config.mixing == "auto" else {"weights": config.mixing})


def _check_inner(text: str) -> None:
    """Raises ``ValueError`` if an aggregator that needs every single update is given an inner one, which gives a sum."""
    name, options = parse_call(text)
    kind = aggregators.AGGREGATORS.get(name)
    if "inner" in options and isinstance(kind, type) and issubclass(kind, aggregators.StackAggregator):
        raise ValueError(
            f"Expected {name!r} without an inner aggregator, got inner={options['inner']!r}: {name} needs every single update, "
            "and of secure_mean, for example, the server sees the sum alone. Use one of the two."
        )


def _check_sum(aggregator: aggregators.Aggregator, config: RunConfig) -> None:
    """Raises ``ValueError`` if the server would take a full step along the sum of weighted updates, which diverges."""
    rate: Any = config.hyperparameters.get("server_learning_rate", 1.0)
    if type(aggregator.innermost) is aggregators.Sum and rate >= 1 and config.clients > 1:
        raise ValueError(
            f"The aggregator 'sum' needs a server learning rate below 1, got server_learning_rate={rate}: the sum of "
            "the clients' updates, each times its weight, is their mean times the cohort's total weight. To take the step of "
            f"the mean, use --aggregator mean, or --weighting uniform --server-learning-rate {1 / config.clients:.3g}."
        )


def _sampler(data: FederatedData, config: RunConfig, algorithm: Algorithm) -> Sampler:
    """Returns the config's sampler, or that of an algorithm without a server, with the config's stragglers and attackers."""
    own = getattr(algorithm, "sampler", None)
    if own is not None:
        if config.sampler is not None:
            raise ValueError(
                f"{type(algorithm).__name__} has no server that chooses clients, so it takes no sampler, got "
                f"sampler={config.sampler!r}: leave it out."
            )
        devices = systems.Devices(_law("seconds", config.step_seconds)) if config.step_seconds else None
        sampler: Any = own(data, clients=config.clients, devices=devices, seed=config.seed)
    else:
        sampler = _named_sampler(config.sampler or "uniform", data, config, algorithm)
    if config.stragglers:
        # The sampler draws a fraction of the epochs. If there is a number of steps instead, it is a fraction of the steps.
        epochs = config.epochs if config.steps is None else config.steps
        sampler = Stragglers(sampler, fraction=config.stragglers, epochs=epochs, drop=config.drop_stragglers)
    if config.attack is not None:
        attack = make("attack", config.attack, attacks.ATTACKS, attacks.Attack, **_of_server_step(config, config.attack))
        sampler = Attacked(sampler, attack, fraction=config.attackers, seed=config.seed)
    return sampler


def _of_server_step(config: RunConfig, attack: str) -> dict[str, int]:
    """Returns the default number of clients and attackers in a server step, by which model replacement scales updates."""
    name, given = parse_call(attack)
    if name != "model_replacement" or "clients" in given:
        return {}
    synchronization = synchronization_of(config)
    if not isinstance(synchronization, systems.Synchronous):
        raise ValueError(
            f"Expected the option clients of model_replacement with synchronization={config.synchronization!r}, got "
            f"attack={attack!r}: give the number by which the server divides the sum of a server step's updates, such as the "
            "size of buffered."
        )
    clients = synchronization.most_updates(config.clients)
    own = {"clients": clients, "attackers": max(1, round(config.attackers * clients))}
    return {name: number for name, number in own.items() if name not in given}


def _named_sampler(text: str, data: FederatedData, config: RunConfig, algorithm: Algorithm) -> Sampler:
    """Returns the named sampler, with the clients and the seed of the config and, if it has one, the algorithm's weighting."""
    name, options = parse_call(text)
    cls: Any = look_up("sampler", name, SAMPLERS)
    given: dict[str, Any] = {"data": data, "clients": config.clients, "seed": config.seed}
    if cls is PoissonSampler:
        if config.clients > data.num_clients:  # The sampler would name the probability, which is no option.
            raise ValueError(
                f"A cohort of clients={config.clients} on average is larger than the population of {data.num_clients}. Give at "
                f"most clients={data.num_clients}."
            )
        given["probability"] = given.pop("clients") / data.num_clients
    if "weighting" in inspect.signature(cls).parameters:
        given["weighting"] = getattr(algorithm, "weighting", config.weighting)
    check_options("sampler", name, cls, options, reserved=given)
    return make("sampler", text, SAMPLERS, object, **given)


def _reporting_for(algorithm: Algorithm, sampler: Sampler) -> Algorithm:
    """Returns the algorithm with what its sampler needs: norms of updates, and factors of the clients' weights."""
    if "update_norm" in getattr(sampler, "observes", ()):
        algorithm = dataclasses.replace(algorithm, update_norms=True)
    if checked_cohort(sampler, 0).arrivals is not None and algorithm.staleness is None:
        algorithm = dataclasses.replace(algorithm, staleness=Staleness(bound=0))
    check_fits(sampler, algorithm)
    return algorithm


def algorithm_class(name: str) -> type[Algorithm]:
    """Returns the algorithm class for a registered name, ``FILE.py:CLASS`` or ``MODULE:CLASS``.

    Raises:
      ValueError: there is no such class.

    >>> algorithm_class("fedsim.algorithms:FedProx") is algorithm_class("fedprox")
    True
    """
    if ":" not in name:
        if name.lower() in algorithms.ALGORITHMS:
            return algorithms.ALGORITHMS[name.lower()]
        from fedsim import decentralized  # imports SciPy and networkx, which other runs need not wait for

        return look_up("algorithm", name.lower(), {**algorithms.ALGORITHMS, **decentralized.ALGORITHMS})
    cls = import_reference(name)
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise ValueError(f"{name} is not a subclass of fedsim.Algorithm: give FILE.py:CLASS.")
    return cls


def algorithm_hyperparameters(cls: type[Algorithm]) -> dict[str, Hyperparameter]:
    """Returns the fields of an algorithm that are not fields of `RunConfig` and can be given on a command line.

    For an algorithm with a field ``server_optimizer`` and no field ``server_learning_rate``, the latter is added: the optimizer
    is then SGD with this learning rate.

    Raises:
      ValueError: a field without a default cannot be given on a command line.

    >>> algorithm_hyperparameters(algorithms.FedProx)["mu"]
    Hyperparameter(type=<class 'float'>, default=0.1)
    """
    general = {field.name for field in dataclasses.fields(RunConfig)}
    fields = [field for field in dataclasses.fields(cls) if field.init]
    found: dict[str, Hyperparameter] = {}
    for field in fields:
        if options_that_build(field.name) or field.name in general:
            continue
        kind = _evaluated_type(cls, field)
        if _is_simple(kind):
            found[field.name] = Hyperparameter(kind, field.default)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"{cls.__name__} requires {field.name}: {field.type}, which cannot be given on a command line. Give the field "
                "a default."
            )
    if any(field.name == "server_optimizer" for field in fields):
        found.setdefault("server_learning_rate", Hyperparameter(float, 1.0))
    return found


def _model_of(
    cls: type[Algorithm],
    dataset: str,
    default: str | Callable[..., Model] | None,
    of_data: frozenset[str],
    *,
    model: str | None,
    init_from: str | None,
    init_map: str | None,
    init_partly: bool,
    precision: str | None,
    loss_scale: float | None,
    frozen: str | None,
    kept: str | None,
) -> Model | None:
    """Returns the model of an algorithm, by the options that build it; None if the algorithm has none."""
    if "model" not in _fields(cls):
        given = {"init_from": init_from, "precision": precision, "frozen": frozen, "kept": kept}
        if names := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{cls.__name__} has no model, so it takes no {' or '.join(names)}: leave them out.")
        return None
    own = getattr(cls, "default_models", {}).get(parse_call(dataset)[0])
    whole = _model(model or own or default, dataset, default, of_data)
    if init_from is not None:
        if hasattr(cls, "init_from"):
            raise ValueError(
                f"{cls.__name__} starts from several models that must differ, so it takes no init_from: use "
                "Model.starting_from in Python, and begin with the state that the algorithm's method init_from returns."
            )
        rules = dict(rule.partition("=")[::2] for rule in init_map.split(",")) if init_map else {}
        whole = whole.starting_from(read_params(pinned_path(init_from)), names=rules, partly=init_partly)
    if precision in ("bfloat16", "float16"):
        whole = whole.with_precision(precision, loss_scale=loss_scale)
    elif precision == "float32":
        _check_full_precision(whole)
    parts = {name: text.split(",") for name, text in {"frozen": frozen, "kept": kept}.items() if text}
    return whole.with_parts(**parts) if parts else whole


def _check_full_precision(model: Model) -> None:
    """Raises ``ValueError`` if a network converts values to half precision itself, which no option undoes."""
    program = jax.make_jaxpr(model.apply_for_eval)(jax.eval_shape(model.init_whole, jax.random.key(0)), model.dummy_examples(1))
    # Not of the program itself, whose arguments may be examples in half precision.
    if any(re.search(r"\b(bf16|f16)\[", str(equation)) for equation in program.jaxpr.eqns):
        raise ValueError(
            "Expected a network that computes in float32 for precision='float32', got one that converts values to half "
            "precision itself: leave precision out, or remove what converts them, such as with_precision or a dtype argument."
        )


def _model(
    name: str | Callable[..., Model] | None,
    dataset: str,
    default: str | Callable[..., Model] | None,
    of_data: frozenset[str],
) -> Model:
    """Makes a model. Options that describe the data and that are not given are those of the dataset's default model.

    These are the options that the model needs, such as its shape, and those that the dataset has, too, such as its vocabulary,
    if the model has all of them. A model that lacks some may mean something else by the others. A model that has all options of
    the default model, also those of its loss, gets all of them, because learning rates are published for that loss.
    """
    if name is None:
        raise ValueError(
            f"The dataset {dataset!r} has no default model. Choose one with --model: {', '.join(models_without_arguments())}; "
            "for other shapes, 'dense(shape=[...], num_classes=...)'; or your own, FILE.py:FUNCTION."
        )
    if not isinstance(name, str):
        return name()
    given: dict[str, Any] = {}
    if isinstance(default, str) and (factory := models.MODELS.get(parse_call(name)[0])):
        options = parse_call(default)[1]
        shared = of_data & options.keys()
        known = inspect.signature(factory).parameters.keys()
        taken = required(factory) - shared | (shared if shared <= known else set())
        taken |= options.keys() if options.keys() <= known else set()
        given = {option: value for option, value in options.items() if option in taken - parse_call(name)[1].keys()}
    return make("model", name, models.MODELS, Model, **given)


def models_without_arguments() -> list[str]:
    """Returns the names of the models that need no arguments.

    >>> "emnist_cnn" in models_without_arguments(), "dense" in models_without_arguments()
    (True, False)
    """
    return [name for name, factory in models.MODELS.items() if not required(factory)]


def _batches(config: RunConfig, field: dataclasses.Field[Any]) -> Batches:
    """Returns the batches of the config, unshuffled if the algorithm's default is (FedSGD reads examples in stored order)."""
    factory = field.default_factory
    own = factory() if callable(factory) else field.default
    own = own if isinstance(own, Batches) else Batches(size=config.batch_size)
    return dataclasses.replace(
        own,
        size=config.batch_size,
        epochs=config.epochs,
        steps=config.steps,
        max_steps=config.max_steps,
        shuffle=own.shuffle and config.shuffle,
        drop_remainder=config.drop_remainder,
        microbatch=config.microbatch,
    )


def _evaluated_type(cls: type, field: dataclasses.Field[Any]) -> Any:
    if not isinstance(field.type, str):
        return field.type
    owner = next(base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", {}))
    try:
        return eval(field.type, vars(sys.modules[owner.__module__]))
    except (NameError, AttributeError, TypeError):
        return None  # the name is imported only for type checkers, so it is not a simple type


def _is_simple(kind: Any) -> bool:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return all(isinstance(choice, _SIMPLE) for choice in arguments)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return all(argument is type(None) or _is_simple(argument) for argument in arguments)
    return kind in _SIMPLE
