"""`Clients`: the clients of a round, as `fedsim.Algorithm.round` uses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedsim import primitives, rng, tree
from fedsim.aggregators import Aggregator, AuxMean, Grouped, Groups, Member, WithAux
from fedsim.attacks import Attack
from fedsim.data import Batch
from fedsim.model import ModelParts, scope_of
from fedsim.primitives import Placed, Placement
from fedsim.rounds._call import Call, check_update, send_down, send_up
from fedsim.rounds._client import Client, ClientPlan, ClientUpdate, batch_loop, client_of, client_plans, training_steps
from fedsim.rounds._plan import RoundPlan
from fedsim.rounds._staleness import Staleness
from fedsim.rounds._state import (
    FederatedAlgorithm,
    FederatedState,
    RoundInfo,
    Shared,
    State,
    first_memory,
    with_memory_of,
)

# (name, value before the first round) -> what was kept under this name: "memory" by the client, "aggregator memory" by the
# client for the aggregator, "server memory" by the server for the aggregator.
Kept = Callable[[str, Any], Any]


class Clients:
    """The clients of a round.

    `fedsim.Algorithm.round` receives it and calls `aggregate`, `map` and `map_rows` any number of times. There are two
    subclasses: one traces the work of a client (`fedsim.rounds._trace`), the other one runs one client after another in
    Python, for `fedsim.Debug`.

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
      attack: the cohort's attack.
      axis: the name of the axis of devices that run the round together; None for a single device.
    """

    # The devices that the rows of `map_rows` are divided over, in blocks of equal size; None if they are on every device.
    rows_mesh: Mesh | None = None
    # What the server kept before the round.
    before: FederatedState
    # The parts of the model before the round, () without any, and its running statistics after the round.
    parts: ModelParts | tuple[()] = ()
    new_statistics: Any = ()
    # Whether the work of a call returned the parts of the model.
    returns_parts = False

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        plan: RoundPlan,
        key: jax.Array,
        attack: Attack | None = None,
        axis: str | None = None,
    ) -> None:
        self.algorithm, self.plan, self.key, self.attack, self.axis = algorithm, plan, key, attack, axis
        # After the round: what the server keeps for aggregators and downlinks, by the call's name, and what it has sent.
        self.aggregator_states: dict[str, Any] = {}
        self.downlink_states: dict[str, Any] = {}
        self.past: Any = ()
        self.loop = batch_loop()
        self.names: list[str] = []
        self.info: RoundInfo | None = None
        self._most_up = self._most_down = 0
        self._current: Shared = ()  # what the server sends in this round, if clients may start from what it sent earlier

    @property
    def num_clients(self) -> jax.Array:
        """The number of clients in the cohort, ``int32 []``."""
        return jnp.asarray(self.plan.count, jnp.int32)

    def run_round(self, state: State) -> tuple[State, Any]:
        """Runs the algorithm's round with these clients. The server may call the model, too, whose parts are in scope."""
        with scope_of(self.parts):
            return self.algorithm.round(state, self)

    def aggregate(
        self,
        work: Callable[[Shared, Client], ClientUpdate],
        shared: Shared,
        *,
        name: str | None = None,
        aggregator: Aggregator | None = None,
        downlink: Any = None,
        trains: bool = True,
    ) -> tuple[Any, RoundInfo]:
        """Sends ``shared`` to every client, runs ``work`` on each, and aggregates the updates that they send back.

        Args:
          work: the work of one client, ``work(shared, client) -> ClientUpdate``, in plain JAX.
          shared: what the server sends, a pytree of arrays.
          name: the call's name, unique in the round. The call's random draws depend on it, and the states of the aggregator and
            the downlink are stored under it. Default: ``"update"``, then ``"update 2"`` and so on.
          aggregator: combines the updates; default: the algorithm's.
          downlink: a compressor of ``shared.params``; default: the algorithm's.
          trains: whether clients receive running statistics of the model and send what they become. False for a call without
            training, in a round that has another call with it.

        Returns:
          The aggregate, and the round's info so far.

        Raises:
          ValueError: another call of the round has this name, ``work`` returns something else than `ClientUpdate` describes, or
            the algorithm has ``staleness`` and its round has another call.
        """
        aggregator, downlink = aggregator or self.algorithm.aggregator, downlink or self.algorithm.downlink
        statistics = self._statistics if trains else ()
        aggregator = _with_aux_mean(aggregator) if statistics != () else aggregator
        call = self._begin(self._name("update", name), work, shared, aggregator, downlink, statistics)
        return self._aggregate(call, work), self.info  # type: ignore[return-value]

    def map(self, work: Callable[[Shared, Client], Any], shared: Shared, *, name: str | None = None) -> Any:
        """Returns each client's ``work(shared, client)``, leaves ``[slots, ...]`` in cohort order.

        Clients read their memory and do not change it. Attackers read poisoned batches, but what they return is not corrupted,
        and no bits are counted. Rows beyond the cohort's clients are zeros. Inside a round there may be more rows than the
        cohort has slots.

        Args:
          work: the work of one client; it returns a pytree of arrays.
          shared: what the server sends.
          name: see `aggregate`; default ``"map"``, then ``"map 2"`` and so on.

        Raises:
          ValueError: another call of the round has this name, or the algorithm has ``staleness``.
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
        shapes = [list(jnp.shape(x)) for x in jax.tree.leaves(rows)]
        lengths = {shape[0] if shape else None for shape in shapes}
        if len(lengths) != 1 or None in lengths:
            raise ValueError(
                "Expected the rows of clients.map_rows to have leaves [clients, ...], an entry for each client of the "
                f"population, got {shapes}."
            )
        call = self._begin(self._name("map", name), work, shared, None, None)
        return self._map(call._replace(rows=rows, is_divisible=divisible), work)

    @property
    def _statistics(self) -> Any:
        """The running statistics that are sent, () without any."""
        return self.parts.statistics if isinstance(self.parts, ModelParts) else ()

    def _name(self, kind: str, name: str | None) -> str:
        if name is None:
            others = sum(known == kind or known.startswith(f"{kind} ") for known in self.names)
            name = f"{kind} {others + 1}" if others else kind
        if name in self.names:
            raise ValueError(f"The round has two calls with name={name!r}: pass another name to one of them.")
        self.names.append(name)
        return name

    def _begin(
        self, name: str, work: Callable[..., Any], shared: Shared, aggregator: Aggregator | None, downlink: Any,
        statistics: Any = (),
    ) -> Call:  # fmt: skip
        key = self.key if name == "update" else rng.stream(self.key, name)
        memory = () if downlink is None else self._downlink_memory(name, downlink, shared)
        received, memory, bits_down = send_down(downlink, shared, memory, rng.round_key(key, self.plan.round, "downlink"))
        if jax.tree.leaves(memory):
            self.downlink_states[name] = memory
        most = tree.most_bits(tree.num_bits((shared, statistics)), compressed=downlink is not None)
        bits_down = tree.add_bits(bits_down, tree.num_bits(statistics), most=most)
        fold = aggregator
        if aggregator is not None and self.attack is not None:
            fold = self.attack.wrap_aggregator(aggregator, jnp.asarray(self.plan.attacker))
        key_rounds = self.plan.round
        if self.algorithm.staleness is not None:
            self._check_staleness(aggregator)
            key_rounds = self.plan.key_round
            self._current = received
            self._keep_sent(received if statistics == () else (received, statistics))
        # Keys are derived for the whole cohort at once, which takes as long as for a single client.
        keys = rng.client_keys(key, key_rounds, self.plan.client)
        clients = client_plans(self.plan, keys, self._revealed(aggregator))
        return Call(
            name=name,
            work_name=getattr(work, "__name__", "work"),
            key=key,
            shared=received,
            statistics=statistics,
            bits_down=bits_down,
            aggregator=aggregator,
            downlink=downlink,
            fold=fold,
            clients=clients,
        )

    def _revealed(self, aggregator: Aggregator | None) -> Any:
        """Returns `ClientPlan.revealed` of all clients, ``bool [slots]``."""
        if aggregator is None or (fewest := aggregator.fewest_clients) == 1:
            return ()
        num_steps = training_steps(self.algorithm.batches, jnp.asarray(self.plan.size), self.plan.most_steps)
        return jnp.full(num_steps.shape, jnp.count_nonzero(num_steps) >= fewest)

    def _check_staleness(self, aggregator: Aggregator | None) -> None:
        if aggregator is None or len(self.names) > 1:
            raise ValueError(
                f"{type(self.algorithm).__name__} cannot run with staleness, or on a virtual clock: its round has other calls "
                "of its clients than a single clients.aggregate, and clients that started in an earlier round cannot answer "
                "them. Run it without, or use another algorithm."
            )

    def _downlink_memory(self, name: str, downlink: Any, shared: Shared) -> Any:
        """Returns what the server keeps for the downlink of a call."""
        raise NotImplementedError

    def _keep_sent(self, received: Shared) -> None:
        """Stores what the server sends in this round, for clients that start from it in a later one.

        With running statistics, it is a pair of the rest and of these.
        """
        raise NotImplementedError

    def _aggregate(self, call: Call, work: Callable[..., ClientUpdate]) -> Any:
        """Runs every client and returns the aggregate; sets `info` and the aggregator's state."""
        raise NotImplementedError

    def _map(self, call: Call, work: Callable[..., Any]) -> Any:
        raise NotImplementedError

    def _conclude(self, call: Call, update: Any, folded: Any, memory: Any, entries: dict[str, Any]) -> Any:
        """Ends a call of `aggregate`.

        Args:
          call: the call.
          update: the shapes of what a client sends.
          folded: the accumulator with all updates; with several devices, those of each device.
          memory: what the server keeps for the aggregator.
          entries: what the clients add to the info, leaves ``[slots, ...]``.

        Returns:
          The aggregate.
        """
        key, fold = rng.round_key(call.key, self.plan.round, "aggregator"), call.fold
        assert fold is not None
        if self.axis is None:
            aggregate, memory = fold.finish_round(folded, memory, key)
        else:
            aggregate, memory = fold.finish_round_devices(folded, memory, key, self.axis)
        if jax.tree.leaves(memory):
            self.aggregator_states[call.name] = memory
        self.info = self._round_info(call, tree.num_bits(update), entries)
        if call.statistics == ():
            return aggregate
        aggregate, moved = _without_aux(aggregate)
        self.new_statistics = tree.add(call.statistics, moved)
        return aggregate

    def result_of(
        self, call: Call, work: Callable[..., Any], own: ClientPlan, columns: Any, kept: Kept, row: Any = None
    ) -> Any:
        """Returns the result of a client's work in a call of `map`, or of `map_rows` with a ``row``."""
        received, parts = self._received(call, own)
        client = self._client(received, parts, own, columns, kept)
        with scope_of(client.parts):
            return jax.tree.map(jnp.asarray, work(received, *(() if row is None else (row,)), client))

    def update_of(
        self, call: Call, work: Callable[..., ClientUpdate], own: ClientPlan, columns: Any, kept: Kept
    ) -> tuple[Any, dict[str, Any], Any, Any, Any]:
        """Runs a client's work in a call of `aggregate`, and sends its update.

        Args:
          call: the call.
          work: the client's work.
          own: what is known of the client.
          columns: the columns that have the client's examples.
          kept: what was kept for the client and for the aggregator.

        Returns:
          What the server receives, the entries of the info, what the client keeps for the algorithm and for the aggregator, and
          what the client sent.
        """
        assert call.aggregator is not None
        received, parts = self._received(call, own)
        client = self._client(received, parts, own, columns, kept)
        with scope_of(client.parts):
            result = work(received, client)
        check_update(call.work_name, result)
        self.returns_parts |= result.parts is not None
        if call.statistics != ():  # What is sent is the difference, which a staleness weight may scale.
            before = client.parts.statistics
            if isinstance(result.update, Member):  # They are those of each group.
                before = jax.tree.map(lambda x: x[result.update.group], before)
            moved = jax.tree.map(jnp.zeros_like, before)
            if result.parts is not None:
                moved = tree.subtract(result.parts.statistics, before)
            memory = result.memory
            if callable(memory):  # It is a function of what arrives of the algorithm's own update.
                memory = lambda arrived, of_update=memory: of_update(_without_aux(arrived)[0])  # noqa: E731
            result = result._replace(update=_with_aux(result.update, moved), memory=memory)
        of_server = kept("server memory", call.aggregator.init(jax.tree.map(jnp.zeros_like, result.update)))
        of_client = kept("aggregator memory", call.aggregator.client_memory(tree.shapes(result.update)))
        message = send_up(
            call, client, result, of_server, of_client, self.attack, own.attacker, with_norm=self.algorithm.update_norms
        )
        arrived, entries = message.update, message.entries
        if (staleness := self.algorithm.staleness) is not None:
            weight, arrived = arrived_at_server(
                staleness, arrived, entries["weight"], own.weight, own.scale, self._current, received,
                has_statistics=call.statistics != (),
            )  # fmt: skip
            entries = {**entries, "weight": weight}
        return arrived, entries, message.memory, message.aggregator_memory, result.update

    def _received(self, call: Call, own: ClientPlan) -> tuple[Shared, ModelParts | tuple[()]]:
        """Returns what a client received, in this round or when it started, and the parts of the model."""
        received, statistics = call.shared, self._statistics
        if self.algorithm.staleness is not None:
            received = self.algorithm.staleness.started(self.past, self.plan.round, own.staleness)
            if call.statistics != ():
                received, statistics = received
        return received, self.parts._replace(statistics=statistics) if isinstance(self.parts, ModelParts) else ()

    def _client(self, received: Shared, parts: ModelParts | tuple[()], own: ClientPlan, columns: Any, kept: Kept) -> Client:
        def poison(batch: Batch) -> dict[str, jax.Array]:
            assert self.attack is not None
            return tree.select(own.attacker, self.attack.poison(batch), batch.examples)

        memory, parts = with_memory_of(parts, kept("memory", first_memory(self.algorithm, received, parts)))
        return client_of(own, self.algorithm.batches, columns, self.loop, memory, poison if self.attack else None, parts)

    @primitives.without_mesh_of_context()
    def _round_info(self, call: Call, plain: int, entries: dict[str, Any]) -> RoundInfo:
        """Builds the info from the plan, the size of an update in bits, and all clients' entries ``[slots, ...]``."""
        plan, before = self.plan, self.info
        # The largest number of bits that a client may send and receive determines the dtype of these counts.
        aggregator = call.aggregator
        assert aggregator is not None
        is_own = aggregator.sends_unchanged and "bits_up" in entries  # which the algorithm has counted
        self._most_up += tree.most_bits(plain, compressed=is_own or aggregator.may_send_more)
        self._most_down += tree.most_bits(tree.num_bits((call.shared, call.statistics)), compressed=call.downlink is not None)
        num_steps = training_steps(self.algorithm.batches, jnp.asarray(plan.size), plan.most_steps)
        took_part, placement = num_steps > 0, Placement("clients", len(num_steps))
        if "bits_up" not in entries:
            sent = tree.add_bits(plain, most=plain)
            entries["bits_up"] = jnp.where(took_part, sent, jnp.zeros_like(sent))
            entries["entropy_bits_up"] = jnp.where(took_part, jnp.float32(plain), 0.0)
        entries["bits_down"] = jnp.where(took_part, call.bits_down, jnp.zeros_like(call.bits_down))
        if self.algorithm.staleness is not None:
            entries["staleness"] = jnp.where(took_part, self.plan.staleness, 0)
        if self.attack is not None:
            entries["attacker"] = jnp.asarray(plan.attacker)
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


