"""D²: a correction by the last two models and gradients, so that heterogeneous data cause no bias.

H. Tang, X. Lian, M. Yan, C. Zhang, J. Liu, "D²: decentralized training over decentralized data", ICML 2018, Algorithm 1:
https://arxiv.org/abs/1803.07068.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import tree
from fedsim.decentralized._algorithm import DecentralizedAlgorithm, NodesState
from fedsim.decentralized._mixer import Neighbours
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class D2(DecentralizedAlgorithm):
    """D²: x_i becomes sum_j W_ij (2 x_j - (the last x_j) - g_j + (the last g_j)); in the first round sum_j W_ij (x_j - g_j).

    Attributes:
      topology, weights: see `DecentralizedAlgorithm`. The mixing matrix must be symmetric with eigenvalues of at least -1/3,
        and the same in every round.
      message_loss, link_failures: must be 0, because what a node keeps is a sum over all rounds: with another matrix, the
        mean of the models would drift for ever.
      robust_mixing: must be None, for the same reason.

    Raises:
      ValueError: they are not. Before the first round: parameters are in half precision.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = D2(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5),
    ...     batches=fedsim.Batches(size=20, steps=1), topology=fedsim.decentralized.hypercube(4), weights="lazy")
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=4, seed=0).rounds(20):
    ...     state, info = algorithm.apply(state, cohort)
    >>> float(info["loss"]) < 1.2, float(info["consensus_distance"]) > 0
    (True, True)
    """

    capabilities = dataclasses.replace(DecentralizedAlgorithm.capabilities, accumulates=True)
    attackable: ClassVar[bool] = False  # What an attacker changes would stay in the sums.
    needs_all_messages: ClassVar[bool] = True
    keeps_sums: ClassVar[bool] = True

    def check_matrices(self) -> None:
        super().check_matrices()
        matrix = self.matrices[0].toarray()
        if len(self.matrices) > 1 or not np.allclose(matrix, matrix.T):
            raise ValueError(
                f"D2 needs one symmetric mixing matrix, and {self.topology.name!r} has none: use an undirected graph."
            )
        if (least := float(np.linalg.eigvalsh(matrix)[0])) < -1 / 3 - 1e-6:
            raise ValueError(
                f"D2 needs mixing weights with eigenvalues of at least -1/3, and those of {self.topology.name!r} have "
                f"{least:.4g}: use weights='lazy' (--mixing lazy)."
            )

    def node_memory(self, models: Params) -> Params:
        return jax.tree.map(jnp.zeros_like, models)

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        # The memory is the last x minus what was trained before it, so this is 2 x - (the last x) - g + (the last g).
        start = tree.add(tree.subtract(state.models, movement), state.memory)
        # The memory is a sum over all rounds, so it must not be a difference of rounded models.
        pull = neighbours.mix(start, difference=True)
        return state._replace(models=tree.add(start, pull), memory=tree.add(state.memory, pull))
