"""What the experiments on FEMNIST share: the writers' data, the network, and FedAvg's set-up.

The set-up is that of S. Reddi et al., "Adaptive federated optimization", ICLR 2021, https://arxiv.org/abs/2003.00295, for
EMNIST CR: 10 writers a round, one epoch, B = 20; with a perceptron of two hidden layers of 200 in place of the convolutional
network, which takes fifty times as long on a CPU.
"""

from __future__ import annotations

from fedsim import datasets
from fedsim.data import Batches, FederatedData
from fedsim.evaluation import evaluate
from fedsim.experiment.reproductions._reproduction import Request
from fedsim.model import Model, Params

NEEDS = "FEMNIST: DIR/femnist in any form that `fedsim datasets describe emnist62` names, or a download"
BATCHES = Batches(size=20)
RATE = 0.1


def load(request: Request) -> tuple[FederatedData, FederatedData]:
    """Train and test of the writers that there are."""
    splits = datasets.load("emnist62", data=request.folder("femnist", "emnist62"))
    return splits.train, splits.test


def which(data: FederatedData) -> str:
    """What is less than all of FEMNIST in ``data``, in words; empty: nothing."""
    return f"{data.num_clients:,} of 3,400 writers" if data.num_clients < 3400 else ""


def accuracy(model: Model, params: Params, data: FederatedData) -> float:
    """Over all examples."""
    return evaluate(model, params, data).overall["accuracy"]
