"""Quasi-global momentum: momentum along the differences of the mixed models, which heterogeneous data disturb less.

T. Lin, S. P. Karimireddy, S. Stich, M. Jaggi, "Quasi-global momentum: accelerating decentralized deep learning on heterogeneous
data", ICML 2021, Algorithm 1: https://arxiv.org/abs/2102.04761. Deviation: the momentum is kept times the learning rate, so it
differs from the paper's if the rate changes over the rounds.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.decentralized._algorithm import DecentralizedAlgorithm, NodesState
from fedsim.decentralized._mixer import Neighbours
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QuasiGlobalMomentum(DecentralizedAlgorithm):
    """Quasi-global momentum: x_i becomes sum_j W_ij (x_j - g_j - momentum m_j).

    m_i becomes momentum m_i + (1 - momentum) (x_i - the new x_i), and starts with 0.

    Attributes:
      momentum: in [0, 1).
      topology, weights: see `DecentralizedAlgorithm`.

    Raises:
      ValueError: ``momentum`` is not in ``[0, 1)``.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = QuasiGlobalMomentum(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5),
    ...     batches=fedsim.Batches(size=20, steps=1), topology=fedsim.decentralized.ring(4))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=4, seed=0).rounds(20):
    ...     state, info = algorithm.apply(state, cohort)
    >>> float(info["loss"]) < 1, float(info["consensus_distance"]) > 0
    (True, True)
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, below=1, momentum=self.momentum)

    def node_memory(self, models: Params) -> Params:
        return jax.tree.map(jnp.zeros_like, models)

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        step = tree.add(movement, tree.scale(state.memory, self.momentum))
        models = neighbours.mix(tree.subtract(state.models, step))
        moved = tree.scale(tree.subtract(state.models, models), 1 - self.momentum)
        return state._replace(models=models, memory=tree.add(tree.scale(state.memory, self.momentum), moved))
