"""Published set-ups: what each pair of dataset and algorithm is trained with unless told otherwise, and who says so.

EMNIST-62 ("EMNIST CR") follows S. Reddi et al., "Adaptive federated optimization", ICLR 2021,
https://arxiv.org/abs/2003.00295, as their code documents it (google-research/federated, optimization/docs/hyperparameters.md):

- 10 clients a round, batches of 20, 1 epoch, 1500 rounds, the CNN (tables "Default values" and "EMNIST CR");
- client and server learning rates and epsilon: the tables under "Best hyperparameters", powers of ten;
- momentum 0.9 of FedAvgM: table "Configuring optimizers";
- b1 = 0.9, b2 = 0.99, and b1 = 0 for FedAdagrad: the paper (the code's document says 0.999, the Keras default).

FedJAX's own flags for the same task (experiments/fed_avg/fed_avg.EMNIST_CONV.flags) agree on clients, rounds, b1 and b2.
They differ in batch size (10) and rates, which Reddi et al. tuned and FedJAX did not say how.

FedProx was not part of that study: it gets FedAvg's rates and this package's mu. FedSGD's rate, the interval between
evaluations, and all numbers for the embedded digits, are our own choice: with them digits reach a test accuracy of 0.95
within these rounds (300 for FedSGD, 100 for the others) on seeds 0 and 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedsim.names import parse_call

_REDDI = "Reddi et al. 2021 (EMNIST CR)"
_OURS = "our own choice, nobody's published numbers"

_DATASETS: dict[str, dict[str, Any]] = {
    "emnist62": dict(rounds=1500, clients=10, batch_size=20, epochs=1, client_learning_rate=10**-1.5, evaluate_every=50),
    "digits": dict(rounds=100, clients=20, batch_size=10, epochs=5, client_learning_rate=0.3, evaluate_every=5),
}

_ALGORITHMS: dict[tuple[str, str], dict[str, Any]] = {
    ("emnist62", "fedavg"): dict(client_learning_rate=10**-1, server_learning_rate=1.0),
    ("emnist62", "fedprox"): dict(client_learning_rate=10**-1, server_learning_rate=1.0),
    ("emnist62", "fedavgm"): dict(server_learning_rate=10**-0.5, momentum=0.9),
    ("emnist62", "fedadagrad"): dict(server_learning_rate=10**-1, tau=10**-2, b1=0.0),
    ("emnist62", "fedadam"): dict(server_learning_rate=10**-2.5, tau=10**-4, b1=0.9, b2=0.99),
    ("emnist62", "fedyogi"): dict(server_learning_rate=10**-2.5, tau=10**-4, b1=0.9, b2=0.99),
    ("emnist62", "fedsgd"): dict(batch_size=256, server_learning_rate=0.1),
    ("digits", "fedavgm"): dict(server_learning_rate=0.3, momentum=0.9),
    ("digits", "fedadagrad"): dict(server_learning_rate=0.1, tau=0.01),
    ("digits", "fedadam"): dict(server_learning_rate=0.03, tau=0.01),
    ("digits", "fedyogi"): dict(server_learning_rate=0.03, tau=0.01),
    ("digits", "fedsgd"): dict(rounds=300, batch_size=256, epochs=1, server_learning_rate=0.5),
}

_STUDIED = {"fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A set-up and where it comes from.

    Attributes:
      values: names of `RunConfig` fields, or of the algorithm's own hyperparameters, to values.
      source: whom to cite, or that there is nobody to.
    """

    values: Mapping[str, Any]
    source: str


def published(dataset: str, algorithm: str) -> Published:
    """The set-up of a dataset and an algorithm, by name; options make no difference; the unknown is left to general defaults.

    >>> published("emnist62()", "fedadam").source
    'Reddi et al. 2021 (EMNIST CR)'
    >>> published("digits", "my_file.py:MyAlgorithm").values["rounds"]
    100
    """
    dataset, _ = parse_call(dataset)  # options do not matter here
    values = _DATASETS.get(dataset, {}) | _ALGORITHMS.get((dataset, algorithm), {})
    return Published(values=values, source=_REDDI if dataset == "emnist62" and algorithm in _STUDIED else _OURS)
