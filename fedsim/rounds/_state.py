"""The interface of algorithms, the state between rounds, and the information about a round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedsim import primitives, tree
from fedsim.aggregators import Aggregator
from fedsim.data import Batches, FederatedData
from fedsim.model import ModelParts, scope_of
from fedsim.rounds._staleness import Staleness

# Pytrees of arrays: the state of the server, or a `FederatedState`; and what the server sends to clients.
State = Any
Shared = Any


class FederatedAlgorithm(Protocol):
    """The interface that execution uses. `fedsim.Algorithm` implements it.

    >>> import fedsim
    >>> algorithm = fedsim.algorithms.Histogram(bins=2)
    >>> all(hasattr(algorithm, name) for name in vars(FederatedAlgorithm) if not name.startswith("_"))
    True
    """

    @property
    def batches(self) -> Batches:
        """How a client cuts its examples into batches, and how many steps it takes."""
        ...

    @property
    def aggregator(self) -> Aggregator:
        """Combines the updates, unless a call of the clients names another aggregator."""
        ...

    @property
    def downlink(self) -> Any:
        """Compresses what clients receive; None sends it as it is."""
        ...

    @property
    def capabilities(self) -> Any:
        """See `fedsim.Capabilities`."""
        ...

    @property
    def averaging(self) -> float | None:
        """The decay of the average of the server's parameters; None computes no average."""
        ...

    @property
    def staleness(self) -> Staleness | None:
        """Lets clients start from what the server sent in earlier rounds; None if all start from this round's."""
        ...

    @property
    def nonfinite(self) -> Literal["drop", "raise"]:
        """What happens to an update with a NaN or an infinity: it is left out, or an error is raised."""
        ...

    @property
    def update_norms(self) -> bool:
        """Whether the info has the norm of each client's update."""
        ...

    @property
    def has_memory(self) -> bool:
        """Whether clients, the aggregator or the downlink may keep a memory between rounds."""
        ...

    def init(self, key: jax.Array) -> State:
        """Returns the server's state before the first round."""
        ...

    def model_parts(self, key: jax.Array) -> ModelParts | tuple[()]:
        """Returns the parts of the model that are not among the algorithm's parameters; () if there are none."""
        ...

    def check(self, data: FederatedData) -> None:
        """Raises ``ValueError`` if the algorithm cannot read ``data``."""
        ...

    def client_memory(self, shared: Shared) -> Any:
        """Returns the memory of a client before its first round, () without one."""
        ...

    def round(self, state: State, clients: Any) -> tuple[State, Any]:
        """Runs one round with its `Clients`; returns the server's state after it, and the info."""
        ...


class Average(NamedTuple):
    """An exponential moving average of parameters, and the total ``weight`` of its terms, ``float32 []``, which tends to 1.

    >>> before = Average(params=jax.numpy.float32(0), weight=jax.numpy.float32(0))
    >>> new_average(0.5, before, jax.numpy.float32(4))  # of a single term
    Average(params=Array(4., dtype=float32), weight=Array(0.5, dtype=float32))
    """

    params: Any
    weight: Any


class ClientTable(NamedTuple):
    """Clients' memories on the device: ``rows``, leaves ``[n, ...]``, and ``seen``, ``bool [n]``: which rows were written.

    >>> table = ClientTable(rows={"w": jax.numpy.ones([3, 2])}, seen=jax.numpy.array([True, False, False]))
    >>> jax.tree.map(lambda x: x[0].tolist(), table)  # the row of one client
    ClientTable(rows={'w': [1.0, 1.0]}, seen=True)
    """

    rows: Any
    seen: Any


class FederatedState(NamedTuple):
    """The state of an algorithm that has more than a server state, such as clients' memories.

    Attributes:
      server: the server's state, which ``init`` and ``server_update`` return. The algorithm's methods get only this.
      clients: the memories of all clients, a `fedsim.data.ClientRows` on the host or a `ClientTable` on the device. A client's
        row is a pair: its ``ClientUpdate.memory``, and a dict from the name of an ``aggregate`` call to the client's memory
        for the aggregator of that call.
      aggregator: a dict from the name of an ``aggregate`` call to the state of its aggregator.
      downlink: a dict from the name of an ``aggregate`` call to the state of its downlink compressor.
      average: the `Average` of the server's parameters, if the algorithm has ``averaging``.
      past: what the server sent in the last rounds, leaves ``[bound + 1, ...]``, if the algorithm has ``staleness``.
      parts: the other parts of the model, `fedsim.model.ModelParts`, if it has some. What a client keeps for the algorithm is
        then a pair, with the parts that it keeps.

    >>> from fedsim.algorithms import ServerState
    >>> server = ServerState(params={"w": 3.0}, opt_state=(), round=0)
    >>> FederatedState(server).params, FederatedState(server, average=Average({"w": 2.0}, weight=0.5)).params
    ({'w': 3.0}, {'w': 2.0})
    """

    server: State
    clients: Any = ()
    aggregator: Mapping[str, Any] = {}
    downlink: Mapping[str, Any] = {}
    average: Any = ()
    past: Any = ()
    parts: Any = ()

    @property
    def params(self) -> Any:
        """The average of the server's parameters if there is one, else the server's parameters, with all parts of the model."""
        params = (self.average or self.server).params
        return params if self.parts == () else self.parts.join(params)


