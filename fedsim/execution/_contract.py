"""What execution asks of an algorithm, and what it gives back: the vocabulary of one round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedsim.aggregators import Aggregator
from fedsim.data import Batch, Batches, FederatedData

if TYPE_CHECKING:
    from typing import Literal

State = Any
Shared = Any
ClientState = Any


class Client(NamedTuple):
    """What a client knows of itself.

    Attributes:
      position: where it is in the population, ``int32 []``.
      num_examples: ``int32 []``.
      num_steps: batches that it will train on this round, ``int32 []``.
      key: its own PRNG key of this round.
      memory: what it kept from its last round, or what ``client_memory`` says that it starts with.
    """

    position: jax.Array
    num_examples: jax.Array
    num_steps: jax.Array
    key: jax.Array
    memory: Any = ()


class ClientUpdate(NamedTuple):
    """What a client sends back.

    Attributes:
      update: a pytree of arrays, folded by the aggregator.
      weight: ``float32 []``, its share in the aggregate. 0: as if it had not taken part.
      info: name to scalar or small array, reported per client in the round's info, whose own names (see `RoundInfo`) it leaves
        alone. Where the aggregator sends updates as they are, it may hold ``bits_up`` and ``entropy_bits_up``, both or neither.
      memory: what the client keeps for its next round, in the shape of ``client_memory``, unless ``client_sent`` makes that of
        what arrived of the update. If the update does not count (no step, not finite, weight 0), it keeps what it had.
    """

    update: Any
    weight: jax.Array
    info: Mapping[str, jax.Array] = {}
    memory: Any = ()


class Average(NamedTuple):
    """An exponential moving average of parameters, and the total weight of what is in it, ``float32 []``, 1 in the end."""

    params: Any
    weight: Any


class Remembered(NamedTuple):
    """The state of an algorithm of which more than the server's state lives from round to round.

    Attributes:
      server: what ``init`` gave and ``server_update`` gives: hooks see nothing else.
      clients: what clients keep, `fedsim.data.ClientRows`, or a `ClientTable` on the device.
      aggregator: what the server keeps for the aggregator.
      downlink: what the server keeps for the compressor of what it sends.
      average: the `Average` of the server's parameters, if the algorithm asks for one (``averaging``).

    Of a round of several phases each has its own: ``aggregator``, ``downlink`` and a client's row are then tuples, one entry a
    phase, and a row's entries say themselves whether they were ever written.
    """

    server: State
    clients: Any = ()
    aggregator: Any = ()
    downlink: Any = ()
    average: Any = ()

    @property
    def params(self) -> Any:
        """The server's parameters, if it has any, or their average, if there is one."""
        return (self.average or self.server).params


class ClientTable(NamedTuple):
    """What clients keep, on the device: ``rows``, leaves ``[n, ...]``, and who was ever written, ``seen``, ``bool [n]``."""

    rows: Any
    seen: Any


class Turnout(NamedTuple):
    """Who came, of whom: what the server may know of a round beside the aggregate.

    Attributes:
      num_clients: clients whose update counts, ``int32 []``.
      weight: the sum of their weights, ``float32 []``.
      population: clients that have examples, ``int32 []``.
      examples: how many the whole population has, ``int32 []``.
    """

    num_clients: jax.Array
    weight: jax.Array
    population: jax.Array
    examples: jax.Array


class RoundInfo(NamedTuple):
    """What people plot of one round; it never feeds back. Arrays stay on the device until asked for.

    Attributes:
      clients: per client, in cohort order ``[slots]``: ``num_examples int32``, ``num_steps int32``, ``weight float32`` (0 if it
        did not count), ``dropped bool`` (its update was not finite), ``bits_up uint32`` and ``bits_down uint32`` (exact sizes
        of what it sent and got; ``float32``, rounded, where that is 2**32 bits or more before compression, as the 134 million
        floats of a large model are), ``entropy_bits_up float32`` (an estimate for what it sent, had it been entropy coded), and
        all that the algorithm's `ClientUpdate.info` holds. In a cohort under attack also ``attacker bool``.
        The rows of a cohort that has fewer clients than slots come first, ``[:num_clients]``; the others are 0.
      num_dropped: ``int32 []``, clients whose update held a NaN or an infinity and was left out.
      num_aggregated: ``int32 []``, clients whose update counts; when it is 0 the state stays as it was.
      num_clients: ``int32 []``, clients of the cohort.
    """

    clients: Mapping[str, jax.Array]
    num_dropped: jax.Array
    num_aggregated: jax.Array
    num_clients: jax.Array


class FederatedProgram(Protocol):
    """The three parts of a round that an executor runs: all pure, all traceable. `fedsim.Algorithm` is one."""

    @property
    def batches(self) -> Batches: ...
    @property
    def aggregator(self) -> Aggregator: ...
    @property
    def nonfinite(self) -> Literal["drop", "raise"]: ...
    @property
    def preview(self) -> Batches | None: ...
    @property
    def phases(self) -> tuple[FederatedProgram, ...]: ...
    @property
    def downlink(self) -> Any: ...
    @property
    def averaging(self) -> float | None: ...

    def check(self, data: FederatedData) -> None: ...
    def broadcast(self, state: State) -> Shared: ...
    def client_memory(self, shared: Shared) -> Any: ...
    def client_init(self, shared: Shared, client: Client) -> ClientState: ...
    def client_preview(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState: ...
    def client_begin(self, shared: Shared, state: ClientState, client: Client) -> ClientState: ...
    def client_step(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState: ...
    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate: ...
    def client_sent(self, result: ClientUpdate, client: Client, arrived: Any) -> Any: ...
    def server_update(self, state: State, update: Any) -> State: ...
    def server_round(self, state: State, update: Any, turnout: Turnout) -> State: ...


def update_shape(program: FederatedProgram, shared: Shared) -> Any:
    """A client's update after it got ``shared`` (arrays or ``jax.ShapeDtypeStruct``), as ``jax.ShapeDtypeStruct``."""

    def final(shared: Shared) -> Any:
        number = jnp.int32(0)
        client = Client(number, number, number, jax.random.key(0), program.client_memory(shared))
        return program.client_final(shared, program.client_init(shared, client), client).update

    return jax.eval_shape(final, shared)
