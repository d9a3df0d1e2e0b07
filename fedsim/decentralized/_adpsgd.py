"""AD-PSGD: nodes that finish at different times average with one neighbour each, without waiting for anyone.

X. Lian, W. Zhang, C. Zhang, J. Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018, Algorithm 1:
https://arxiv.org/abs/1710.06952.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng, tree
from fedsim.data import Batches, Cohort, FederatedData
from fedsim.decentralized._algorithm import WITHOUT_MIXING_WEIGHTS, DecentralizedAlgorithm, NodesState, consensus_distance
from fedsim.model import Params
from fedsim.rounds import Clients
from fedsim.systems import Constant, Devices


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ADPSGD(DecentralizedAlgorithm):
    """AD-PSGD: a node that has computed g_i averages its model with a random neighbour's, subtracts g_i, and starts again.

    g_i is the gradient times the rate at the model that the node had when it started; since then, neighbours may have averaged
    with it. ``state.memory`` holds those models. The nodes of a round's cohort finish one after another, in its order;
    `FinishingNodes` samples them by their speed.

    Attributes:
      topology: undirected.
      weights: must be "auto": a node and its neighbour keep the mean of both models.
      message_loss, link_failures: if one of the two messages of an averaging is lost, or its link fails, both nodes keep their
        models.

    Raises:
      ValueError: the topology is directed or differs between rounds, or one of the other fields is given.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = ADPSGD(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5),
    ...     batches=fedsim.Batches(size=20, steps=1), topology=fedsim.decentralized.ring(4))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.decentralized.FinishingNodes(data, algorithm.batches, per_round=4).rounds(20):
    ...     state, info = algorithm.apply(state, cohort)
    >>> float(info["loss"]) < 1, cohort.measures
    (True, {'simulated_seconds': 20.0})
    """

    capabilities = WITHOUT_MIXING_WEIGHTS
    attackable: ClassVar[bool] = False
    divisible: ClassVar[bool] = False  # Which nodes average is known only at run time, one pair after another.

    def check_matrices(self) -> None:
        checks.one_of("auto", weights=self.weights, remedy="ADPSGD has no mixing weights")
        checks.one_of(None, robust_mixing=self.robust_mixing, remedy="ADPSGD does not mix")
        if self.topology.is_directed or self.topology.period > 1:
            raise ValueError(
                f"ADPSGD needs one undirected graph, and {self.topology.name!r} is not one: use ring, for example."
            )

    def sampler(self, data: FederatedData, clients: int, devices: Devices | None = None, seed: Any = 0) -> FinishingNodes:
        """Returns the nodes that finish next, up to ``clients`` in a round."""
        return FinishingNodes(data, self.batches, devices, per_round=clients, seed=seed)

    def node_memory(self, models: Params) -> Params:
        return models

    def training_models(self, state: NodesState) -> Params:
        return state.memory

    def round(self, state: NodesState, clients: Clients) -> tuple[NodesState, Any]:
        trained = self.train_nodes(state, clients)
        graph = self.topology.graphs[0]
        # A node with itself, if there is only one.
        neighbours = [sorted(set(graph[node]) - {node}) or [node] for node in range(self.topology.nodes)]
        table = np.zeros((len(neighbours), max(map(len, neighbours))), np.int32)
        for node, own in enumerate(neighbours):
            table[node, : len(own)] = own
        degrees = np.array(list(map(len, neighbours)), np.int32)
        key, loss_key = (rng.round_key(clients.key, state.round, purpose) for purpose in ("exchange", "losses"))
        succeeds = (1 - self.message_loss) ** 2 * (1 - self.link_failures)
        averaged = jax.random.uniform(loss_key, jnp.shape(clients.plan.client), jnp.float32) < succeeds

        def finish(slot: jax.Array, models_and_memory: tuple[Params, Params]) -> tuple[Params, Params]:
            models, memory = models_and_memory
            node = jnp.asarray(clients.plan.client)[slot]
            place = jax.random.randint(jax.random.fold_in(key, slot), (), 0, jnp.asarray(degrees)[node], jnp.int32)
            other = jnp.asarray(table)[node, place]
            other = jnp.where(averaged[slot], other, node)
            mean = jax.tree.map(lambda x: (x[node] + x[other]) / 2, models)
            own = jax.tree.map(lambda x, move: x - move[node], mean, trained.movement)
            models = jax.tree.map(lambda x, a, b: x.at[other].set(a).at[node].set(b), models, mean, own)
            return models, jax.tree.map(lambda x, a: x.at[node].set(a), memory, own)

        models, memory = jax.lax.fori_loop(0, clients.num_clients, finish, (state.models, state.memory))
        size = tree.num_bits(state.models) / self.topology.nodes
        new = NodesState(models, memory, state.round + 1, trained.personal, trained.statistics, trained.training)
        return new, {
            **trained.info,
            "consensus_distance": consensus_distance(models),
            "bits_up": 2 * size * clients.num_clients.astype(jnp.float32),
        }


class FinishingNodes:
    """Samples the nodes that finish their work next, each of which starts again at once.

    Args:
      data: the population.
      batches: how many steps a node's work has.
      devices: how fast nodes are, and when they are online; None: one second per step. Messages take no time.
      per_round: the most nodes in a cohort. A node that finishes twice begins another cohort, so there may be fewer.
      seed: the seed, or root key, of the speeds and of the run.

    Raises:
      ValueError: ``per_round`` is below 1, no node takes a step, messages of ``devices`` take time, or steps take none; or,
        when a cohort is drawn, all nodes have gone offline for good.

    >>> import numpy as np
    >>> data = FederatedData.from_arrays({"x": np.zeros(6)}, sizes=[1, 2, 3])
    >>> nodes = FinishingNodes(data, Batches(size=1), per_round=1)
    >>> [nodes.cohort(round).clients.tolist() for round in range(6)]
    [[0], [0], [1], [0], [2], [0]]
    """

    def __init__(
        self, data: FederatedData, batches: Batches, devices: Devices | None = None, per_round: int = 1, seed: Any = 0
    ) -> None:
        checks.whole(1, per_round=per_round)
        checks.instance(Batches, "fedsim.Batches(size=20)", batches=batches)
        checks.instance(Devices, "fedsim.systems.Devices(seconds_per_step=1.0)", or_none=True, devices=devices)
        if not batches.num_steps(data.sizes).any():
            raise ValueError(
                "No node takes a step, so none would ever finish: give data with examples; with drop_remainder=True, also "
                "batches that are no larger than a node's data."
            )
        self.data, self.clients, self.key = data, min(per_round, data.num_clients), rng.root(seed)
        self.batches, self.devices = batches, devices or Devices()
        self._drawn = self.devices.draw(data.client_ids, self.key)
        for name, free in {"latency": 0.0, "download_rate": math.inf, "upload_rate": math.inf}.items():
            values = getattr(self._drawn, name)
            if (values != free).any():
                node = int((values != free).argmax())
                raise ValueError(
                    "Expected devices whose messages take no time, because FinishingNodes does not know their size, got "
                    f"{name}={values[node]:g} of node {node}: leave it out, and add the time of messages to seconds_per_step."
                )
        if (instant := (data.sizes > 0) & (self._drawn.seconds_per_step == 0)).any():
            raise ValueError(
                f"Expected devices whose steps take time, got seconds_per_step=0 of node {int(instant.argmax())}: it would "
                "finish before any other node in every round; give a number above 0."
            )
        if self.devices.variation == Constant(0.0):
            raise ValueError(
                "Expected devices whose steps take time, got variation=0, by which their time is multiplied: one node would "
                "finish before any other in every round; leave it out for no variation."
            )
        self._cohorts: list[tuple[list[int], float]] = []
        self._events = self._finish()

    def cohort(self, round: int) -> Cohort:
        """Returns the nodes that finish in a round, and the time of the last one as ``simulated_seconds``."""
        while len(self._cohorts) <= round:
            following = next(self._events, None)
            if following is None:
                raise ValueError(
                    f"The run cannot go on after {len(self._cohorts)} rounds, because all nodes have gone offline for good in "
                    "their work: give fewer rounds, or traces with a period."
                )
            self._cohorts.append(following)
        nodes, time = self._cohorts[round]
        measures = {"simulated_seconds": time}
        return Cohort(self.data, np.array(nodes), round, self.key, slots=self.clients, measures=measures)

    def rounds(self, stop: int, start: int = 0) -> Iterator[Cohort]:
        """Returns the cohorts of rounds ``start`` to ``stop - 1``."""
        return (self.cohort(r) for r in range(start, stop))

    def _finish(self) -> Iterator[tuple[list[int], float]]:
        drawn, steps = self._drawn, self.batches.num_steps(self.data.sizes)
        events: list[tuple[float, int]] = []
        nodes: list[int] = []
        number, last = 0, 0.0

        def start(node: int, now: float) -> None:
            nonlocal number
            seconds = float(drawn.seconds_per_step[node]) * int(steps[node]) * drawn.variation[number]
            heapq.heappush(events, (drawn.advance(node, now, seconds), node))
            number += 1

        for node in np.flatnonzero(steps).tolist():
            start(node, 0.0)
        while True:
            now, node = heapq.heappop(events)
            if node in nodes or len(nodes) == self.clients or (nodes and math.isinf(now)):
                yield nodes, last
                nodes = []
            if math.isinf(now):
                return
            nodes, last = [*nodes, node], now
            start(node, now)
