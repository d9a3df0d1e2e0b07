"""`run_round`, whose clients the caller runs, and `federated_round`, a round as a program of `fedsim.primitives`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import primitives, rng
from fedsim.data import ClientRows, Cohort
from fedsim.execution import _memory
from fedsim.execution._device_round import put_rows, rows_of
from fedsim.execution._execution import Jit, check_cohorts
from fedsim.execution._layout import Layout, plan_round
from fedsim.execution._traced_rounds import traced_rounds
from fedsim.primitives import Placed, Placement
from fedsim.rounds import (
    ClientTable,
    FederatedAlgorithm,
    FederatedState,
    Operands,
    RoundInfo,
    RoundPlan,
    RoundProgram,
    State,
    TracedCall,
    TraceOptions,
    parts_of,
)

# ``(shared, client) -> result``, in JAX: what one client computes from what all get and from what only this client has.
ClientWork = Callable[[Any, Any], Any]


def run_round(
    algorithm: FederatedAlgorithm,
    state: State,
    cohort: Cohort,
    run_clients: Callable[[ClientWork, Any, Sequence[Any]], Sequence[Any]],
) -> tuple[State, RoundInfo]:
    """Runs a round whose clients run where the caller wants: in a process pool, on a network, on other devices.

    It is what `fedsim.execution.Execution.run_one` of a new way of running needs. The server's part of the round runs here, and
    ``run_clients`` is called once for each call of the clients. The result is that of `fedsim.Jit`, up to the order of sums.

    Args:
      algorithm: whose round it is; it must not override ``apply``.
      state: the state before the round.
      cohort: the clients.
      run_clients: ``(work, shared, clients) -> results``, where ``results[i]`` is ``work(shared, clients[i])``. ``work`` is a
        function that `jax.jit` and `jax.export` accept. ``shared``, clients and results are pytrees of arrays, not of keys. All
        clients have the same structure and shapes: examples are padded to those of the largest client.

    Returns:
      The state after the round, and its info.

    Raises:
      ValueError: the algorithm cannot run on these clients.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits(clients=5)").train
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    >>> state, cohort = algorithm.init(jax.random.key(0)), fedsim.UniformSampler(data, clients=2, seed=0).cohort(0)
    >>> def one_after_another(work, shared, clients):
    ...     return [jax.jit(work)(shared, client) for client in clients]
    >>> mine, _ = run_round(algorithm, state, cohort, one_after_another)
    >>> jitted, _ = algorithm.apply(state, cohort)
    >>> float(jnp.abs(mine.params["linear"]["w"] - jitted.params["linear"]["w"]).max()) < 1e-6
    True
    """
    check_cohorts(algorithm, [cohort])
    round = _Round.of(algorithm, state, cohort)
    kept, table, plan = round.state.clients, round.state.clients, round.plan
    if isinstance(kept, ClientRows):
        table, plan = _memory.gathered(kept, plan, len(cohort), Jit().mesh())

    def run_call(call: TracedCall, operands: Operands) -> tuple[Any, Any]:
        nonlocal table
        exists = jnp.arange(cohort.slots) < len(cohort)
        memories = jnp.asarray(plan.memory)
        stored = rows_of(table, memories) if isinstance(table, ClientTable) else ()
        shared, clients = round.inputs(call, operands, stored)

        def work(shared: Any, client: Any) -> Any:
            return call.run(shared, _with_keys(client), round.program.first_memories)

        each = [jax.tree.map(lambda x, i=i: x[i], clients) for i in range(len(cohort))]
        results = list(run_clients(work, shared, each))
        if len(results) != len(each):
            raise ValueError(
                f"Expected run_clients to return the results of {len(each)} clients, in their order, got {len(results)}: "
                "return one for each, or raise an error if a client has failed."
            )
        shapes = jax.eval_shape(work, shared, jax.tree.map(lambda x: x[0], clients))
        padding = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        results += [padding] * (cohort.slots - len(results))
        arrived, entries, rows = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *results)
        if isinstance(table, ClientTable) and call.aggregator is not None:
            table = put_rows(table, jnp.where(exists, memories, len(table.seen)), rows)
        return round.folded(call, operands, arrived, entries), round.placed_entries(call, operands, entries)

    after, info = round.program.run(round.numbers, round.state, round.key, plan, run_call)
    if kept == ():
        return after if isinstance(round.given, FederatedState) else after.server, info
    written = _memory.written_back(kept, table, plan, len(cohort)) if isinstance(kept, ClientRows) else table
    return after._replace(clients=written), info


@primitives.without_mesh_of_context()
def federated_round(
    algorithm: FederatedAlgorithm, state: State, cohort: Cohort
) -> tuple[Callable[..., tuple[State, Any, Any]], tuple[Any, ...]]:
    """Returns a round as a federated program, and its arguments.

    The program takes the algorithm's numbers, the state without the clients' memories, the root key, and the clients' examples
    ``[slots, most examples, ...]`` and memories, each at its client. It returns the state, the round's info, and the memories.
    The result is that of `fedsim.Algorithm.apply`, up to the order of sums.

    Args:
      algorithm: whose round it is; it must not override ``apply``.
      state: the state before the round, whose memories of these clients are among the arguments.
      cohort: the clients.

    Raises:
      ValueError: the algorithm cannot run on these clients.

    `fedsim.primitives.stages` shows what the server does with the clients' values:

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> algorithm, cohort = fedsim.algorithms.Histogram(bins=2), fedsim.Cohort.of(data, ["0", "1"])
    >>> program, arguments = federated_round(algorithm, algorithm.init(jax.random.key(0)), cohort)
    >>> [stage.kind for stage in primitives.stages(program, *arguments).stages]
    ['server', 'broadcast', 'clients', 'reduction', 'server']
    >>> program(*arguments)[0].counts.tolist()
    [0, 1, 2, 0]
    """
    check_cohorts(algorithm, [cohort])
    round, placement = _Round.of(algorithm, state, cohort), Placement("clients", cohort.slots)
    table, plan = round.state.clients, round.plan
    if isinstance(table, ClientRows):
        table, plan = _memory.gathered(table, plan, len(cohort), Jit().mesh())
    memories = () if table == () else rows_of(table, jnp.asarray(plan.memory))

    @primitives.without_mesh_of_context()
    def program(numbers: Any, state: State, key: jax.Array, columns: Placed, memories: Any) -> tuple[State, Any, Any]:
        table, own = memories, round._replace(columns=columns.stacked)

        def run_call(call: TracedCall, operands: Operands) -> tuple[Any, Any]:
            nonlocal table
            shared, clients = own.inputs(call, operands, table.stacked if isinstance(table, Placed) else ())

            def of_client(shared: Any, client: Any) -> Any:
                return call.run(shared, _with_keys(client), round.program.first_memories)

            sent = primitives.broadcast(shared, placement)
            arrived, entries, rows = primitives.map(of_client, sent, Placed(clients, placement)).stacked
            if isinstance(table, Placed):
                table = Placed(rows, placement)
            folded: Any = ()
            if call.aggregator is not None:
                updates = Placed((arrived, entries), placement)
                name = type(call.aggregator.innermost).__name__
                folded = primitives.reduce(lambda x: own.folded(call, operands, *x), updates, name=name)
            return folded, own.placed_entries(call, operands, entries)

        after, info = own.program.run(numbers, parts_of(state), key, jax.tree.map(jnp.asarray, own.plan), run_call)
        return after if isinstance(state, FederatedState) else after.server, info, table

    state = round.given._replace(clients=()) if round.state.clients != () else round.given
    at_clients = functools.partial(primitives.place, placement=placement)
    arguments = round.numbers, state, round.key, at_clients(round.columns), at_clients(memories) if memories != () else ()
    return program, arguments


class _Round(NamedTuple):
    """A traced round and what its clients read, where each client has its own columns.

    Attributes:
      program: the round.
      given: the state before it, with what is kept between rounds.
      numbers: the algorithm's numbers.
      key: the root key.
      plan: the plan of the round.
      columns: the examples of each client, leaves ``[slots, most examples, ...]``.
    """

    program: RoundProgram
    given: State
    numbers: Any
    key: jax.Array
    plan: RoundPlan
    columns: Any

    @classmethod
    def of(cls, algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> _Round:
        data, slots, most = cohort.data, cohort.slots, max(1, int(cohort.sizes.max(initial=1)))
        key = rng.typed(cohort.key)
        options = TraceOptions(slots=slots, rows=most, attack=cohort.attack, key=key.dtype)
        traced, numbers = traced_rounds(algorithm, state, data, options)
        given = _memory.remembered(algorithm, state, data)
        plan = plan_round(cohort, Layout(slots, 1), algorithm.batches)
        columns = {name: np.zeros((slots, most, *c.shape[1:]), c.dtype) for name, c in data.columns.items()}
        for slot in range(len(cohort)):
            for name, rows in cohort.client(slot).examples.items():
                columns[name][slot, : len(rows)] = rows
        return cls(traced.trace(options), given, numbers, key, plan, columns)

    @property
    def state(self) -> FederatedState:
        return parts_of(self.given)

    def inputs(self, call: TracedCall, operands: Operands, stored: Any) -> tuple[Any, Any]:
        """Returns what all clients of a call get, and what each gets, leaves ``[slots, ...]``; keys as words."""
        own, slots = operands.clients, len(operands.clients.slot)
        words, step_keys = own.streams
        own = own._replace(
            start=jnp.zeros(slots, jnp.int32),  # in the client's own columns
            key=jax.random.key_data(own.key),
            streams=(words, jax.random.key_data(step_keys)),
        )
        rows = jax.tree.map(lambda x: x[own.position], operands.rows)
        return (list(operands.work), operands.server_memory), (own, self.columns, rows, stored)

    def folded(self, call: TracedCall, operands: Operands, arrived: Any, entries: Any) -> Any:
        """Returns the accumulator with all updates ``[slots, ...]``, () for a call without updates."""
        if call.aggregator is None:
            return ()
        assert call.zero is not None
        slots = jnp.arange(len(entries["weight"]), dtype=jnp.int32)
        return call.add_all(operands, call.zero(operands.zero, {}), (arrived, entries["weight"], slots))

    def placed_entries(self, call: TracedCall, operands: Operands, entries: Any) -> Any:
        """Returns entries ``[slots, ...]`` at the places of their clients: their slots, or the rows of `Clients.map_rows`."""
        if call.rows is None:
            return entries
        exists, places = jnp.arange(len(operands.clients.slot)) < self.plan.count, operands.clients.position
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), call.results[1])
        return put_rows(empty, jnp.where(exists, places, call.num_entries), entries)


def _with_keys(client: Any) -> Any:
    """Returns what a client gets with keys in place of their words."""
    own, *rest = client
    words, step_words = own.streams
    wrap = functools.partial(jax.random.wrap_key_data, impl=rng.IMPLEMENTATION)
    return (own._replace(key=wrap(own.key), streams=(words, wrap(step_words))), *rest)
