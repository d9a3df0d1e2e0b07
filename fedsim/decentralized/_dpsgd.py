"""D-PSGD, and federated averaging without a server.

X. Lian, C. Zhang, H. Zhang, C.-J. Hsieh, W. Zhang, J. Liu, "Can decentralized algorithms outperform centralized algorithms?",
NeurIPS 2017, Algorithm 1: https://arxiv.org/abs/1705.09056. `DFedAvg` has its own paper.
"""

from __future__ import annotations

import dataclasses

from fedsim import tree
from fedsim.decentralized._algorithm import DecentralizedAlgorithm, NodesState
from fedsim.decentralized._mixer import Neighbours
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DPSGD(DecentralizedAlgorithm):
    """D-PSGD: x_i becomes sum_j W_ij x_j - g_i; nodes mix the models at which they computed their gradients.

    g_i is the gradient times the rate. The paper takes one step per round (``batches=Batches(size=..., steps=1)``). With more,
    g_i is the sum of all local steps.

    Attributes:
      topology, weights: see `DecentralizedAlgorithm`.

    >>> import fedsim, jax, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = DPSGD(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5),
    ...     batches=fedsim.Batches(size=20, steps=1), topology=fedsim.decentralized.ring(4))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=4, seed=0).rounds(20):
    ...     state, info = algorithm.apply(state, cohort)
    >>> float(info["loss"]) < 1, float(info["consensus_distance"]) > 0
    (True, True)
    """

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        return state._replace(models=tree.subtract(neighbours.mix(state.models), movement))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DFedAvg(DecentralizedAlgorithm):
    """Federated averaging without a server: x_i becomes sum_j W_ij (x_j - g_j); nodes mix their models after local steps.

    T. Sun, D. Li, B. Wang, "Decentralized federated averaging", TPAMI 2022: https://arxiv.org/abs/2104.11375.

    For local momentum (DFedAvgM), give ``client_optimizer=optax.sgd(rate, momentum=...)``.

    Attributes:
      topology, weights: see `DecentralizedAlgorithm`.

    >>> import fedsim, jax, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = DFedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5),
    ...     batches=fedsim.Batches(size=20), topology=fedsim.decentralized.complete(4))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=4, seed=0).rounds(3):
    ...     state, info = algorithm.apply(state, cohort)
    >>> float(info["loss"]) < 1, float(info["consensus_distance"]) < 1e-6
    (True, True)
    """

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        return state._replace(models=neighbours.mix(tree.subtract(state.models, movement)))
