"""RelaySGD: nodes of a tree relay sums of models, so that every model reaches every node once, with its full weight.

T. Vogels, L. He, A. Koloskova, T. Lin, S. P. Karimireddy, S. Stich, M. Jaggi, "RelaySum for decentralized deep learning on
heterogeneous data", NeurIPS 2021, Algorithm 1: https://arxiv.org/abs/2110.04175.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np

from fedsim import checks, tree
from fedsim.aggregators import accumulation_dtype
from fedsim.decentralized._algorithm import WITHOUT_MIXING_WEIGHTS, DecentralizedAlgorithm, NodesState
from fedsim.decentralized._mixer import Neighbours, numbered_links
from fedsim.model import Params


class Relayed(NamedTuple):
    """The last message along every edge in each direction, a sum of models, leaves ``[edges, ...]``, and how many they are.

    Sums have the dtype of the models, and at least ``float32``.
    """

    sums: Any
    counts: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RelaySGD(DecentralizedAlgorithm):
    """RelaySGD: x_i becomes the mean of its own trained model and all those that its neighbours relay.

    Node i sends to j the sum of its own trained model and of the messages that it received in the round before from its
    other neighbours, and how many models that sum has.

    Attributes:
      topology: a tree, such as `line` or `binary_tree`.
      weights: must be "auto"; there are no mixing weights.
      message_loss, link_failures: what is lost is missing in the sum and in its count.

    Raises:
      ValueError: the topology is not a tree, or mixing weights are given.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = RelaySGD(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5),
    ...     batches=fedsim.Batches(size=20, steps=1), topology=fedsim.decentralized.line(4))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=4, seed=0).rounds(5):
    ...     state, info = algorithm.apply(state, cohort)
    >>> state.memory.counts.tolist()  # of the messages 0 to 1, 1 to 0, 1 to 2, 2 to 1, 2 to 3, 3 to 2
    [1.0, 3.0, 2.0, 2.0, 3.0, 1.0]
    """

    capabilities = WITHOUT_MIXING_WEIGHTS
    attackable: ClassVar[bool] = False
    divisible: ClassVar[bool] = False  # Most of the state is messages, two for each edge, which belong to two nodes.
    default_topology: ClassVar[str] = "binary_tree"

    def check_matrices(self) -> None:
        checks.one_of("auto", weights=self.weights, remedy="RelaySGD has no mixing weights")
        checks.one_of(None, robust_mixing=self.robust_mixing, remedy="RelaySGD does not mix")
        graph = self.topology.graphs[0]
        if self.topology.period > 1 or graph.is_directed() or not nx.is_tree(graph):
            raise ValueError(
                f"RelaySGD needs a tree, and {self.topology.name!r} is none: use line, star or binary_tree, or a spanning "
                "tree, Topology([networkx.minimum_spanning_tree(graph)])."
            )

    def _edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the sender and the receiver of every message, and the message in the other direction, ``int32 [edges]``."""
        edges = sorted(self.topology.graphs[0].to_directed().edges)
        place = {edge: number for number, edge in enumerate(edges)}
        senders, receivers = np.array(edges, np.int32).reshape(-1, 2).T
        return senders, receivers, np.array([place[j, i] for i, j in edges], np.int32)

    def node_memory(self, models: Params) -> Relayed:
        edges = 2 * (self.topology.nodes - 1)
        sums = jax.tree.map(lambda x: jnp.zeros((edges, *x.shape[1:]), accumulation_dtype(x.dtype)), models)
        return Relayed(sums, jnp.zeros(edges, jnp.float32))

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        senders, receivers, back = self._edges()

        def received(messages: Any) -> Any:
            return jax.tree.map(lambda x: jax.ops.segment_sum(x, receivers, self.topology.nodes), messages)

        def sent(own: Any, messages: Any) -> Any:
            known = tree.add(own, received(messages))
            return jax.tree.map(lambda x, message: x[senders] - message[back], known, messages)

        trained = jax.tree.map(lambda x, sum: x.astype(sum.dtype), tree.subtract(state.models, movement), state.memory.sums)
        relayed = Relayed(
            sent(trained, state.memory.sums), sent(jnp.ones(self.topology.nodes, jnp.float32), state.memory.counts)
        )
        neighbours.count(tree.num_bits(relayed))
        if neighbours.message_loss is not None:  # The counts tell the receiver which models are missing in the sums.
            arrives = ~neighbours.message_loss.lost(jnp.asarray(numbered_links(senders, receivers), jnp.int32))
            relayed = jax.tree.map(lambda x: jnp.where(tree.per_row(arrives, x), x, 0), relayed)
        counts = 1 + received(relayed.counts)
        total = tree.add(trained, received(relayed.sums))
        models = jax.tree.map(
            lambda x, old: (x / tree.per_row(counts, x).astype(x.dtype)).astype(old.dtype), total, state.models
        )
        return state._replace(models=models, memory=relayed)
