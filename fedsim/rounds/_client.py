"""`Client`: one client of a round, which loops over its batches, and `ClientUpdate`: what it sends back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from fedsim import rng
from fedsim.data import Batch, Batches
from fedsim.primitives import bounded_loop
from fedsim.rounds._plan import RoundPlan

T = TypeVar("T")

Step = Callable[[T, Batch], T]
# (batches, purpose, number of steps, the batch of a step, the step, initial state) -> the state after the last step.
RunLoop = Callable[[Batches, str | None, jax.Array, Callable[[jax.Array], Batch], Step, Any], Any]


class ClientUpdate(NamedTuple):
    """What a client's work returns.

    Attributes:
      update: a pytree of arrays, which the client sends to the server.
      weight: ``float32 []``, the client's weight in the aggregate. With weight 0 the update does not count.
      info: named scalars or small arrays that are reported per client in `RoundInfo.clients`.
      memory: what the client keeps for its next round, in the structure of ``client_memory``. It may be a function that
        computes this from the update as the server received it (after compression, say). None keeps the old memory. The old
        memory is also kept if the update does not count: the client took no step, its update is not finite or its weight is 0.
      parts: the parts of the model after training, see `Client.parts`. None leaves them as they are.

    >>> ClientUpdate(update={"w": jnp.ones(2)}, weight=jnp.float32(20), info={"loss": jnp.float32(0.5)}).memory is None
    True
    """

    update: Any
    weight: jax.Array
    info: Mapping[str, jax.Array] = {}
    memory: Any = None
    parts: Any = None


class ClientPlan(NamedTuple):
    """What is known of a client before its work in a call.

    Attributes:
      slot: the client's index in the cohort, ``int32 []``, as are the next five, and ``staleness``.
      position: the client's index in the population.
      start: the client's first row in the columns.
      size: its number of examples.
      most_steps: the most steps of a training loop; a straggler has fewer than it would need.
      memory: its row in the table of memories.
      attacker: whether it is an attacker, ``bool []``.
      staleness: how many rounds ago the client's model was sent.
      weight, scale: the factors of its weight and of its update, ``float32 []``.
      revealed: whether enough clients take a step for the server to see their sum, ``bool []``; () if it sees single updates.
      key: the client's PRNG key of this call.
      streams: the words that key the shuffle, ``uint32 [2]``, and the key of the steps; both are for training.

    A plan of several clients has leaves ``[clients, ...]``, as `fedsim.place_clients` stacks them:

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(6, np.float32)}, sizes=[1, 2, 3])
    >>> plan = fedsim.place_clients(fedsim.Cohort.of(data, ["2", "0"])).stacked
    >>> plan.slot.tolist(), plan.position.tolist(), plan.size.tolist()
    ([0, 1], [2, 0], [3, 1])
    """

    slot: jax.Array
    position: jax.Array
    start: jax.Array
    size: jax.Array
    most_steps: jax.Array
    memory: jax.Array
    attacker: jax.Array
    staleness: jax.Array
    weight: jax.Array
    scale: jax.Array
    revealed: Any
    key: jax.Array
    streams: tuple[jax.Array, jax.Array]

    def keeps(self, weight: jax.Array) -> jax.Array:
        """Returns whether the client keeps what its work returned: only if its weight is not 0, and the sum is revealed."""
        counts = weight != 0
        return counts if isinstance(self.revealed, tuple) else counts & self.revealed


class BatchReader(NamedTuple):
    """A client's examples and how loops read them.

    Attributes:
      columns: feature name to array ``[rows, ...]`` that holds the examples of many clients, each client's in adjacent rows.
      start: the client's first row, ``int32 []``.
      streams: the words that key the shuffle, ``uint32 [2]``, and the key of the steps; both are for training.
      most_steps: the most steps of a training loop, ``int32 []``; a straggler has fewer than it would need.
      loop: runs a loop.
      poison: maps a batch to the examples that are used in its place; None uses the batch as it is.
      first_step: the number of the first batch that a training loop reads, ``int32 []``, see `Client.continued`; None for 0.
    """

    columns: Mapping[str, jax.Array]
    start: jax.Array
    streams: tuple[jax.Array, jax.Array]
    most_steps: jax.Array
    loop: RunLoop
    poison: Callable[[Batch], dict[str, jax.Array]] | None = None
    first_step: jax.Array | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Client:
    """One client in one round.

    Attributes:
      position: the client's index in the population, ``int32 []``.
      slot: the client's index in the cohort, ``int32 []``.
      num_examples: ``int32 []``.
      num_steps: how many steps a loop over the algorithm's ``batches`` takes this round, ``int32 []``.
      key: the client's PRNG key of this round.
      memory: what the client kept last, in an earlier round or an earlier call of this round; in its first round, what
        ``client_memory`` returns.
      arrival_weight: the factor of its weight in the aggregate, ``float32 []``, see `fedsim.data.Arrivals`; 1 without arrivals.
        What an algorithm keeps as the sum of its clients' memories remains so if a memory changes by this times the update.
        Such an algorithm declares ``repeatable=False`` in `fedsim.Capabilities`; then it is at most 1.
      parts: the parts of the model that are not among the algorithm's parameters, `ModelParts`; () if there are none.
    """

    position: jax.Array
    slot: jax.Array
    num_examples: jax.Array
    num_steps: jax.Array
    key: jax.Array
    memory: Any = ()
    arrival_weight: jax.Array
    parts: Any = ()
    reader: BatchReader = dataclasses.field(repr=False)

    def for_each_batch(self, batches: Batches, step: Step, state: T, purpose: str | None = None) -> T:
        """Runs ``state = step(state, batch)`` for every batch of the client's examples.

        A client may run any number of loops, in any order. Rows of a batch where ``batch.mask`` is False are padding and must
        not affect the result.

        Args:
          batches: how the examples are cut into batches, and the number of steps.
          step: takes a state and a `Batch` and returns the next state, of the same structure, shapes and dtypes.
          state: the state before the first step, a pytree of arrays.
          purpose: None means training: batches are shuffled by the client's key of this round, and a straggler stops early. A
            loop with a name gets its own shuffle and step keys, and always takes all of its steps.

        Returns:
          The state after the last step.

        >>> import numpy as np, fedsim
        >>> data = fedsim.FederatedData.from_arrays({"x": np.array([1.0, 2.0, 6.0], np.float32)}, sizes=[2, 1])
        >>> def total(shared, client):
        ...     def step(so_far, batch): return so_far + jnp.sum(batch.examples["x"], where=batch.mask)
        ...     return client.for_each_batch(fedsim.Batches(size=5), step, shared)
        >>> fedsim.map_clients(total, jnp.zeros(()), fedsim.Cohort.of(data, ["0", "1"])).tolist()
        [3.0, 6.0]
        """
        state = jax.tree.map(jnp.asarray, state)
        reader, num_steps = self.reader, jnp.asarray(batches.num_steps(self.num_examples), jnp.int32)
        first: jax.Array | None = None
        if purpose is None:
            (words, step_key), first = reader.streams, reader.first_step
            num_steps = jnp.minimum(num_steps, reader.most_steps)
        else:
            words, step_key = streams(rng.stream(self.key, purpose))

        def batch_at(t: jax.Array) -> Batch:
            index, mask = batches.indices(words, self.num_examples, t if first is None else first + t)
            # The start of an empty client at the end of the population is one beyond the last row.
            rows = jnp.minimum(reader.start + index, len(next(iter(reader.columns.values()))) - 1)
            columns = {name: column.at[rows].get(mode="promise_in_bounds") for name, column in reader.columns.items()}
            batch = Batch(columns, mask, jax.random.fold_in(step_key, t), t)
            return batch._replace(examples=reader.poison(batch)) if reader.poison else batch

        return reader.loop(batches, purpose, num_steps, batch_at, step, state)

    @property
    def order(self) -> jax.Array:
        """The words that key the shuffle of the training loops, ``uint32 [2]``, see `continued`."""
        return self.reader.streams[0]

    def continued(self, order: jax.Array, first_step: jax.Array, most_steps: jax.Array | None = None) -> Client:
        """Returns the client with training loops that read its batches in the order of another round, from a later one on.

        So a client with ``Batches(steps=...)`` reads all of its examples before it reads one again, over several rounds or
        calls, if it keeps the order of its first round and the number of its steps so far. The keys of steps are still those of
        this round.

        Args:
          order: `order` of that round, ``uint32 [2]``.
          first_step: the number of the first batch that is read, ``int32 []``. Above 0, batches must have ``steps``, because
            passes over the examples would end too early.
          most_steps: the most steps of a training loop, ``int32 []``; None for as many as usual.

        >>> import numpy as np, fedsim
        >>> data = fedsim.FederatedData.from_arrays({"x": np.arange(6, dtype=np.float32)}, sizes=[6])
        >>> def total(shared, client):
        ...     def step(so_far, batch): return so_far + jnp.sum(batch.examples["x"])
        ...     parts = [client.continued(client.order, jnp.int32(first)) for first in (0, 2)]
        ...     return sum(part.for_each_batch(fedsim.Batches(size=1, steps=n), step, 0.0) for part, n in zip(parts, (2, 4)))
        >>> fedsim.map_clients(total, (), fedsim.Cohort.of(data, ["0"])).tolist()  # 0 + 1 + ... + 5
        [15.0]
        """
        reader = self.reader._replace(streams=(order, self.reader.streams[1]), first_step=first_step)
        if most_steps is not None:
            reader = reader._replace(most_steps=jnp.minimum(reader.most_steps, most_steps))
        return dataclasses.replace(self, reader=reader)


def client_plans(plan: RoundPlan, keys: jax.Array, revealed: Any = ()) -> ClientPlan:
    """Returns what is known of the clients of a round, leaves ``[slots, ...]``, with these keys ``[slots]``."""
    return ClientPlan(
        slot=jnp.arange(len(keys), dtype=jnp.int32),
        position=jnp.asarray(plan.client),
        start=jnp.asarray(plan.start),
        size=jnp.asarray(plan.size),
        most_steps=jnp.asarray(plan.most_steps),
        memory=jnp.asarray(plan.memory),
        attacker=jnp.asarray(plan.attacker),
        staleness=jnp.asarray(plan.staleness),
        weight=jnp.asarray(plan.weight),
        scale=jnp.asarray(plan.scale),
        revealed=revealed,
        key=keys,
        streams=jax.vmap(streams)(keys),
    )


def client_of(
    own: ClientPlan,
    batches: Batches,
    columns: Mapping[str, jax.Array],
    loop: RunLoop,
    memory: Any = (),
    poison: Any = None,
    parts: Any = (),
) -> Client:
    """Returns the client that its work gets.

    Args:
      own: what is known of the client.
      batches: what its ``num_steps`` counts.
      columns, loop, poison: see `BatchReader`.
      memory: what the client kept last.
      parts: see `Client`.
    """
    return Client(
        position=own.position,
        slot=own.slot,
        num_examples=own.size,
        num_steps=training_steps(batches, own.size, own.most_steps),
        key=own.key,
        memory=memory,
        arrival_weight=own.weight,
        parts=parts,
        reader=BatchReader(columns, own.start, own.streams, own.most_steps, loop, poison),
    )


def training_steps(batches: Batches, sizes: jax.Array, most_steps: jax.Array) -> jax.Array:
    """Returns the number of steps of each client's training loops, ``int32``.

    Args:
      batches: how the examples are cut into batches.
      sizes: numbers of examples, ``int32 [...]``.
      most_steps: the most steps of these clients, ``int32 [...]``; a straggler has fewer than its examples need.

    >>> training_steps(Batches(size=10), jnp.array([25, 100]), jnp.array([9, 4])).tolist()
    [3, 4]
    """
    return jnp.minimum(jnp.asarray(batches.num_steps(sizes), jnp.int32), most_steps)


def streams(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Derives the words that key the shuffle, ``uint32 [2]``, and the key of the steps; step t gets ``fold_in(step_key, t)``.

    A loop over other examples than a client's, such as the server's own, reads its batches with them:

    >>> words, step_key = streams(jax.random.key(0))
    >>> index, mask = Batches(size=3).indices(words, jnp.int32(3), jnp.int32(0))  # of 3 examples, at step 0
    >>> sorted(index.tolist()), mask.tolist()
    ([0, 1, 2], [True, True, True])
    """
    return rng.words(rng.stream(key, "shuffle")), rng.stream(key, "step")


def batch_loop(most_examples: int | None = None) -> RunLoop:
    """Returns the compiled loop over batches, see `fedsim.primitives.bounded_loop`.

    Args:
      most_examples: the most examples of a client, which bound its number of steps in reverse mode; None without reverse mode.

    >>> loop = batch_loop(most_examples=4)
    >>> def power(x):  # the number of the step is the batch
    ...     return loop(Batches(size=1), None, jnp.int32(3), lambda t: t, lambda state, batch: state * x, jnp.float32(1))
    >>> power(2.0).item(), jax.grad(power)(2.0).item()
    (8.0, 12.0)
    """

    def loop(
        batches: Batches,
        purpose: str | None,
        num_steps: jax.Array,
        batch_at: Callable[[jax.Array], Batch],
        step: Step,
        state: T,
    ) -> T:
        # With ``drop_remainder``, a client may have too few examples for a single step.
        most_steps = None if most_examples is None else max(1, int(batches.num_steps(most_examples)))
        return bounded_loop(num_steps, lambda t, state: step(state, batch_at(t)), state, most_steps=most_steps)

    return loop