class RoundInfo(NamedTuple):
    """Information about one round, for plots and for ``server_update``. Arrays stay on the device until they are read.

    If a round calls ``clients.aggregate`` more than once, bits and dropped clients add up over the calls.

    Attributes:
      clients: arrays ``[slots]`` in cohort order; rows beyond ``num_clients`` are zeros:

        - ``num_examples``, ``num_steps``: ``int32``.
        - ``weight``: ``float32``, 0 for a client that does not count.
        - ``dropped``: ``bool``, whether the update was not finite.
        - ``bits_up``, ``bits_down``: the exact size of what the client sent and received, ``uint32``; rounded ``float32`` where
          a message may exceed 2**32 bits before compression.
        - ``entropy_bits_up``: ``float32``, the estimated size of what the client sent, if it were entropy coded.
        - ``attacker``: ``bool``, only in a cohort under attack.
        - ``staleness``: ``int32``, how many rounds ago the client started, only for an algorithm with ``staleness``.
        - ``update_norm``: ``float32``, the norm of the update before compression and clipping, 0 for one that does not count,
          only for an algorithm with ``update_norms``.
        - everything in the algorithm's ``ClientUpdate.info``.

      num_dropped: ``int32 []``, clients whose update held a NaN or an infinity and did not reach the server.
      num_aggregated: ``int32 []``, clients whose update counts. If it is 0, the round leaves the state unchanged,
        unless the aggregator acts nevertheless, see `fedsim.aggregators.Aggregator.acts_on`.
      num_clients: ``int32 []``, clients of the cohort.
      num_population: ``int32 []``, clients of the population that have examples.
      population_examples: ``int32 []``, examples of the population.
    """

    clients: Mapping[str, jax.Array]
    num_dropped: jax.Array
    num_aggregated: jax.Array
    num_clients: jax.Array
    num_population: jax.Array
    population_examples: jax.Array

    @primitives.without_mesh_of_context()
    def total(self, name: str) -> jax.Array:
        """Returns the sum over the cohort of an entry of ``clients``, for ``server_update``.

        It is a reduction of `fedsim.primitives`, so `fedsim.audit` knows that the server reads no value of a single client.
        Counts of bits are added as ``float32``, because their sum may exceed 32 bits.

        Raises:
          ValueError: the info is that of several rounds, from ``apply_rounds``.

        >>> counts = {"weight": jax.numpy.array([3.0, 1.0])}
        >>> float(RoundInfo(counts, *[jax.numpy.int32(0)] * 5).total("weight"))
        4.0
        """
        if jnp.ndim(self.num_clients):
            raise ValueError(
                f"Expected the info of one round, got that of {len(self.num_clients)}: take a round out of it, for example by "
                "jax.tree.map(lambda x: x[0], info)."
            )
        values = self.clients[name]
        if jnp.issubdtype(values.dtype, jnp.unsignedinteger):
            values = values.astype(jnp.float32)
        return primitives.sum(primitives.Placed(values, primitives.Placement("clients", len(values))))


def server_state(state: State) -> State:
    """Returns the server's state of a state, which may be the whole state.

    >>> server_state({"w": 1.0}), server_state(FederatedState({"w": 1.0}))
    ({'w': 1.0}, {'w': 1.0})
    """
    return parts_of(state).server


def parts_of(state: State) -> FederatedState:
    """Returns a state as a `FederatedState`, also if it is only a server's state.

    >>> parts_of({"w": 1.0}).server, parts_of({"w": 1.0}).clients
    ({'w': 1.0}, ())
    """
    return state if isinstance(state, FederatedState) else FederatedState(state)


def first_memory(algorithm: Any, shared: Shared, parts: Any) -> Any:
    """Returns what a client keeps before its first round: the algorithm's ``client_memory``; with parts of the model that it
    keeps, a pair of the two.

    >>> import fedsim
    >>> first_memory(fedsim.algorithms.Histogram(bins=2, batches=Batches(size=1)), (), ())
    ()
    """
    with scope_of(parts):
        memory = algorithm.client_memory(shared)
    return (memory, parts.of_client) if isinstance(parts, ModelParts) and jax.tree.leaves(parts.of_client) else memory


def with_memory_of(parts: Any, kept: Any) -> tuple[Any, Any]:
    """Returns the algorithm's memory, and the parts of the model, from what a client keeps, see `first_memory`.

    >>> with_memory_of((), 3)
    (3, ())
    """
    if not isinstance(parts, ModelParts) or not jax.tree.leaves(parts.of_client):
        return kept, parts
    memory, own = kept
    return memory, parts.with_client(own)


def with_params(state: Any, params: Any) -> Any:
    """Returns a named tuple or dataclass with other ``params``; for anything without ``params``, these alone.

    >>> with_params(Average({"w": 1.0}, weight=0.5), {"w": 2.0}), with_params({"w": 1.0}, {"w": 2.0})
    (Average(params={'w': 2.0}, weight=0.5), {'w': 2.0})
    """
    if not hasattr(state, "params"):
        return params
    return (getattr(state, "_replace", None) or functools.partial(dataclasses.replace, state))(params=params)


def new_average(decay: float | None, average: Any, params: Any) -> Any:
    """Updates a debiased moving average: ``decay`` of the old one and ``1 - decay`` of ``params``, over the sum of weights."""
    if decay is None:
        return average
    weight = decay * average.weight + (1 - decay)
    step = tree.scale(tree.subtract(params, average.params), (1 - decay) / weight)
    return Average(tree.add(average.params, step), weight)
