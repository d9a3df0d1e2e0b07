"""The common set-up of the experiments on FEMNIST: the data, the batches and the learning rate.

It is that of S. Reddi et al., "Adaptive federated optimization", ICLR 2021, https://arxiv.org/abs/2003.00295, for EMNIST
CR: 10 writers per round, one epoch, B = 20. A perceptron with two hidden layers of 200 units replaces the convolutional
network, which takes fifty times as long on a CPU.
"""

from __future__ import annotations

from fedsim import datasets
from fedsim.data import Batches, FederatedData
from fedsim.evaluation import evaluate
from fedsim.model import Model, Params
from fedsim.reproductions._reproduction import Request

NEEDS = "FEMNIST: DIR/femnist in any form that `fedsim datasets describe emnist62` names, or a download"
BATCHES = Batches(size=20)
RATE = 0.1


def load(request: Request) -> tuple[FederatedData, FederatedData]:
    """Returns the training and test data of all available writers."""
    splits = datasets.load("emnist62", data=request.folder("femnist", "emnist62"))
    return splits.train, splits.test


def missing_writers(data: FederatedData) -> str:
    """Returns a text about missing writers, for the column with reductions; empty if all are available."""
    return f"{data.num_clients:,} of 3,400 writers" if data.num_clients < 3400 else ""


def accuracy(model: Model, params: Params, data: FederatedData) -> float:
    """Returns the accuracy over all examples."""
    return evaluate(model, params, data).overall["accuracy"]
