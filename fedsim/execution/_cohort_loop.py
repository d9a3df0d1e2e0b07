"""The compiled inner loops: one device's share of a round. Everything here is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import rng, tree
from fedsim.data import Batch
from fedsim.execution._contract import Client, ClientUpdate, FederatedProgram, RoundInfo, Shared
from fedsim.execution._plan import RoundPlan

Info = dict[str, jax.Array]


class Roster(NamedTuple):
    """The cohort as a device sees it: each field ``[slots]``, in cohort order."""

    client: jax.Array
    start: jax.Array
    size: jax.Array
    key: jax.Array
    step_key: jax.Array
    shuffle_words: jax.Array


def roster(plan: RoundPlan, root_key: jax.Array) -> Roster:
    """All keys of the cohort at once: a key derivation costs as much for one client as for sixteen."""
    keys = rng.client_keys(root_key, plan.round, plan.client)
    shuffle_words = rng.words(jax.vmap(lambda key: rng.stream(key, "shuffle"))(keys))
    step_keys = jax.vmap(lambda key: rng.stream(key, "step"))(keys)
    return Roster(plan.client, plan.start, plan.size, keys, step_keys, shuffle_words)


class Lane:
    """One client after another: what is common to the sequential and the side-by-side loop."""

    def __init__(self, program: FederatedProgram, columns: Mapping[str, jax.Array], shared: Shared, people: Roster):
        self.program, self.columns, self.shared, self.people = program, columns, shared, people

    def client(self, position: jax.Array) -> Client:
        size = self.people.size[position]
        steps = jnp.asarray(self.program.batches.num_steps(size), jnp.int32)
        return Client(self.people.client[position], size, steps, self.people.key[position])

    def batch(self, position: jax.Array, step: jax.Array) -> Batch:
        people = self.people
        index, mask = self.program.batches.indices(people.shuffle_words[position], people.size[position], step)
        # An idle lane asks for rows of a client that may be empty and stand at the very end.
        rows = jnp.minimum(people.start[position] + index, len(next(iter(self.columns.values()))) - 1)
        examples = {name: column.at[rows].get(mode="promise_in_bounds") for name, column in self.columns.items()}
        return Batch(examples, mask, jax.random.fold_in(people.step_key[position], step), step)

    def zeros(self) -> tuple[Any, Info]:
        """An empty fold, and room ``[slots, ...]`` for what every client reports."""

        def report(position: jax.Array) -> tuple[Any, Info]:
            client = self.client(position)
            return sanitize(
                self.program.client_final(self.shared, self.program.client_init(self.shared, client), client), client
            )

        update, info = jax.eval_shape(report, jax.ShapeDtypeStruct((), jnp.int32))
        room = jax.tree.map(lambda x: jnp.zeros((self.people.size.shape[0], *x.shape), x.dtype), info)
        return self.program.aggregator.zero(update), room

    def fold(self, accumulator: Any, room: Info, position: jax.Array, result: ClientUpdate, client: Client) -> tuple[Any, Info]:
        update, info = sanitize(result, client)
        accumulator = self.program.aggregator.accumulate(accumulator, update, info["weight"])
        return accumulator, jax.tree.map(lambda rows, row: rows.at[position].set(row), room, info)


def sanitize(result: ClientUpdate, client: Client) -> tuple[Any, Info]:
    """Keeps out of the fold who took no step and whose update is not finite, and writes the client's line of the info.

    An update counts as finite if its squared norm is: so no sum of weighted updates overflows either. One that is not is
    replaced by zeros and not only weighted by 0, since 0 times NaN is NaN.
    """
    weight = jnp.asarray(result.weight, jnp.float32)
    took_part = client.num_steps > 0
    finite = jnp.isfinite(tree.squared_norm(result.update)) & jnp.isfinite(weight)
    counts = took_part & finite
    update = tree.select(counts, result.update, jax.tree.map(jnp.zeros_like, result.update))
    info = {name: jnp.asarray(value) for name, value in result.info.items()}
    # All of one dtype with the updates, so that one all-reduce brings everything together.
    return update, info | {"weight": jnp.where(counts, weight, 0.0), "dropped": (took_part & ~finite).astype(jnp.float32)}


def round_info(program: FederatedProgram, lines: Info, sizes: jax.Array, num_clients: jax.Array) -> RoundInfo:
    """The round's info from the lines ``[slots, ...]`` that `sanitize` wrote; what the plan knows is not communicated."""
    dropped = lines["dropped"] > 0
    steps = jnp.asarray(program.batches.num_steps(sizes), jnp.int32)
    return RoundInfo(
        clients=lines | {"num_examples": sizes, "num_steps": steps, "dropped": dropped},
        num_dropped=jnp.sum(dropped, dtype=jnp.int32),
        num_aggregated=jnp.sum(lines["weight"] != 0, dtype=jnp.int32),
        num_clients=num_clients,
    )


