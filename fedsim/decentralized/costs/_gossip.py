"""Exchange between the neighbours of a topology."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import maximum_bipartite_matching

from fedsim import checks
from fedsim.decentralized._mixing import Weights
from fedsim.decentralized._topology import Topology
from fedsim.decentralized.costs._exchange import NODES, Cost, Exchange, send


@dataclasses.dataclass(frozen=True)
class Gossip(Exchange):
    """Every node sends its vector to its neighbours and mixes: k times its degree per node, k times the edges in total.

    An undirected edge is a message in each direction. With d the largest number of messages that a node sends or receives, the
    exchange takes d rounds, because the edges of a bipartite graph, here of senders and receivers, can be divided into d
    matchings (D. Kőnig, 1916). The program gives what `Topology.matrices` gives to the vectors, up to rounding.

    Attributes:
      topology: the neighbours.
      weights: the mixing weights, see `Topology.matrices`.
      round: which graph of the topology's period, modulo the period.
      workers: the number of nodes.

    Raises:
      ValueError: ``round`` is negative, or the weights do not fit the topology.

    >>> from fedsim.decentralized import one_peer_exponential, star
    >>> Gossip(star(8)).cost(100)
    Cost(worker=2800, busiest=5600, total=5600, rounds=7, longest=2800)
    >>> Gossip(one_peer_exponential(8), round=2).cost(100)
    Cost(worker=400, busiest=800, total=3200, rounds=1, longest=400)
    """

    topology: Topology
    weights: str | Weights | Sequence[sp.csr_array] = "auto"
    round: int = 0
    workers: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        checks.instance(Topology, "fedsim.decentralized.ring(8)", topology=self.topology)
        checks.whole(0, round=self.round)
        object.__setattr__(self, "workers", self.topology.nodes)
        _ = self._matrix  # Raises if the weights do not fit.

    def cost_of(self, values: int, message: Callable[[int], int]) -> Cost:
        edges, size = _edges_of(self._matrix), message(values)
        sent, received = edges.sum(axis=0), edges.sum(axis=1)
        rounds = int(max(sent.max(), received.max()))
        return Cost(int(sent.max()) * size, int((sent + received).max()) * size, int(edges.sum()) * size, rounds, rounds * size)

    def exchange(self, x: jax.Array) -> jax.Array:
        matrix, node = self._matrix.toarray(), jax.lax.axis_index(NODES)
        mixed = jnp.asarray(matrix.diagonal(), x.dtype)[node] * x
        for pairs in _matchings(_edges_of(self._matrix).toarray()):
            weights = np.zeros(self.workers)
            for source, target in pairs:
                weights[target] = matrix[target, source]
            mixed = mixed + jnp.asarray(weights, x.dtype)[node] * send(x, pairs)
        return mixed

    @functools.cached_property
    def _matrix(self) -> sp.csr_array:
        return self.topology.matrices(self.weights)[self.round % self.topology.period]


def _edges_of(matrix: sp.csr_array) -> sp.csr_array:
    """Returns 1 where the node of the row takes the value of another node, that of the column, ``int64 [nodes, nodes]``."""
    return sp.csr_array((matrix - sp.diags_array(matrix.diagonal())) != 0).astype(np.int64)


def _matchings(edges: np.ndarray) -> list[list[tuple[int, int]]]:
    """Divides messages into as few rounds as possible, in which every node sends at most one and receives at most one.

    >>> _matchings(np.array([[0, 1, 1], [1, 0, 0], [1, 0, 0]]))  # star of 3: (source, target)
    [[(1, 0), (0, 1)], [(2, 0), (0, 2)]]
    """
    # Unreal messages are added, so that all nodes send and receive equally many: then a perfect matching exists in every round.
    unreal = np.zeros_like(edges)
    missing = [max(edges.sum(axis=0).max(), edges.sum(axis=1).max()) - edges.sum(axis=axis) for axis in (1, 0)]
    rounds = int(missing[0][0] + edges[0].sum())
    for target, source in itertools.product(range(len(edges)), repeat=2):
        unreal[target, source] = count = min(missing[0][target], missing[1][source])
        missing[0][target] -= count
        missing[1][source] -= count
    left, matchings = edges.copy(), []
    for _ in range(rounds):
        sources = maximum_bipartite_matching(sp.csr_array(left + unreal), perm_type="column")
        real = [(int(source), target) for target, source in enumerate(sources) if left[target, source]]
        for target, source in enumerate(sources):
            (left if left[target, source] else unreal)[target, source] -= 1
        matchings.append(real)
    return matchings
