"""Stochastic gradient push: training over directed graphs, whose mixing matrices are only column-stochastic.

M. Assran, N. Loizou, N. Ballas, M. Rabbat, "Stochastic gradient push for distributed deep learning", ICML 2019, Algorithm 1:
https://arxiv.org/abs/1811.10792.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import tree
from fedsim.aggregators import accumulation_dtype
from fedsim.decentralized._algorithm import DecentralizedAlgorithm, NodesState
from fedsim.decentralized._mixer import Neighbours
from fedsim.decentralized._mixing import Matrix, Weights
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StochasticGradientPush(DecentralizedAlgorithm):
    """Stochastic gradient push: x_i becomes sum_j P_ij (x_j - g_j), and w_i becomes sum_j P_ij w_j.

    Gradients are computed at x_i / w_i. The columns of P sum to 1, so the sum over nodes is kept, and x_i / w_i tends to the
    mean. ``state.models`` are the x_i, and ``state.memory`` the w_i, which start with 1.

    Attributes:
      topology, weights: see `DecentralizedAlgorithm`.
      message_loss, link_failures: the sender keeps what is lost, so that the sums of the x_i and of the w_i do not change.

    Raises:
      ValueError: the columns of the mixing matrices do not sum to 1.

    >>> import fedsim, optax, networkx as nx
    >>> graph = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = StochasticGradientPush(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5),
    ...     batches=fedsim.Batches(size=20, steps=1), topology=fedsim.decentralized.Topology([graph]))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=4, seed=0).rounds(5):
    ...     state, info = algorithm.apply(state, cohort)
    >>> state.memory.shape, round(float(state.memory.sum()), 5)  # w_i differ, and keep their sum
    ((4,), 4.0)
    """

    attackable: ClassVar[bool] = False  # A changed weight w_i would be an attack of its own.
    # Otherwise the w_i would shrink with every lost message, and steps of x_i / w_i would grow.
    lost_stays_with_sender: ClassVar[bool] = True
    keeps_sums: ClassVar[bool] = True

    weights: str | Weights | Sequence[Matrix] = "column_stochastic"

    def check_matrices(self) -> None:
        for matrix in self.matrices:
            if not np.allclose(matrix.sum(axis=0), 1):
                raise ValueError(
                    "StochasticGradientPush needs mixing matrices whose columns sum to 1: use weights='column_stochastic' "
                    "(--mixing column_stochastic)."
                )

    def node_memory(self, models: Params) -> jax.Array:
        return jnp.ones(self.topology.nodes, jnp.float32)

    def node_models(self, state: NodesState) -> Params:
        def debiased(x: jax.Array) -> jax.Array:
            wide = accumulation_dtype(x.dtype)
            return (x.astype(wide) / tree.per_row(state.memory, x).astype(wide)).astype(x.dtype)

        return jax.tree.map(debiased, state.models)

    def mix_statistics(self, state: NodesState, statistics: Any, neighbours: Neighbours) -> Any:
        # The weights w_i are sent with the models, so their bits count there.
        weighted = jax.tree.map(lambda x: x * tree.per_row(state.memory, x).astype(x.dtype), statistics)
        bits = tree.num_bits(statistics) / self.topology.nodes
        sums, weights = neighbours.mix((weighted, state.memory), bits, trusted=True)
        return jax.tree.map(lambda x: x / tree.per_row(weights, x).astype(x.dtype), sums)

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        return state._replace(models=neighbours.mix(tree.subtract(state.models, movement)), memory=neighbours.mix(state.memory))