def arrived_at_server(
    staleness: Staleness, sent: Any, weight: jax.Array, factor: jax.Array, scale: jax.Array, current: Shared, started: Shared,
    *, has_statistics: bool,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Returns the weight of an update that arrives, and what the server takes for it, see `Staleness.arrived`.

    Args:
      staleness: of the algorithm.
      sent: the update, as the client has sent it.
      weight: its weight, ``float32 []``.
      factor, scale: the factors of the weight and of the update, ``float32 []``, see `fedsim.data.Arrivals`.
      current: what the server sends in this round, without running statistics.
      started: what the client started from, without running statistics.
      has_statistics: whether the update has running statistics of the model beside it.

    >>> weight, update = arrived_at_server(
    ...     Staleness(bound=1), jnp.array([2.0, 4.0]), *map(jnp.float32, (3, 1, 0.5)), (), (), has_statistics=False)
    >>> weight.item(), update.tolist()
    (3.0, [1.0, 2.0])
    """
    weight = weight * factor
    scale = jnp.where(weight != 0, scale, 0)
    if not has_statistics:
        return weight, staleness.arrived(sent, scale, current, started)
    update, moved = _without_aux(sent)
    return weight, _with_aux(staleness.arrived(update, scale, current, started), tree.scale(moved, scale))


def _with_aux_mean(aggregator: Aggregator) -> Aggregator:
    """Returns the aggregator with the mean of the running statistics, of each group if it is of groups."""
    if isinstance(aggregator, Grouped):
        return dataclasses.replace(aggregator, inner=AuxMean(inner=aggregator.inner))
    return AuxMean(inner=aggregator)


def _with_aux(update: Any, aux: Any) -> Any:
    """Returns an update with auxiliary data; that of a group is still a `Member`."""
    return update._replace(update=WithAux(update.update, aux)) if isinstance(update, Member) else WithAux(update, aux)


def _without_aux(update: Any) -> tuple[Any, Any]:
    """Returns an update, or an aggregate, and its auxiliary data: the inverse of `_with_aux`."""
    if isinstance(update, Member):
        return update._replace(update=update.update.update), update.update.aux
    if isinstance(update, Groups):
        return update._replace(updates=update.updates.update), update.updates.aux
    return update.update, update.aux
