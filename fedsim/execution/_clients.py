"""`Clients`: the clients of a round, as `fedsim.Algorithm.round` uses them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedsim import primitives, rng, tree
from fedsim.aggregators import Aggregator
from fedsim.attacks import Attack
from fedsim.data import Batch
from fedsim.execution._call import Call, CallShape, Rows, send_down, send_up
from fedsim.execution._client import Client, ClientPlan, ClientUpdate, batch_loop, client_of, client_plans, training_steps
from fedsim.execution._plan import RoundPlan
from fedsim.execution._state import ClientTable, FederatedAlgorithm, FederatedState, RoundInfo, Shared
from fedsim.primitives import Placed, Placement

Row = tuple[Any, dict[str, Any]]  # a client's memory, see `FederatedState.clients`

# (the call, the client, the columns with its examples, its row) -> (received update, entries of the info, new row).
Work = Callable[[Call, ClientPlan, Any, Row], tuple[Any, Any, Any]]

# If an aggregator's accumulator is at most this many times as large as an update, each of the clients that run side by side has
# an accumulator, and these are merged. Otherwise the updates are accumulated one after another.
_SMALL_ACCUMULATOR = 4


class ClientGroup(NamedTuple):
    """Clients that run together. As a value at a placement, every leaf has an axis of clients.

    Attributes:
      plan: what is known of each client.
      stored: their rows of the table of memories, a `ClientTable`, or ().
      columns: each client's own columns; None if all read ``Clients.columns``.
    """

    plan: ClientPlan
    stored: Any
    columns: Any = None


class Clients:
    """The clients of a round.

    `fedsim.Algorithm.round` receives it and calls `aggregate`, `map` and `map_rows` any number of times. Compiled rounds run
    clients by `run_together`, a program of `fedsim.primitives`. Subclasses differ in which clients they run together (`_run`).
    Only `fedsim.Debug` calls one client after another in Python.

    This example computes the mean and the variance of all clients' numbers with two calls:

    >>> import dataclasses, numpy as np, fedsim
    >>> @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    ... class Variance(fedsim.Algorithm):
    ...     def init(self, key): return {"mean": jnp.zeros(()), "variance": jnp.zeros(())}
    ...     def round(self, state, clients):
    ...         mean, _ = clients.aggregate(self.moment, {"power": jnp.float32(1), "center": jnp.zeros(())}, name="mean")
    ...         variance, info = clients.aggregate(self.moment, {"power": jnp.float32(2), "center": mean})
    ...         return {"mean": mean, "variance": variance}, info
    ...     def moment(self, shared, client):
    ...         def add(total, batch):
    ...             terms = (batch.examples["x"] - shared["center"]) ** shared["power"]
    ...             return total + jnp.sum(terms, where=batch.mask)
    ...         total = client.for_each_batch(self.batches, add, jnp.zeros(()))
    ...         size = client.num_examples.astype(jnp.float32)
    ...         return fedsim.ClientUpdate(total / size, weight=size)
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([1.0, 2.0, 6.0], np.float32)}, sizes=[2, 1])
    >>> algorithm = Variance(batches=fedsim.Batches(size=2))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> round(float(state["mean"]), 3), round(float(state["variance"]), 3)
    (3.0, 4.667)

    Args:
      algorithm: whose rounds run.
      plan: the plan of the round.
      key: the run's root key.
      state: the state before the round; the clients' memories are in ``table``.
      columns: the examples.
      table: the clients' memories, or ().
      shapes: the shapes of this round's calls, by the call's name.
      attack: the cohort's attack.
      axis: the name of the axis of devices that run the round together; None for a single device.
    """

    # The devices that the rows of `map_rows` are divided over, in blocks of equal size; None if they are on every device.
    rows_mesh: Mesh | None = None

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        plan: RoundPlan,
        key: jax.Array,
        state: FederatedState,
        columns: Any,
        table: ClientTable | tuple[()],
        shapes: dict[str, CallShape],
        attack: Attack | None = None,
        axis: str | None = None,
    ) -> None:
        self.algorithm, self.plan, self.key, self.columns, self.table = algorithm, plan, key, columns, table
        self.aggregator_states, self.downlink_states, self.past = dict(state.aggregator), dict(state.downlink), state.past
        self.shapes, self.attack, self.axis = shapes, attack, axis
        self.loop = batch_loop()
        self.names: list[str] = []
        self.info: RoundInfo | None = None
        self._most_up = self._most_down = 0
        self._current: Shared = ()  # what the server sends in this round, if clients may start from what it sent earlier

    @property
    def num_clients(self) -> jax.Array:
        """The number of clients in the cohort, ``int32 []``."""
        return jnp.sum(jnp.asarray(self.plan.length), dtype=jnp.int32)

    def aggregate(
        self,
        work: Callable[[Shared, Client], ClientUpdate],
        shared: Shared,
        *,
        name: str | None = None,
        aggregator: Aggregator | None = None,
        downlink: Any = None,
    ) -> tuple[Any, RoundInfo]:
        """Sends ``shared`` to every client, runs ``work`` on each, and aggregates the updates that they send back.

        Args:
          work: the work of one client, ``work(shared, client) -> ClientUpdate``, in plain JAX.
          shared: what the server sends, a pytree of arrays.
          name: the call's name, unique in the round. The call's random draws depend on it, and the states of the aggregator and
            the downlink are stored under it. Default: ``"update"``, then ``"update 2"`` and so on.
          aggregator: combines the updates; default: the algorithm's.
          downlink: a compressor of ``shared.params``; default: the algorithm's.

        Returns:
          The aggregate, and the round's info so far.
        """
        aggregator, downlink = aggregator or self.algorithm.aggregator, downlink or self.algorithm.downlink
        call = self._begin(self._name("update", name), work, shared, aggregator, downlink)
        update, self.info, memory = self._aggregate(call, work)
        if call.name in self.aggregator_states:
            self.aggregator_states[call.name] = memory
        return update, self.info

    def map(self, work: Callable[[Shared, Client], Any], shared: Shared, *, name: str | None = None) -> Any:
        """Returns each client's ``work(shared, client)``, leaves ``[slots, ...]`` in cohort order.

        Clients read their memory and do not change it. Attackers read poisoned batches, but what they return is not corrupted,
        and no bits are counted. Rows beyond the cohort's clients are zeros. Inside a round there may be more rows than the
        cohort has slots.

        Args:
          work: the work of one client; it returns a pytree of arrays.
          shared: what the server sends.
          name: see `aggregate`; default ``"map"``, then ``"map 2"`` and so on.
        """
        return self._map(self._begin(self._name("map", name), work, shared, None, None), work)

    def map_rows(
        self,
        work: Callable[[Shared, Any, Client], Any],
        shared: Shared,
        rows: Any,
        *,
        name: str | None = None,
        divisible: bool = True,
    ) -> Any:
        """Returns each client's ``work(shared, row, client)``, where the state has a row for every client of the population.

        In other respects it is `map`. Decentralized algorithms use it for the models of all nodes.

        If all calls of a round are ``divisible`` and the number of clients is a multiple of the number of devices, each device
        runs the clients of one block of the population. Arrays of the state with an entry per client are divided in the same
        way, so a device stores only its block. ``round`` sees whole arrays nevertheless, and XLA adds the messages between
        devices that its computations need.

        Args:
          work: the work of one client; it returns a pytree of arrays.
          shared: what all clients receive.
          rows: leaves ``[clients of the population, ...]``.
          name: see `aggregate`; default ``"map"``, then ``"map 2"`` and so on.
          divisible: whether rows may be divided over devices. False is faster where ``round`` reads entries in an order that is
            known only at run time.

        Returns:
          Leaves ``[clients of the population, ...]``, with zeros for clients that are not in the cohort.

        Raises:
          ValueError: ``rows`` has no leaves, or one that does not have an entry for every client.

        >>> import dataclasses, numpy as np, fedsim
        >>> @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
        ... class Totals(fedsim.Algorithm):
        ...     def init(self, key): return jnp.zeros(3, jnp.int32)
        ...     def round(self, state, clients):
        ...         return clients.map_rows(lambda shared, row, client: row + client.num_examples, (), state), ()
        >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(6, np.float32)}, sizes=[1, 2, 3])
        >>> algorithm = Totals(batches=fedsim.Batches(size=2))
        >>> algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["2", "0"]))[0].tolist()
        [1, 0, 3]
        """
        call = self._begin(self._name("map", name), work, shared, None, None)
        return self._map(call._replace(rows=Rows(rows), is_divisible=divisible), work)

    def _name(self, kind: str, name: str | None) -> str:
        if name is None:
            others = sum(known == kind or known.startswith(f"{kind} ") for known in self.names)
            name = f"{kind} {others + 1}" if others else kind
        if name in self.names:
            raise ValueError(f"The round has two calls with name={name!r}: pass another name to one of them.")
        self.names.append(name)
        return name

    def _begin(self, name: str, work: Callable[..., Any], shared: Shared, aggregator: Aggregator | None, downlink: Any) -> Call:
        key = self.key if name == "update" else rng.stream(self.key, name)
        received, memory, bits_down = send_down(
            downlink, shared, self.downlink_states.get(name, ()), rng.round_key(key, self.plan.round, "downlink")
        )
        if name in self.downlink_states:
            self.downlink_states[name] = memory
        fold = aggregator
        if aggregator is not None and self.attack is not None:
            fold = self.attack.wrap_aggregator(aggregator, jnp.asarray(self.plan.attacker) > 0)
        key_rounds = self.plan.round
        if self.algorithm.staleness is not None:
            self._check_staleness(aggregator)
            key_rounds = self.plan.key_round
            self._current = received
            self._keep_sent(received)
        # Keys are derived for the whole cohort at once, which takes as long as for a single client.
        clients = client_plans(self.plan, rng.client_keys(key, key_rounds, self.plan.client))
        return Call(
            name=name,
            work_name=getattr(work, "__name__", "work"),
            key=key,
            shared=received,
            bits_down=bits_down,
            aggregator=aggregator,
            fold=fold,
            aggregator_state=self.aggregator_states.get(name, ()),
            clients=clients,
        )

    def _check_staleness(self, aggregator: Aggregator | None) -> None:
        if aggregator is None or len(self.names) > 1:
            raise ValueError(
                f"{type(self.algorithm).__name__} cannot run with staleness, or on a virtual clock: its round has other calls "
                "of its clients than a single clients.aggregate, and clients that started in an earlier round cannot answer "
                "them. Run it without, or use another algorithm."
            )

    def _keep_sent(self, received: Shared) -> None:
        assert self.algorithm.staleness is not None
        self.past = self.algorithm.staleness.kept(self.past, received, self.plan.round)

    def _aggregate(self, call: Call, work: Callable[..., ClientUpdate]) -> tuple[Any, RoundInfo, Any]:
        """Returns the aggregate, the info and the aggregator's new state."""
        folded, entries = self._run(call, functools.partial(self._update, work))
        return self._conclude(call, folded, entries)

    def _map(self, call: Call, work: Callable[..., Any]) -> Any:
        return self._run(call, functools.partial(self._result, work))[1]

    def _run(self, call: Call, work: Work) -> tuple[Any, Any]:
        """Runs every client; returns the accumulated updates, one per device, and the entries ``[call.num_entries, ...]``."""
        raise NotImplementedError

    def _conclude(self, call: Call, folded: Any, entries: dict[str, Any]) -> tuple[Any, RoundInfo, Any]:
        key, fold = rng.round_key(call.key, self.plan.round, "aggregator"), call.fold
        assert fold is not None
        if self.axis is None:
            update, memory = fold.finish_round(folded, call.aggregator_state, key)
        else:
            update, memory = fold.finish_round_devices(folded, call.aggregator_state, key, self.axis)
        return update, self._round_info(call, entries), memory

    def run_together(
        self, call: Call, work: Work, clients: Placed, accumulator: Any, *, side_by_side: bool | None = None
    ) -> tuple[Any, Any, Any]:
        """Sends to some clients, runs their work, and accumulates their updates.

        Args:
          call: the call.
          work: of one client.
          clients: `ClientGroup`.
          accumulator: holds the updates of the clients before them.
          side_by_side: see `fedsim.primitives.map`.

        Returns:
          The accumulator with their updates, their entries ``[n, ...]``, and their new rows ``[n, ...]``.
        """

        def of_client(shared: Shared, client: ClientGroup) -> tuple[Any, Any, Any]:
            received, stored = call._replace(shared=shared), client.stored
            columns = self.columns if client.columns is None else client.columns
            arrived, entries, row = work(received, client.plan, columns, self._row(received, stored))
            if call.fold is not None and isinstance(stored, ClientTable):
                counts = entries["weight"] != 0
                stored = ClientTable(tree.select(counts, row, stored.rows), stored.seen | counts)
            return arrived, entries, stored

        sent = self._sent(call, clients)
        arrived, entries, rows = primitives.map(of_client, sent, clients, side_by_side=side_by_side).stacked
        if call.fold is None:
            return accumulator, entries, rows
        updates = Placed((arrived, entries["weight"], clients.stacked.plan.slot), clients.placement)
        accumulate = functools.partial(self._accumulate, call, accumulator)
        return primitives.reduce(accumulate, updates, name=type(call.fold.innermost).__name__), entries, rows

    def _sent(self, call: Call, clients: Placed) -> Placed:
        """Returns what each client received, in this round or when it started."""
        if self.algorithm.staleness is None:
            return primitives.broadcast(call.shared, clients.placement)
        return Placed(self._started(clients.stacked.plan.staleness), clients.placement)

    def _started(self, staleness: jax.Array) -> Shared:
        """Returns what clients of these stalenesses ``[n]`` received when they started, leaves ``[n, ...]``."""
        assert self.algorithm.staleness is not None
        return self.algorithm.staleness.started(self.past, self.plan.round, staleness)

    def _accumulate(self, call: Call, accumulator: Any, updates: tuple[Any, jax.Array, jax.Array]) -> Any:
        """Adds updates ``[n, ...]`` with their weights and slots to an accumulator."""
        fold, zero = call.fold, self._zero(call)
        assert fold is not None
        if len(updates[1]) == 1:
            return fold.accumulate(accumulator, *jax.tree.map(lambda x: x[0], updates))
        if tree.num_bits(zero) <= _SMALL_ACCUMULATOR * tree.num_bits(self.shapes[call.name].arrived):
            each = jax.vmap(functools.partial(fold.accumulate, zero))(*updates)
            return fold.merge(accumulator, fold.merge_stacked(each))
        return jax.lax.scan(lambda total, one: (fold.accumulate(total, *one), None), accumulator, updates)[0]

    def _zero(self, call: Call) -> Any:
        """Returns an empty accumulator for a call, on this device; () for `map`."""
        if call.fold is None:
            return ()
        arrived, slots = self.shapes[call.name].arrived, len(self.plan.client)
        return call.fold.zero_devices(arrived, slots, self.axis) if self.axis else call.fold.zero(arrived, slots)

    def client(self, call: Call, own: ClientPlan, columns: Any, row: Row) -> Client:
        """Returns the client that the work of a call gets."""

        def poison(batch: Batch) -> dict[str, jax.Array]:
            assert self.attack is not None
            return tree.select(own.attacker > 0, self.attack.poison(batch), batch.examples)

        return client_of(own, self.algorithm.batches, columns, self.loop, row[0], poison if self.attack else None)

    def _row(self, call: Call, stored: Any) -> Row:
        """Returns what a client keeps; before its first round, this is ``client_memory``."""
        start = self.algorithm.client_memory(call.shared)
        if not isinstance(stored, ClientTable):
            return start, {}
        seen, (memory, by_call) = stored.seen, stored.rows
        starts = {
            name: of.aggregator.client_memory(of.update)
            for name, of in self.shapes.items()
            if of.aggregator and name in by_call
        }
        return tree.select(seen, memory, start) if jax.tree.leaves(memory) else start, tree.select(seen, by_call, starts)

    def _result(self, work: Callable[..., Any], call: Call, own: ClientPlan, columns: Any, row: Row) -> tuple[Any, Any, Any]:
        given = (call.shared,) if call.rows is None else (call.shared, call.rows.of(own.position))
        return (), jax.tree.map(jnp.asarray, work(*given, self.client(call, own, columns, row))), ()

    def _update(
        self, work: Callable[..., ClientUpdate], call: Call, own: ClientPlan, columns: Any, row: Row
    ) -> tuple[Any, dict[str, Any], Row]:
        client, by_call = self.client(call, own, columns, row), row[1]
        result = work(call.shared, client)
        received = send_up(call, client, result, by_call.get(call.name, ()), self.attack, own.attacker > 0)
        if call.name in by_call:
            by_call = {**by_call, call.name: received.aggregator_memory}
        if (staleness := self.algorithm.staleness) is not None:
            entries = {**received.entries, "weight": received.entries["weight"] * own.weight}
            scale = jnp.where(entries["weight"] != 0, own.scale, 0)
            received = received._replace(
                update=staleness.arrived(received.update, scale, self._current, call.shared), entries=entries
            )
        return received.update, received.entries, (received.memory, by_call)

    def _count_bits(self, call: Call) -> None:
        """Adds up the largest number of bits that a client may send and receive, which determines the dtype of these counts."""
        self._most_up += tree.num_bits(self.shapes[call.name].update)
        self._most_down += tree.num_bits(call.shared)

    def _round_info(self, call: Call, entries: dict[str, Any]) -> RoundInfo:
        """Builds the info from all clients' entries ``[slots, ...]`` and from the plan, which every device has."""
        plan, before = self.plan, self.info
        self._count_bits(call)
        num_steps = training_steps(self.algorithm.batches, jnp.asarray(plan.size), plan.most_steps)
        took_part, placement = num_steps > 0, Placement("clients", len(num_steps))
        if "bits_up" not in entries:
            plain = tree.num_bits(self.shapes[call.name].update)
            sent = tree.add_bits(plain, most=plain)
            entries["bits_up"] = jnp.where(took_part, sent, jnp.zeros_like(sent))
            entries["entropy_bits_up"] = jnp.where(took_part, jnp.float32(plain), 0.0)
        entries["bits_down"] = jnp.where(took_part, call.bits_down, jnp.zeros_like(call.bits_down))
        if self.algorithm.staleness is not None:
            entries["staleness"] = jnp.where(took_part, self.plan.staleness, 0)
        if self.attack is not None:
            entries["attacker"] = jnp.asarray(plan.attacker) > 0
        for name, most in (("bits_up", self._most_up), ("bits_down", self._most_down), ("entropy_bits_up", 0)):
            earlier = [before.clients[name]] if before else []
            entries[name] = tree.add_bits(*earlier, entries[name], most=most)
        # Each client's own numbers, see `fedsim.audit`.
        dropped = Placed(entries["dropped"], placement) > 0
        if before:
            dropped = dropped | Placed(before.clients["dropped"], placement)
        return RoundInfo(
            clients=entries | {"num_examples": jnp.asarray(plan.size), "num_steps": num_steps, "dropped": dropped.stacked},
            num_dropped=primitives.count(dropped),
            num_aggregated=primitives.count(Placed(entries["weight"], placement)),
            num_clients=self.num_clients,
            num_population=jnp.asarray(plan.population[0]),
            population_examples=jnp.asarray(plan.population[1]),
        )
