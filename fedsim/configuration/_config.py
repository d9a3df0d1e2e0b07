"""The configuration of a run: `RunConfig` determines its result, `Settings` only its speed and its output."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import numpy as np

from fedsim import checks
from fedsim.configuration._client_schedule import client_schedule
from fedsim.configuration._validation import validation_fraction
from fedsim.data import Batches
from fedsim.datasets import with_hash, with_seed
from fedsim.execution import Auto, Debug, Execution, Jit, Pmap, Sharded
from fedsim.names import did_you_mean, look_up, parse_call, seeded
from fedsim.pinned_files import pinned
from fedsim.saved_arrays import newest_checkpoint

Value = float | int | str | bool | None
# How the members of a sweep or a population run, see `fedsim.population`.
How = Literal["vmap", "devices", "sequential"]

# Where metrics can be written besides metrics.jsonl, with the extra that each needs.
WRITERS = {"tensorboard": "run", "wandb": "wandb", "mlflow": "mlflow"}
# Kinds of noise of differential privacy; the last one takes options in parentheses.
_MECHANISMS = "independent", "tree", "efficient_tree", "banded", "buffered", "distributed"
# The axes of a mesh, see `fedsim.Sharded`.
_AXES = ("clients", "model", "data")


def python_numbers(value: Any) -> Any:
    """Returns a number of NumPy or JAX as one of Python, which JSON has; in a mapping, too. Other values stay as they are.

    >>> import numpy as np
    >>> python_numbers({"mu": np.float64(0.1), "clients": np.int64(2), "algorithm": "fedprox"})
    {'mu': 0.1, 'clients': 2, 'algorithm': 'fedprox'}
    """
    if isinstance(value, Mapping):
        return {name: python_numbers(each) for name, each in value.items()}
    is_known = isinstance(value, np.generic | np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
    return value.item() if is_known and not np.ndim(value) else value


def _set_python_numbers(config: Any) -> None:
    for field in dataclasses.fields(config):
        object.__setattr__(config, field.name, python_numbers(getattr(config, field.name)))


def _option(
    default: Any,
    group: str,
    text: str,
    *,
    names: Literal["code", "file"] | None = None,
    builds: str | tuple[str, ...] = (),
    of_sampler: bool = False,
) -> Any:
    """Returns a field with all that other modules need to know of an option, so that a new option is written once.

    Args:
      default: the default.
      group: the heading in ``--help``.
      text: the description in ``--help``.
      names: whether the text of the option may name Python code, which is imported, or a file or folder.
      builds: the fields of an algorithm that are built from this option and others. A field of an algorithm that is not built
        has the value of the option of the same name, if there is one.
      of_sampler: whether a sampler depends on it. Runs in which these options are equal share a sampler.
    """
    built = (builds,) if isinstance(builds, str) else builds
    metadata = {"group": group, "help": text, "names": names, "builds": built, "of_sampler": of_sampler}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that the result of a run depends on. Two runs with equal `RunConfig` give the same parameters.

    The fields are the options of ``fedsim run``, and ``fedsim run --help`` describes them.

    A dataset with an option ``seed`` is drawn with the field ``seed`` unless its own is given: with ``dataset="digits"`` and
    ``seed=1``, `build` loads ``digits(seed=1)``.

    The names of files (``init_from``, ``faults``, ``client_traces``, ``deliveries``, and ``dataset`` if it is a file) become
    absolute paths with a hash of the content, ``PATH#sha256=HASH``.

    Attributes:
      hyperparameters: fields of the algorithm by name, e.g. ``{"server_learning_rate": 0.1}``. Others keep their defaults.

    Raises:
      ValueError: a value is out of its range.
      FileNotFoundError: there is no such file.

    >>> RunConfig(rounds=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected rounds >= 1, got rounds=0: give a positive whole number.
    """

    dataset: str = _option(
        "digits",
        "data and model",
        "Name of a dataset, 'NAME(option=value)' or FILE.py:FUNCTION; `fedsim datasets` lists the names. Or a file or folder "
        "of your own data, such as people.csv.",
        names="code",
    )
    data: str | None = _option(
        None,
        "data and model",
        "Folder with the files of the dataset; by default they are downloaded once.",
        names="file",
    )
    model: str | None = _option(
        None,
        "data and model",
        "Name of a model, 'NAME(option=value)' or FILE.py:FUNCTION; default: that of the dataset.",
        names="code",
        builds="model",
    )
    init_from: str | None = _option(
        None,
        "data and model",
        "Start from these parameters: a run folder (its last checkpoint), or a .safetensors or .npz file of arrays with "
        "names such as 'linear/w'.",
        names="file",
        builds="model",
    )
    init_map: str | None = _option(
        None,
        "data and model",
        "New names of arrays of --init-from, separated by commas: 'encoder/*=body/*' (old name = new name, * is any text); "
        "'head/*=' leaves them out.",
        builds="model",
    )
    init_partly: bool = _option(
        False,
        "data and model",
        "Parameters that --init-from does not have keep their initial values, and other arrays in it are left out; a warning "
        "names both.",
        builds="model",
    )
    frozen: str | None = _option(
        None,
        "data and model",
        "Patterns of names of parameters that do not change, separated by commas, such as 'linear/*': they are neither trained "
        "nor sent.",
        builds="model",
    )
    kept: str | None = _option(
        None,
        "data and model",
        "Patterns of names of parameters that every client trains and keeps for itself, such as 'linear_2/*'.",
        builds="model",
    )
    precision: Literal["bfloat16", "float16", "float32"] | None = _option(
        None,
        "data and model",
        "Precision in which the network computes; parameters, losses and updates stay float32. Default: that of the model.",
        builds="model",
    )
    loss_scale: float | None = _option(
        None,
        "data and model",
        "With --precision: a factor of the gradient inside of the network, so that small values do not become 0. Default: 1024 "
        "in float16, 1 in bfloat16.",
        builds="model",
    )
    validation: str | None = _option(
        None,
        "data and model",
        "Part of the training data that is set apart for validation: '0.1' is a fraction of each client's examples, "
        "'clients(fraction=0.1)' of the clients; default: the dataset's own validation data, if it has some.",
    )
    labels: float | None = _option(
        None,
        "data and model",
        "Fraction of each client's training examples that have a label. Algorithms that need labels (not fixmatch, fedmatch) "
        "then train on these alone; default: all.",
        of_sampler=True,
    )
    algorithm: str = _option(
        "fedavg",
        "algorithm",
        "Name of an algorithm, FILE.py:CLASS or MODULE:CLASS.",
        names="code",
        of_sampler=True,
    )
    weighting: Literal["examples", "uniform"] = _option(
        "examples", "algorithm", "Weight of a client: its number of examples, or 1.", of_sampler=True
    )
    nonfinite: Literal["drop", "raise"] = _option(
        "drop", "algorithm", "Leave a client update that is not finite out, or stop the run."
    )
    aggregator: str | None = _option(
        None,
        "communication",
        "How updates are aggregated: mean, 'trimmed_mean(trim=0.1)', 'krum(attackers=2)', ...; default: the algorithm's.",
        names="code",
        builds="aggregator",
    )
    compressor: str | None = _option(
        None,
        "communication",
        "How clients compress their updates: 'eden(bits=2)', top_k, qsgd, ...; default: not at all.",
        names="code",
        builds=("aggregator", "compressor"),
    )
    error_feedback: bool = _option(
        False, "communication", "A client adds its compression error to its next update.", builds="aggregator"
    )
    clip: float | None = _option(
        None, "communication", "Largest Euclidean norm of an update; longer ones are scaled down.", builds="aggregator"
    )
    downlink: str | None = _option(
        None,
        "communication",
        "How the server compresses the parameters that it sends to clients.",
        names="code",
        builds="downlink",
    )
    attack: str | None = _option(
        None,
        "attacks and stragglers",
        "What malicious clients do: sign_flip, 'label_flip(num_classes=10)', a_little_is_enough, ...; default: nothing.",
        names="code",
        of_sampler=True,
    )
    attackers: float = _option(
        0.2, "attacks and stragglers", "Fraction of the population that is malicious, if there is an attack.", of_sampler=True
    )
    stragglers: float = _option(
        0.0, "attacks and stragglers", "Fraction of each cohort that trains fewer epochs.", of_sampler=True
    )
    drop_stragglers: bool = _option(
        False, "attacks and stragglers", "Leave stragglers out instead of using their partial work.", of_sampler=True
    )
    topology: str | None = _option(
        None,
        "decentralized learning",
        "The graph of the clients, for algorithms without a server: ring, 'random_regular(degree=4)', one_peer_exponential, "
        "...; default: ring, or a tree if the algorithm needs one.",
        names="code",
        builds="topology",
    )
    mixing: str = _option(
        "auto",
        "decentralized learning",
        "The weights of neighbours: metropolis, uniform, lazy, column_stochastic, or auto: those that suit the graph and the "
        "algorithm.",
        builds="weights",
    )
    robust_mixing: str | None = _option(
        None,
        "decentralized learning",
        "What replaces the weighted mean, against malicious neighbours: 'clipped_mixing(radius=1)', 'trimmed_mixing(trim=1)'.",
        names="code",
        builds="robust_mixing",
    )
    synchronization: str | None = _option(
        None,
        "virtual clock",
        "When clients start and the server aggregates: 'buffered(size=10, concurrency=30)', 'asynchronous(concurrency=30)', "
        "'stale_synchronous(bound=2)', ...; default: synchronous, or rounds without a clock.",
        names="code",
        of_sampler=True,  # Its updates per server step are a default of model replacement.
    )
    step_seconds: str | None = _option(
        None,
        "virtual clock",
        "Seconds that a client needs for a step: 'log_normal(sigma=1)', 'exponential(mean=2)', 'half_normal(scale=1)', ...; or "
        "a number; default: 1.",
        names="code",
        of_sampler=True,
    )
    client_traces: str | None = _option(
        None,
        "virtual clock",
        "CSV or JSON file with a line per client: when it is online, and how fast it is where the other options do not count.",
        names="file",
    )
    client_traces_period: float | None = _option(
        None, "virtual clock", "Seconds after which the times in the traces repeat; default: they do not."
    )
    download_rate: str | None = _option(
        None,
        "virtual clock",
        "Bytes per second that a client receives, a number or a law; default: messages take no time.",
        names="code",
    )
    upload_rate: str | None = _option(
        None,
        "virtual clock",
        "Bytes per second that a client sends, a number or a law; default: messages take no time.",
        names="code",
    )
    message_loss: float = _option(
        0.0, "virtual clock", "Probability that a message to or from a client, or between nodes, is lost."
    )
    client_failures: float = _option(0.0, "virtual clock", "Probability that a client fails during its training.")
    client_recovery: float = _option(0.0, "virtual clock", "Seconds after which such a client can be selected again.")
    faults: str | None = _option(
        None,
        "virtual clock",
        "JSON file with the faults of given dispatches, instead of random ones, see FaultSchedule.",
        names="file",
    )
    retries: int = _option(0, "virtual clock", "How often a lost message is sent again.")
    response_timeout: float | None = _option(
        None, "virtual clock", "Seconds after which the server stops waiting for a client; default: it learns of every failure."
    )
    late_updates: Literal["drop", "use"] = _option(
        "drop", "virtual clock", "Leave out an update that arrives after the server has stopped waiting, or use it next."
    )
    deliveries: str | None = _option(
        None,
        "virtual clock",
        "The record of a deployed run, its deliveries.jsonl, in place of a clock: the same updates are aggregated in the same "
        "rounds, also with --from RUN.",
        names="file",
    )
    dp_epsilon: float | None = _option(
        None,
        "differential privacy",
        "ε of all rounds, such as 8: the noise on the aggregate that it needs is found before the run. With --dp-delta and "
        "--dp-clip, --weighting uniform, and best --sampler poisson.",
        builds="aggregator",
    )
    dp_noise: float | None = _option(
        None,
        "differential privacy",
        "Instead of --dp-epsilon: the noise on the sum of the updates, in units of the norm that they are clipped to.",
        builds="aggregator",
    )
    dp_delta: float | None = _option(None, "differential privacy", "δ, at most one over the number of clients, such as 1e-6.")
    dp_clip: str | None = _option(
        None,
        "differential privacy",
        "Largest norm of an update: a number, or 'adaptive' for the median of the norms, which is estimated with noise, too.",
        builds="aggregator",
    )
    dp_mechanism: str = _option(
        "independent",
        "differential privacy",
        "Noise of a round: independent; correlated between rounds (DP-FTRL) by a matrix: tree, efficient_tree, banded or "
        "buffered, which needs clients in a fixed or shuffled order, such as --sampler cyclic (for banded also "
        "cyclic_poisson); or distributed, the clients' own integer noise, e.g. 'distributed(law=\"gaussian\", bits=18)', which "
        "needs --sampler poisson or all clients in every round. All but independent need a fixed --dp-clip.",
        builds="aggregator",
    )
    # The optimizer of a server without a learning rate of its own is SGD with the hyperparameter server_learning_rate.
    hyperparameters: Mapping[str, Value] = dataclasses.field(default_factory=dict, metadata={"builds": ("server_optimizer",)})
    rounds: int = _option(100, "training", "Number of rounds.", builds="client_optimizer")
    clients: int = _option(
        10,
        "training",
        "Clients per round. In algorithms without a server all take part in every round; only adpsgd uses this number.",
        of_sampler=True,
    )
    sampler: str | None = _option(
        None,
        "training",
        "How the clients of a round are chosen: weighted, 'power_of_choice(candidates=30)', oort, ...; default: uniform. "
        "weighted and power_of_choice choose by size, so give --weighting uniform. "
        "With poisson, each is chosen with the same probability, and --clients is their number on average; with "
        "'cyclic_poisson(cycle=10)', each of a group, and 10 groups take turns.",
        of_sampler=True,
    )
    batch_size: int = _option(20, "training", "Examples per client step.", builds="batches", of_sampler=True)
    microbatch: int | None = _option(
        None,
        "training",
        "Examples of a client step whose gradient is computed at a time, so that large batches fit in memory; default: all.",
        builds="batches",
    )
    epochs: int = _option(1, "training", "Passes of a client over its examples per round.", builds="batches", of_sampler=True)
    steps: int | None = _option(
        None, "training", "Steps of a client per round, instead of epochs.", builds="batches", of_sampler=True
    )
    max_steps: int | None = _option(
        None, "training", "Largest number of steps of a client per round.", builds="batches", of_sampler=True
    )
    evaluate_every: int = _option(10, "training", "Rounds between evaluations on the test data.")
    stop_when: str | None = _option(
        None,
        "training",
        "Rules that end the run after an evaluation, joined by 'or': 'no_better(evaluations=5)' (validation loss), "
        "'reached(value=0.9)' (validation accuracy), 'spent(megabytes=100)', 'spent(seconds=3600)' (simulated).",
    )
    shuffle: bool = _option(True, "training", "Clients shuffle their examples in every epoch.", builds="batches")
    drop_remainder: bool = _option(
        False, "training", "Clients leave out a last batch that is not full.", builds="batches", of_sampler=True
    )
    seed: int = _option(
        0,
        "training",
        "Seed of all random draws, also of the dataset's partition and of a random topology unless these have a seed: "
        "'digits(seed=3)'.",
        of_sampler=True,
    )
    client_optimizer: str | None = _option(
        None,
        "client optimizer (SGD)",
        "Another optimizer of optax in place of SGD: 'adamw(weight_decay=0.1)', adam, yogi, ...",
        builds="client_optimizer",
    )
    client_learning_rate: float = _option(
        0.1, "client optimizer (SGD)", "Learning rate of the clients.", builds="client_optimizer"
    )
    client_momentum: float = _option(0.0, "client optimizer (SGD)", "Momentum of the clients.", builds="client_optimizer")
    client_schedule: str = _option(
        "constant",
        "client optimizer (SGD)",
        "How the clients' learning rate changes over the rounds: constant, 'linear(end=0)', 'cosine(end=0.1)' (the last rate "
        "as a fraction of the first one), 'exponential(decay=0.1, every=500, staircase=True)'.",
        builds="client_optimizer",
    )

    def __post_init__(self) -> None:
        _set_python_numbers(self)
        _check_choices(self)
        counts = ("rounds", "clients", "batch_size", "epochs", "evaluate_every")
        checks.whole(1, **{name: getattr(self, name) for name in counts})
        checks.whole(1, or_none=True, steps=self.steps, max_steps=self.max_steps)
        # Raises ValueError for epochs and steps together, and for a microbatch that is larger than the batch.
        Batches(size=self.batch_size, epochs=self.epochs, steps=self.steps, microbatch=self.microbatch)
        checks.whole(0, seed=self.seed)
        if self.validation is not None:
            validation_fraction(self.validation)
        rates: dict[str, Any] = {name: value for name, value in self.hyperparameters.items() if name == "server_learning_rate"}
        checks.positive(client_learning_rate=self.client_learning_rate, **rates, remedy="give a step size, e.g. 0.1")
        checks.number(least=0, most=1, attackers=self.attackers, stragglers=self.stragglers, remedy="give a fraction")
        checks.number(above=0, most=1, or_none=True, labels=self.labels, remedy="give a fraction")
        checks.number(least=0, most=1, message_loss=self.message_loss, client_failures=self.client_failures)
        checks.number(least=0, client_recovery=self.client_recovery, remedy="give seconds")
        checks.whole(0, retries=self.retries)
        given = {"response_timeout": self.response_timeout, "client_traces_period": self.client_traces_period}
        checks.positive(or_none=True, **given, remedy="give seconds")
        checks.positive(or_none=True, loss_scale=self.loss_scale, remedy="1 does not scale")
        if self.loss_scale not in (None, 1) and self.precision not in ("bfloat16", "float16"):
            raise ValueError(
                f"Expected loss_scale with half precision, got loss_scale={self.loss_scale} and precision={self.precision!r}: "
                "choose precision='float16', or leave loss_scale out."
            )
        self._check_files()
        checks.positive(or_none=True, clip=self.clip, remedy="None does not clip updates")
        if self.error_feedback and not self.compressor:
            raise ValueError("error_feedback=True requires a compressor, got none: choose one, e.g. compressor='top_k'.")
        self._check_privacy()
        checks.number(least=0, below=1, client_momentum=self.client_momentum, remedy="0 is plain SGD")
        client_schedule(self.client_schedule)

    @property
    def is_private(self) -> bool:
        """Whether the run has differential privacy."""
        return self.dp_epsilon is not None or self.dp_noise is not None

    @property
    def noise_kind(self) -> str:
        """The name of the mechanism of differential privacy, without its options."""
        return parse_call(self.dp_mechanism)[0]

    def _check_privacy(self) -> None:
        checks.positive(or_none=True, dp_epsilon=self.dp_epsilon, remedy="8 is a weak guarantee, 1 a strong one")
        checks.number(least=0, or_none=True, dp_noise=self.dp_noise)
        checks.number(
            above=0, below=1, or_none=True, dp_delta=self.dp_delta, remedy="give one over the number of clients or less"
        )
        given = {name: getattr(self, name) for name in ("dp_epsilon", "dp_noise", "dp_delta", "dp_clip")}
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        noises = [name for name in ("dp_epsilon", "dp_noise") if given[name] is not None]
        if shown and (len(noises) != 1 or self.dp_delta is None or self.dp_clip is None):
            raise ValueError(
                f"Expected dp_epsilon or dp_noise, with dp_delta and dp_clip, got {shown}: give, for example, dp_epsilon=8, "
                "dp_delta=1e-6 and dp_clip='adaptive'."
            )
        if self.dp_clip is not None and self.dp_clip != "adaptive":
            try:
                number = float(self.dp_clip)
            except ValueError:
                number = None
            checks.positive(dp_clip=self.dp_clip if number is None else number, remedy="give a norm such as 0.5, or 'adaptive'")
        look_up("dp_mechanism", self.noise_kind, dict.fromkeys(_MECHANISMS))
        if self.noise_kind != "distributed" and self.noise_kind != self.dp_mechanism:
            raise ValueError(
                f"Expected no options of the mechanism {self.noise_kind}, got dp_mechanism={self.dp_mechanism!r}: write "
                f"dp_mechanism={self.noise_kind!r}. Only 'distributed' has options."
            )
        if self.noise_kind != "independent" and (not self.is_private or self.dp_clip == "adaptive"):
            raise ValueError(
                f"Expected dp_epsilon or dp_noise, with dp_delta and a number for dp_clip, with dp_mechanism="
                f"{self.dp_mechanism!r}, got {shown or 'none of them'}: give, for example, dp_epsilon=8, dp_delta=1e-6 and "
                "dp_clip=0.5."
            )
        if self.is_private and self.aggregator is not None:
            raise ValueError(
                f"Expected no aggregator with differential privacy, got aggregator={self.aggregator!r}: the accountant knows "
                "the clipped mean with noise alone. Leave it out."
            )
        if self.is_private and self.stop_when is not None:
            raise ValueError(
                f"Expected no stop_when with differential privacy, got stop_when={self.stop_when!r}: when the run ends would "
                "depend on examples and numbers of clients without noise. Leave it out."
            )

    def _check_files(self) -> None:
        """Adds hashes to the names of files, so that their content is a part of the configuration."""
        random = {name: getattr(self, name) for name in ("message_loss", "client_failures", "client_recovery")}
        if self.faults is not None and (given := [f"{name}={value}" for name, value in random.items() if value]):
            raise ValueError(
                f"Expected faults of a file or random ones, got faults={self.faults!r} and {', '.join(given)}: leave one out."
            )
        if self.client_traces is None and self.client_traces_period is not None:
            raise ValueError(
                f"Expected client_traces with client_traces_period={self.client_traces_period}, got none: give the file, or "
                "leave the period out."
            )
        for rule in self.init_map.split(",") if self.init_map else ():
            if rule.count("=") != 1:
                raise ValueError(
                    f"Expected init_map to be rules OLD=NEW separated by commas, got {rule!r} in init_map={self.init_map!r}: "
                    "write 'encoder/*=body/*', or 'head/*=' to leave arrays out."
                )
        if self.init_from is None and (self.init_map is not None or self.init_partly):
            raise ValueError(
                f"Expected init_from with init_map={self.init_map!r} and init_partly={self.init_partly}, got none: give the "
                "run or the file, or leave these out."
            )
        if self.init_from is not None and (folder := Path(self.init_from).expanduser()).is_dir():
            object.__setattr__(self, "init_from", str(newest_checkpoint(folder)))
        object.__setattr__(self, "dataset", with_hash(self.dataset))
        for name in ("init_from", "faults", "client_traces", "deliveries"):
            if (file := getattr(self, name)) is not None:
                object.__setattr__(self, name, pinned(file))

    @functools.cached_property
    def drawn_dataset(self) -> str:
        """The dataset with the seed with which it is drawn, if it has an option ``seed``.

        >>> RunConfig(seed=1).drawn_dataset, RunConfig(dataset="digits(seed=3)", seed=1).drawn_dataset
        ('digits(seed=1)', 'digits(seed=3)')
        """
        return with_seed(self.dataset, self.seed)

    @functools.cached_property
    def drawn_topology(self) -> str | None:
        """The topology with the seed with which it is drawn, if it has an option ``seed``; None: that of the algorithm.

        >>> RunConfig(topology="random_regular(degree=4)", seed=1).drawn_topology, RunConfig(topology="ring").drawn_topology
        ('random_regular(degree=4, seed=1)', 'ring')
        """
        return self.topology and topology_with_seed(self.topology, self.seed)

    @property
    def clock_options(self) -> list[str]:
        """The options of the virtual clock that differ from their defaults. If there are any, a federation is simulated."""
        fields = [field for field in dataclasses.fields(self) if field.metadata.get("group") == "virtual clock"]
        return [field.name for field in fields if getattr(self, field.name) != field.default]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunConfig:
        """Returns the config in ``config.json``, as `fedsim.experiment.read_config` returns it.

        Raises:
          ValueError: this version of fedsim does not have one of the fields, or a value is out of its range.
        """
        return _from_json(cls, values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is executed and reported. A resumed run may have other settings.

    The fields are the options of ``fedsim run`` and ``fedsim resume``, and their ``--help`` describes them.

    Raises:
      ValueError: a value is out of its range.

    >>> Settings(execution="jit", lanes=2).executor()
    Jit(lanes=2, memory='auto', deterministic=False, differentiable=False)
    """

    folder: str | None = _option(
        None,
        "output",
        "Run folder; default: runs/DATASET-ALGORITHM-TIME.",
        names="file",
    )
    checkpoint_every: int | None = _option(
        None, "output", "Rounds between checkpoints; default: one checkpoint about every ten seconds."
    )
    writers: str | None = _option(
        None,
        "output",
        "Where metrics go besides metrics.jsonl, separated by commas: tensorboard, wandb, mlflow, or none; default: "
        "tensorboard if it is installed.",
    )
    progress: bool = _option(True, "output", "Show a progress bar.")
    execution: Literal["auto", "debug", "jit", "pmap"] = _option(
        "auto",
        "execution (speed only)",
        "debug: plain Python; jit: compiled, on one device; pmap and auto: compiled, on all devices.",
        builds="execution",
    )
    devices: int | None = _option(
        None, "execution (speed only)", "Number of devices; default: all, which for a CPU are its cores.", builds="execution"
    )
    mesh: str | None = _option(
        None,
        "execution (speed only)",
        "Several devices for each client, such as 'clients=4, model=2' or 'clients=2, data=2': see fedsim.Sharded.",
        builds="execution",
    )
    lanes: int | None = _option(
        None,
        "execution (speed only)",
        "Clients that train at the same time on a device; default: chosen for the device.",
        builds="execution",
    )
    example_storage: Literal["auto", "resident", "stream"] = _option(
        "auto",
        "execution (speed only)",
        "resident: keep all examples on the device; stream: copy those of each cohort to it; auto: by their size.",
        builds="execution",
    )
    deterministic: bool = _option(
        False,
        "execution (speed only)",
        "On a GPU: equal seeds give equal bits. Rounds take longer.",
        builds="execution",
    )
    rounds_per_dispatch: int | None = _option(
        None, "execution (speed only)", "Largest number of rounds that are sent to the device at once; default: by their time."
    )

    def __post_init__(self) -> None:
        _set_python_numbers(self)
        _check_choices(self)
        if self.folder == "":
            raise ValueError("Expected the name of a folder, got folder='': give a name, or leave it out.")
        writer_names(self.writers)
        counts = ("checkpoint_every", "devices", "lanes", "rounds_per_dispatch")
        given = {name: getattr(self, name) for name in counts}
        checks.whole(1, or_none=True, **given, remedy="give a positive whole number, or leave it out")
        self._axes()

    def executor(self) -> Execution:
        """Returns the execution that these settings name.

        Raises:
          ValueError: the execution does not have one of the options.
        """
        if self.mesh is not None:
            if self.execution != "auto" or self.devices is not None:
                raise ValueError(
                    f"Expected mesh without execution and devices, got mesh={self.mesh!r}, execution={self.execution!r}, "
                    f"devices={self.devices}: leave these out."
                )
            return Sharded(**self._axes(), lanes=self.lanes, memory=self.example_storage, deterministic=self.deterministic)
        if self.execution == "debug":
            if (self.devices, self.lanes, self.example_storage, self.deterministic) != (None, None, "auto", False):
                raise ValueError(
                    "execution='debug' does not take devices, lanes, example_storage or deterministic: leave these options out."
                )
            return Debug()
        if self.execution == "jit":
            if self.devices not in (None, 1):
                raise ValueError(f"execution='jit' uses one device, got devices={self.devices}: use execution='pmap'.")
            return Jit(lanes=self.lanes, memory=self.example_storage, deterministic=self.deterministic)
        kind = Auto if self.execution == "auto" else Pmap
        return kind(devices=self.devices, lanes=self.lanes, memory=self.example_storage, deterministic=self.deterministic)

    @property
    def num_devices(self) -> int | None:
        """The number of devices that are asked for; None for all."""
        axes = self._axes()
        if "clients" not in axes:
            return self.devices
        return axes["clients"] * axes.get("model", 1) * axes.get("data", 1)

    def _axes(self) -> dict[str, Any]:
        """Returns the axes of the mesh with their sizes."""
        if self.mesh is None:
            return {}
        try:
            axes = parse_call(f"mesh({self.mesh})")[1]
        except ValueError as error:
            raise ValueError(
                f"Expected mesh to have numbers of devices by the names {', '.join(_AXES)}, got mesh={self.mesh!r}: separate "
                "them by commas, as in mesh='clients=4, model=2'."
            ) from error
        for name in axes:
            if name not in _AXES:
                raise ValueError(
                    f"Expected mesh to name {', '.join(_AXES)}, got {name!r} in {self.mesh!r}.{did_you_mean(name, _AXES)}"
                )
        checks.whole(1, **axes, remedy="give a positive whole number of devices for each axis, as in mesh='clients=4, model=2'")
        return axes

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """Returns the settings in ``config.json``, as `fedsim.experiment.read_config` returns them.

        Raises:
          ValueError: this version of fedsim does not have one of the fields, or a value is out of its range.

        >>> Settings.from_json({"lanes": 2, "speed": 3})
        Traceback (most recent call last):
        ...
        ValueError: The stored settings have fields that this version of fedsim does not know: speed.
        """
        return _from_json(cls, values)


def writer_names(text: str | None) -> list[str]:
    """Returns the writers that a text names, separated by commas; none for ``"none"`` or None.

    Raises:
      ValueError: there is no such writer.

    >>> writer_names("tensorboard, mlflow"), writer_names("none")
    (['tensorboard', 'mlflow'], [])
    """
    names = [] if text in (None, "none") else [name.strip() for name in str(text).split(",")]
    for name in names:
        if name not in WRITERS:
            raise ValueError(f"Expected writers to be none or some of {', '.join(WRITERS)}, got writers={text!r}.")
    return list(dict.fromkeys(names))


def fields_that_name(what: Literal["code", "file"]) -> list[str]:
    """Returns the fields of `RunConfig` and `Settings` whose texts may name Python code, or a file or folder.

    >>> fields_that_name("file")
    ['data', 'init_from', 'client_traces', 'faults', 'deliveries', 'folder']
    """
    fields = [*dataclasses.fields(RunConfig), *dataclasses.fields(Settings)]
    return [field.name for field in fields if field.metadata.get("names") == what]


def topology_with_seed(topology: str, seed: int) -> str:
    """Returns the text of a topology with its seed, unless it has one already or is not random.

    >>> topology_with_seed("erdos_renyi", 3), topology_with_seed("erdos_renyi(seed=1)", 3)
    ('erdos_renyi(seed=3)', 'erdos_renyi(seed=1)')
    """
    from fedsim import decentralized  # imports SciPy and networkx, which other runs need not wait for

    return seeded("topology", topology, decentralized.TOPOLOGIES, decentralized.Topology, seed)


def options_that_build(field: str) -> list[str]:
    """Returns the fields of `RunConfig` and `Settings` from which a field of an algorithm is built; none if it is not built.

    >>> options_that_build("client_optimizer")[:3], options_that_build("mu")
    (['rounds', 'client_optimizer', 'client_learning_rate'], [])
    """
    fields = [*dataclasses.fields(RunConfig), *dataclasses.fields(Settings)]
    return [option.name for option in fields if field in option.metadata["builds"]]


def options_of_samplers() -> list[str]:
    """Returns the fields of `RunConfig` that a sampler depends on, besides the data.

    >>> options_of_samplers()[:3]
    ['labels', 'algorithm', 'weighting']
    """
    return [option.name for option in dataclasses.fields(RunConfig) if option.metadata.get("of_sampler")]


def _from_json(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """Returns the `RunConfig` or the `Settings` with these values; see `RunConfig.from_json`."""
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
    if unknown:
        what = "configuration has" if cls is RunConfig else "stored settings have"
        raise ValueError(f"The {what} fields that this version of fedsim does not know: {', '.join(unknown)}.")
    return cls(**values)


def _check_choices(config: RunConfig | Settings) -> None:
    """Raises ``ValueError`` for a field whose type is a ``Literal``, text, ``bool`` or mapping, but whose value is not.

    Numbers are checked with their ranges.
    """
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        literal = next((each for each in (kind, *get_args(kind)) if get_origin(each) is Literal), None)
        if literal and isinstance(value, str):
            look_up(f"choice of {name}", value, dict.fromkeys(get_args(literal)))
        elif literal and not (value is None and literal is not kind):
            checks.one_of(*get_args(literal), **{name: value})
        elif kind is bool:
            checks.truth(**{name: value})
        elif kind is str or (kind == str | None and value is not None):
            checks.instance(str, "a name in quotes", **{name: value})
        elif get_origin(kind) is Mapping:
            checks.instance(Mapping, '{"mu": 0.1}', **{name: value})
            if wrong := [key for key, entry in value.items() if isinstance(entry, Mapping | list)]:
                raise ValueError(
                    f"Expected one value of {name}[{wrong[0]!r}], got {value[wrong[0]]!r}: give a number or a text."
                )