def run_sequential(lane: Lane, queue: jax.Array, window: jax.Array, carry: tuple[Any, Info]) -> tuple[Any, Info]:
    """One client at a time, each for its own number of steps: nothing is padded. The way of a CPU.

    Args:
      lane: the device's clients and data.
      queue: ``int32 [slots]``, positions in the cohort.
      window: ``int32 [2]``, which part of the queue to train: from, and up to.
      carry: the fold so far, and the lines.
    """
    program, shared = lane.program, lane.shared

    def run_client(i: jax.Array, carry: tuple[Any, Info]) -> tuple[Any, Info]:
        position = queue[i]
        client = lane.client(position)
        state = jax.lax.fori_loop(
            0,
            client.num_steps,
            lambda step, state: program.client_step(shared, state, lane.batch(position, step)),
            program.client_init(shared, client),
        )
        return lane.fold(*carry, position, program.client_final(shared, state, client), client)

    return jax.lax.fori_loop(window[0], window[1], run_client, carry)


def run_side_by_side(
    lane: Lane, queues: jax.Array, windows: jax.Array, carry: tuple[Any, Info], steps_per_check: int
) -> tuple[Any, Info]:
    """Many lanes at once (`jax.vmap`), each starting its next client when one ends. The way of a GPU or TPU.

    No lane waits for another before its queue is empty, so no step is spent on padding until the very end.

    Args:
      lane: the device's clients and data.
      queues: ``int32 [lanes, slots]``, positions in the cohort.
      windows: ``int32 [lanes, 2]``, which part of each queue to train.
      carry: the fold so far, and the lines.
      steps_per_check: how many steps to take before asking whether all lanes are done: a loop condition is read back
        to the host on a GPU, which costs more than a few idle steps.
    """
    program, shared = lane.program, lane.shared

    def tick(carry: tuple[Any, ...], queue: jax.Array, window: jax.Array) -> tuple[Any, ...]:
        slot, step, state, accumulator, room = carry
        position = queue[jnp.minimum(slot, queue.shape[0] - 1)]
        client = lane.client(position)
        state = tree.select(step == 0, program.client_init(shared, client), state)
        stepped = program.client_step(shared, state, lane.batch(position, step))
        state = tree.select(step < client.num_steps, stepped, state)
        ended = (slot < window[1]) & (step + 1 >= client.num_steps)
        result = program.client_final(shared, state, client)
        folded = lane.fold(accumulator, room, position, result, client)
        # select and not a weight of 0: an idle lane must leave every kind of accumulator alone.
        accumulator, room = tree.select(ended, folded, (accumulator, room))
        return slot + ended.astype(jnp.int32), jnp.where(ended, 0, step + 1), state, accumulator, room

    def ticks(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        return jax.lax.scan(lambda c, _: (jax.vmap(tick)(c, queues, windows), None), carry, length=steps_per_check)[0]

    lanes = windows.shape[0]
    client_state = jax.eval_shape(lambda: program.client_init(shared, lane.client(jnp.int32(0))))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), client_state)
    first = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), (jnp.int32(0), blank, *lane.zeros()))
    start = (windows[:, 0], *first)
    _, _, _, accumulators, rooms = jax.lax.while_loop(lambda c: jnp.any(c[0] < windows[:, 1]), ticks, start)
    accumulator, lines = carry
    # Every client's line was written by one lane only; elsewhere it is 0.
    lines = jax.tree.map(lambda so_far, x: so_far + jnp.sum(x, 0, dtype=x.dtype), lines, rooms)
    return program.aggregator.merge(accumulator, program.aggregator.merge_stacked(accumulators)), lines
