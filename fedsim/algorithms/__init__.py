"""Federated algorithms, one a file."""

import difflib

from fedsim.algorithm import Algorithm
from fedsim.algorithms._fedavg import FedAvg as FedAvg
from fedsim.algorithms._fedavgm import FedAvgM as FedAvgM
from fedsim.algorithms._fedopt import AdaptiveFedAvg as AdaptiveFedAvg
from fedsim.algorithms._fedopt import FedAdagrad as FedAdagrad
from fedsim.algorithms._fedopt import FedAdam as FedAdam
from fedsim.algorithms._fedopt import FedYogi as FedYogi
from fedsim.algorithms._fedprox import FedProx as FedProx
from fedsim.algorithms._fedsgd import FedSGD as FedSGD
from fedsim.algorithms._gradient_server import GradientServer as GradientServer
from fedsim.algorithms._gradient_server import ServerState as ServerState

ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.__name__.lower(): cls for cls in (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi, FedProx, FedSGD)
}


def get(name: str) -> type[Algorithm]:
    """The algorithm class of a name.

    Raises:
      ValueError: unknown; the nearest names are given.

    >>> get("fedprox").__name__
    'FedProx'
    >>> get("fedporx")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Unknown algorithm 'fedporx'. Did you mean 'fedprox'? All: fedadagrad, fedadam, fedavg, fedavgm, ...
    """
    if name.lower() in ALGORITHMS:
        return ALGORITHMS[name.lower()]
    near = difflib.get_close_matches(name.lower(), ALGORITHMS, n=2)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"Unknown algorithm {name!r}.{hint} All: {', '.join(sorted(ALGORITHMS))}.")
