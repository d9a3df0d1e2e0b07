"""Published hyperparameters: the defaults for each pair of dataset and algorithm, and their source.

They are those of S. Reddi et al., "Adaptive federated optimization", ICLR 2021, https://arxiv.org/abs/2003.00295, as their code
documents them (google-research/federated, optimization/docs/hyperparameters.md): EMNIST CR (`emnist62`) and EMNIST AE (the same
dataset with the model `emnist_autoencoder`), CIFAR-100, Shakespeare, Stack Overflow NWP and LR.

- clients per round, batch size, 1 epoch, rounds: table "Default values";
- client and server learning rates and epsilon: the tables under "Best hyperparameters", powers of ten;
- at most 1000 examples per client and round for Stack Overflow: "Task-specific hyperparameters". Here this is a number of
  steps, 63 batches of 16 or 10 batches of 100 of the shuffled examples, where they take the first 1000 examples;
- momentum 0.9 of FedAvgM: table "Configuring optimizers";
- b1 = 0.9, b2 = 0.99, and b1 = 0 for FedAdagrad: the paper (the code's document says 0.999, the Keras default).

Deviations from their code, for which these rates were tuned:

- EMNIST CR: they train on pixels as they are stored, 1 = paper; `emnist62` has inverted ones, 0 = paper, as FedJAX. Their
  autoencoder inverts, too.
- Shakespeare and Stack Overflow NWP: they weight a client by its number of tokens without padding, here by its examples. For
  the loss, see `fedsim.models.stackoverflow_lstm` and `fedsim.models.shakespeare_lstm`.
- EMNIST AE: their loss of a batch is the sum over its images of the mean over the pixels, here 20 times the mean over both.
  These are equal for a full batch of 20. Of a last batch with n images, their gradient is n / 20 of that here.
- Stack Overflow LR: their loss of a batch is the sum over its posts of the mean over the tags, here the mean over its posts of
  the sum over the tags, divided by 5. These are equal for a full batch of 100. Of a last batch with n posts, their gradient is
  n / 100 of that here.

- Adam, Yogi and Adagrad of the server: theirs are those of Keras and TensorFlow Addons, whose second moment starts at 0, with
  bias correction for Adam. Here it starts at tau² without correction, as in the paper. For their Adam, use
  ``FedAvg(server_optimizer=optax.adam(rate, 0.9, 0.999, eps=tau))``.
- CIFAR-100: their network has an L2 penalty of 1e-4 on its weights. `fedsim.models.cifar100_resnet18` has none.

FedJAX's own flags for EMNIST (experiments/fed_avg/fed_avg.EMNIST_CONV.flags) have the same clients, rounds, b1 and b2. Their
batch size (10) and learning rates differ; Reddi et al. tuned theirs, and FedJAX does not say how theirs were chosen.

FedProx was not part of that study: it has the learning rates of FedAvg and fedsim's default mu. A proximal term moves the
parameters towards its centre by the client's learning rate times its strength. Where this is 1 or more, the strength of
FedProx, FedDC, FedDyn and Ditto, and the step of adaptive FedProx's strength, is 0.1 over this default rate instead; with a
rate of your own, give a strength, too. FedSGD's learning rate, the interval between evaluations, and all numbers for other
datasets were chosen for fedsim. Those for the embedded digits reach a test accuracy of 0.95 within these rounds (300 for
FedSGD, 100 for the others) with seeds 0 and 1: they were chosen on test examples, so an honest comparison of algorithms
chooses its own rates on validation examples (``--validation``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedsim.names import parse_call

_OURS = "chosen for fedsim, not published"
_STUDIED = ("fedadagrad", "fedadam", "fedyogi", "fedavgm", "fedavg")


class _Task(NamedTuple):
    """One row of each of the tables. Learning rates and epsilons are exponents of ten, in the order of `_STUDIED`."""

    name: str
    setup: dict[str, Any]
    client: tuple[float, ...]
    server: tuple[float, ...]
    epsilon: tuple[float, ...]


def _setup(clients: int, batch_size: int, rounds: int, **others: int) -> dict[str, Any]:
    return {"rounds": rounds, "clients": clients, "batch_size": batch_size, "epochs": 1, "evaluate_every": 50} | others


_CR = _Task("EMNIST CR", _setup(10, 20, 1500), (-1.5, -1.5, -1.5, -1.5, -1), (-1, -2.5, -2.5, -0.5, 0), (-2, -4, -4))
_AE = _Task("EMNIST AE", _setup(10, 20, 3000), (1.5, 1, 1, 0.5, 1), (-1.5, -1.5, -1.5, 0, 0), (-3, -3, -3))
_CIFAR100 = _Task("CIFAR-100", _setup(10, 20, 4000), (-1, -1.5, -1.5, -1.5, -1), (-1, 0, 0, 0, 0.5), (-2, -1, -1))
_SHAKESPEARE = _Task("Shakespeare", _setup(10, 4, 1200), (0, 0, 0, 0, 0), (-0.5, -2, -2, -0.5, 0), (-1, -3, -3))
_NWP = _Task(
    "Stack Overflow NWP",
    _setup(50, 16, 1500, max_steps=63, evaluate_every=500),
    (-0.5, -0.5, -0.5, -0.5, -0.5),
    (-1.5, -2, -2, 0, 0),
    (-4, -5, -5),
)
_LR = _Task(
    "Stack Overflow LR",
    _setup(10, 100, 1500, max_steps=10, evaluate_every=500),
    (2, 2, 2, 2, 2),
    (1, -0.5, -0.5, 0, 0),
    (-2, -5, -5),
)

# By dataset, and by model where a model makes another task of the dataset.
_TASKS: dict[tuple[str, str | None], _Task] = {
    ("emnist62", None): _CR,
    ("emnist62", "emnist_autoencoder"): _AE,
    ("cifar100", None): _CIFAR100,
    ("shakespeare", None): _SHAKESPEARE,
    ("stackoverflow_word", None): _NWP,
    ("stackoverflow_tag", None): _LR,
}

_OWN_DATASETS: dict[str, dict[str, Any]] = {
    "digits": dict(rounds=100, clients=20, batch_size=10, epochs=5, client_learning_rate=0.3, evaluate_every=5),
    "stackexchange": dict(rounds=300, clients=20, batch_size=16, epochs=1, client_learning_rate=10**-0.5, evaluate_every=50),
}

_OWN_ALGORITHMS: dict[tuple[str, str], dict[str, Any]] = {
    ("emnist62", "fedsgd"): dict(batch_size=256, server_learning_rate=0.1),
    ("digits", "fedavgm"): dict(server_learning_rate=0.3, momentum=0.9),
    ("digits", "fedadagrad"): dict(server_learning_rate=0.1, tau=0.01),
    ("digits", "fedadam"): dict(server_learning_rate=0.03, tau=0.01),
    ("digits", "fedyogi"): dict(server_learning_rate=0.03, tau=0.01),
    ("digits", "scaffold"): dict(client_learning_rate=0.1),
    ("digits", "feddyn"): dict(client_learning_rate=0.1),
    ("digits", "feddc"): dict(client_learning_rate=0.1),
    ("digits", "scaffnew"): dict(client_learning_rate=0.1),
    ("digits", "fedmatch"): dict(client_learning_rate=0.01),
    ("digits", "quasiglobalmomentum"): dict(client_learning_rate=0.1),
    ("digits", "fedsgd"): dict(rounds=300, batch_size=256, epochs=1, server_learning_rate=0.5),
}

# The options that are strengths of proximal terms, with their defaults.
_PROXIMAL = {
    "fedprox": ("mu", 0.1),
    "adaptivefedprox": ("mu_step", 0.1),
    "feddc": ("alpha", 0.1),
    "feddyn": ("alpha", 0.01),
    "ditto": ("lam", 1.0),
}

_ALGORITHM_CONSTANTS: dict[str, dict[str, Any]] = {
    "fedadagrad": dict(b1=0.0),
    "fedadam": dict(b1=0.9, b2=0.99),
    "fedyogi": dict(b1=0.9, b2=0.99),
    "fedavgm": dict(momentum=0.9),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """Hyperparameters and their source.

    Attributes:
      values: a mapping of names of `RunConfig` fields, or of the algorithm's own hyperparameters, to values.
      source: the publication to cite, or a statement that the values were chosen for fedsim.
    """

    values: Mapping[str, Any]
    source: str


def published(dataset: str, algorithm: str, model: str | None = None) -> Published:
    """Returns the hyperparameters for a dataset and an algorithm, by their names. For others, the general defaults remain.

    Options in the names are ignored. The model matters only where it makes another task of the dataset.

    >>> published("emnist62()", "fedadam").source
    'Reddi et al. 2021 (EMNIST CR)'
    >>> published("emnist62", "fedadam", "emnist_autoencoder").values["rounds"]
    3000
    >>> published("digits", "my_file.py:MyAlgorithm").values["rounds"]
    100
    """
    dataset = parse_call(dataset)[0]
    model = parse_call(model)[0] if model else None
    task = _TASKS.get((dataset, model)) or _TASKS.get((dataset, None))
    values: dict[str, Any] = dict(_OWN_DATASETS.get(dataset, {}))
    if task:
        values |= task.setup | {"client_learning_rate": 10.0 ** task.client[_STUDIED.index("fedadam")]}
        like = "fedavg" if algorithm == "fedprox" else algorithm
        if like in _STUDIED:
            column = _STUDIED.index(like)
            values |= {"client_learning_rate": 10.0 ** task.client[column], "server_learning_rate": 10.0 ** task.server[column]}
            values |= {"tau": 10.0 ** task.epsilon[column]} if column < len(task.epsilon) else {}
            values |= _ALGORITHM_CONSTANTS.get(like, {})
    if algorithm == "dssgd":  # It sums the clients' changes, so this rate gives the step of their mean.
        values["server_learning_rate"] = 1 / values.get("clients", 10)
    if task is _TASKS.get((dataset, None)):  # The values are those of the dataset's own task.
        values |= _OWN_ALGORITHMS.get((dataset, algorithm), {})
    if algorithm in _PROXIMAL:
        option, strength = _PROXIMAL[algorithm]
        rate = values.get("client_learning_rate", 0.0)
        values |= {option: 0.1 / rate} if rate * strength >= 1 else {}
    return Published(values=values, source=f"Reddi et al. 2021 ({task.name})" if task and algorithm in _STUDIED else _OURS)
