"""The two halves of a run's configuration: what changes its answer, and what changes only its speed or its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fedsim import checks
from fedsim.data import Batches
from fedsim.execution import Auto, Debug, Execution, Jit, Pmap
from fedsim.names import look_up

Value = float | int | str | bool | None

RESUME_COMMAND = "fedsim resume"


def _option(default: Any, group: str, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"group": group, "help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that a run's answer depends on. Two runs of equal `RunConfig` give the same parameters.

    The fields' help texts are those of the command line, see ``fedsim run --help``.

    Attributes:
      hyperparameters: the algorithm's own fields by name, e.g. ``{"server_learning_rate": 0.1}``; others keep their defaults.

    Raises:
      ValueError: a number out of its range.

    >>> RunConfig(rounds=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected rounds >= 1, got rounds=0: give a positive whole number.
    """

    dataset: str = _option(
        "digits",
        "data and model",
        "Name of a dataset, also 'NAME(option=value)', or FILE.py:FUNCTION; `fedsim datasets` lists them.",
    )
    data: str | None = _option(None, "data and model", "Folder with the dataset's files; default: download once.")
    model: str | None = _option(
        None, "data and model", "Name of a model, also 'NAME(option=value)', or FILE.py:FUNCTION; default: the dataset's."
    )
    algorithm: str = _option("fedavg", "algorithm", "Name of an algorithm, FILE.py:CLASS or MODULE:CLASS.")
    weighting: Literal["examples", "uniform"] = _option("examples", "algorithm", "Clients weigh by their examples, or alike.")
    nonfinite: Literal["drop", "raise"] = _option("drop", "algorithm", "What to do with a client update that is not finite.")
    aggregator: str | None = _option(
        None,
        "what is sent",
        "How updates are folded: mean, 'trimmed_mean(trim=0.1)', 'krum(attackers=2)', ...; default: the algorithm's.",
    )
    compressor: str | None = _option(None, "what is sent", "What clients' updates go through: 'eden(bits=2)', top_k, qsgd, ...")
    error_feedback: bool = _option(False, "what is sent", "What compression loses is sent the next time.")
    clip: float | None = _option(None, "what is sent", "Longest update, as a Euclidean norm; longer ones are scaled down.")
    downlink: str | None = _option(None, "what is sent", "What the server's parameters go through: a compressor.")
    attack: str | None = _option(
        None, "trouble", "What attackers do: sign_flip, 'label_flip(num_classes=10)', a_little_is_enough, ..."
    )
    attackers: float = _option(0.2, "trouble", "Fraction of the population that attacks, if there is an attack.")
    stragglers: float = _option(0.0, "trouble", "Fraction of each cohort that manages fewer epochs.")
    drop_stragglers: bool = _option(False, "trouble", "Stragglers are left out, instead of sending what they have.")
    hyperparameters: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    rounds: int = _option(100, "training", "Number of rounds.")
    clients: int = _option(10, "training", "Clients a round.")
    batch_size: int = _option(20, "training", "Examples a client step.")
    epochs: int = _option(1, "training", "A client's passes over its examples a round.")
    steps: int | None = _option(None, "training", "A client's steps a round, instead of epochs.")
    max_steps: int | None = _option(None, "training", "A client takes at most this many steps a round.")
    evaluate_every: int = _option(10, "training", "Rounds between evaluations on the test data.")
    shuffle: bool = _option(True, "training", "Clients shuffle their examples anew every epoch.")
    drop_remainder: bool = _option(False, "training", "Clients leave a last partial batch out.")
    seed: int = _option(0, "training", "Seed of all that is random.")
    client_learning_rate: float = _option(0.1, "client optimizer (SGD)", "Learning rate of clients.")
    client_momentum: float = _option(0.0, "client optimizer (SGD)", "Momentum of clients.")
    client_schedule: Literal["constant", "linear", "cosine", "exponential"] = _option(
        "constant", "client optimizer (SGD)", "How the clients' rate changes over rounds."
    )
    client_schedule_end: float = _option(
        0.0, "client optimizer (SGD)", "linear, cosine: what is left of the rate in the end, as a fraction."
    )
    client_schedule_decay: float = _option(0.1, "client optimizer (SGD)", "exponential: the rate's factor ...")
    client_schedule_every: int = _option(500, "client optimizer (SGD)", "... over this many rounds.")
    client_schedule_staircase: bool = _option(False, "client optimizer (SGD)", "exponential: in steps, not smoothly.")

    def __post_init__(self) -> None:
        counts = ("rounds", "clients", "batch_size", "epochs", "evaluate_every", "client_schedule_every")
        checks.whole(1, **{name: getattr(self, name) for name in counts})
        checks.whole(1, or_none=True, steps=self.steps, max_steps=self.max_steps)
        Batches(size=self.batch_size, epochs=self.epochs, steps=self.steps)  # It refuses both epochs and steps.
        checks.whole(0, seed=self.seed)
        rates: dict[str, Any] = {name: value for name, value in self.hyperparameters.items() if name == "server_learning_rate"}
        checks.positive(client_learning_rate=self.client_learning_rate, **rates, remedy="give a step size, e.g. 0.1")
        check_choices(self)
        checks.number(least=0, most=1, attackers=self.attackers, stragglers=self.stragglers, remedy="give a fraction")
        checks.positive(or_none=True, clip=self.clip, remedy="None does not clip")
        if self.error_feedback and not self.compressor:
            raise ValueError("Expected a compressor with error_feedback=True, got none: name one, e.g. compressor='top_k'.")
        checks.number(least=0, below=1, client_momentum=self.client_momentum, remedy="0 is plain SGD")
        checks.number(least=0, most=1, client_schedule_end=self.client_schedule_end)
        checks.positive(client_schedule_decay=self.client_schedule_decay)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunConfig:
        """The config that ``config.json`` holds; raises ``ValueError`` for a field that this version does not know."""
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"The configuration has fields that this version of fedsim does not know: {', '.join(unknown)}.")
        return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is executed and reported; it may differ between a run and its resumption.

    >>> Settings(execution="jit", lanes=2).executor()
    Jit(lanes=2, memory='auto', deterministic=False, differentiable=False)
    """

    folder: str | None = _option(None, "output", "Run folder; default: runs/DATASET-ALGORITHM-TIME.")
    checkpoint_every: int | None = _option(None, "output", "Rounds between checkpoints; default: some seconds.")
    progress: bool = _option(True, "output", "Progress bar and closing table.")
    execution: Literal["auto", "debug", "jit", "pmap"] = _option(
        "auto", "execution (speed only)", "debug: not compiled; jit: one device; pmap and auto: all devices."
    )
    devices: int | None = _option(None, "execution (speed only)", "Number of devices; default: all, on a CPU its cores.")
    lanes: int | None = _option(None, "execution (speed only)", "Clients side by side on a device; default: by the device.")
    memory: Literal["auto", "resident", "stream"] = _option(
        "auto", "execution (speed only)", "The data live on the device, or are gathered for each cohort."
    )
    deterministic: bool = _option(
        False,
        "execution (speed only)",
        "On a GPU, repeat a run bit for bit from the same seed; it takes up to 1.5 times as long.",
    )
    rounds_per_dispatch: int | None = _option(
        None, "execution (speed only)", "Rounds handed to the device at once; default: by time."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.folder == "":
            raise ValueError("Expected a name of a folder, got folder=''.")
        counts = ("checkpoint_every", "devices", "lanes", "rounds_per_dispatch")
        given = {name: getattr(self, name) for name in counts}
        checks.whole(1, or_none=True, **given, remedy="give a positive whole number, or leave it out")

    def executor(self) -> Execution:
        """The execution that these settings name.

        Raises:
          ValueError: an option that the chosen execution does not have.
        """
        if self.execution == "debug":
            if (self.devices, self.lanes, self.memory, self.deterministic) != (None, None, "auto", False):
                raise ValueError(
                    "execution='debug' has no devices, lanes, memory or deterministic to choose: leave these options out."
                )
            return Debug()
        if self.execution == "jit":
            if self.devices not in (None, 1):
                raise ValueError(f"execution='jit' runs on one device, and devices={self.devices} are asked for: use 'pmap'.")
            return Jit(lanes=self.lanes, memory=self.memory, deterministic=self.deterministic)
        kind = Auto if self.execution == "auto" else Pmap
        return kind(devices=self.devices, lanes=self.lanes, memory=self.memory, deterministic=self.deterministic)


def check_choices(config: RunConfig | Settings) -> None:
    """Raises ``ValueError`` for a field that is none of the ``Literal`` choices of its type, naming the nearest; or that is no
    truth value where it has to be one."""
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal and isinstance(value, str):
            look_up(f"choice of {name}", value, dict.fromkeys(get_args(kind)))
        elif get_origin(kind) is Literal:
            checks.one_of(*get_args(kind), **{name: value})
        elif kind is bool:
            checks.truth(**{name: value})
