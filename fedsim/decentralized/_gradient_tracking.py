"""Gradient tracking: every node also estimates the mean gradient of all nodes, so that heterogeneous data cause no bias.

P. Di Lorenzo, G. Scutari, "NEXT: in-network nonconvex optimization", IEEE TSIPN 2016; A. Nedić, A. Olshevsky, W. Shi,
"Achieving geometric convergence for distributed optimization over time-varying graphs", SIAM J. Optim. 2017:
https://arxiv.org/abs/1607.03218. With lost messages (AB, or push-pull): R. Xin, U. A. Khan, "A linear algorithm for
optimization over directed graphs with geometric convergence", IEEE Control Systems Letters 2018:
https://arxiv.org/abs/1803.02503.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.decentralized._algorithm import DecentralizedAlgorithm, NodesState
from fedsim.decentralized._mixer import Neighbours
from fedsim.model import Params


class Tracked(NamedTuple):
    """The nodes' estimates of the mean movement, and their own last movements; leaves ``[nodes, ...]``."""

    mean: Params
    last: Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GradientTracking(DecentralizedAlgorithm):
    """Gradient tracking: y_i becomes sum_j W_ij y_j + g_i - (the last g_i), and x_i becomes sum_j W_ij (x_j - y_j).

    y_i is the node's estimate of the mean of all g_i, the gradients times the rate, and starts with g_i.

    Attributes:
      topology, weights: see `DecentralizedAlgorithm`.
      message_loss, link_failures: in place of a lost model, the receiver uses its own; the sender keeps what is lost of its
        y_i, so that their sum stays that of the g_i. This is the AB algorithm on random graphs.
      robust_mixing: must be None, because a robust mean would change the sum of the y_i for ever.

    Raises:
      ValueError: ``robust_mixing`` is given. Before the first round: parameters are in half precision.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = GradientTracking(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5),
    ...     batches=fedsim.Batches(size=20, steps=1), topology=fedsim.decentralized.ring(4))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=4, seed=0).rounds(5):
    ...     state, info = algorithm.apply(state, cohort)
    >>> mean, last = (jax.tree.map(lambda x: x.mean(axis=0), each) for each in state.memory)
    >>> max(jax.tree.leaves(jax.tree.map(lambda x, y: float(abs(x - y).max()), mean, last))) < 1e-6  # y_i track the mean
    True
    """

    capabilities = dataclasses.replace(DecentralizedAlgorithm.capabilities, accumulates=True)
    attackable: ClassVar[bool] = False  # What an attacker changes would stay in the sums.
    keeps_sums: ClassVar[bool] = True

    def node_memory(self, models: Params) -> Tracked:
        zeros = jax.tree.map(jnp.zeros_like, models)
        return Tracked(zeros, zeros)

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        # The sum of the y_i must stay that of the g_i, also if messages are lost.
        mean = tree.add(neighbours.mix(state.memory.mean, keeps_sum=True), tree.subtract(movement, state.memory.last))
        return state._replace(models=neighbours.mix(tree.subtract(state.models, mean)), memory=Tracked(mean, movement))
