"""The compiled inner loops: one device's share of a round. Everything here is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import rng, tree
from fedsim.aggregators import Aggregator, with_notes_of
from fedsim.attacks import Attack
from fedsim.data import Batch, Batches
from fedsim.execution._contract import Client, ClientTable, ClientUpdate, FederatedProgram, RoundInfo, Shared, update_shape
from fedsim.execution._placement import AXIS
from fedsim.execution._plan import RoundPlan

Info = dict[str, jax.Array]

# What `RoundInfo.clients` tells of every algorithm. Who sends updates as they are, and knows better, may count its bits itself.
_NAMES_OF_SENDING = {"bits_up", "entropy_bits_up"}
_NAMES = {"num_examples", "num_steps", "weight", "dropped", "attacker", "bits_down"} | _NAMES_OF_SENDING


class Roster(NamedTuple):
    """The cohort as a device sees it: each field ``[slots]``, in cohort order."""

    client: jax.Array
    start: jax.Array
    size: jax.Array
    steps: jax.Array
    reads: jax.Array
    keeps: jax.Array
    attacker: jax.Array
    key: jax.Array
    step_key: jax.Array
    shuffle_words: jax.Array


class Carry(NamedTuple):
    """What a device's loop over clients carries: the fold, room ``[slots, ...]`` for their lines, and what clients keep."""

    accumulator: Any
    lines: Info
    table: ClientTable | tuple[()]


def roster(plan: RoundPlan, root_key: jax.Array) -> Roster:
    """All keys of the cohort at once: a key derivation costs as much for one client as for sixteen."""
    keys = rng.client_keys(root_key, plan.round, plan.client)
    shuffle_words = rng.words(jax.vmap(lambda key: rng.stream(key, "shuffle"))(keys))
    step_keys = jax.vmap(lambda key: rng.stream(key, "step"))(keys)
    integers = plan.client, plan.start, plan.size, plan.steps, plan.reads, plan.keeps
    return Roster(*integers, plan.attacker > 0, keys, step_keys, shuffle_words)


class Lane:
    """One client after another: what is common to the sequential and the side-by-side loop.

    Args:
      program: the algorithm, or a phase of it.
      columns: the examples that the device reads.
      shared: what the server sent.
      people: the cohort.
      common: what the server keeps for the aggregator.
      attack: what the attackers among the cohort do; None: nobody attacks.
      before: what clients kept before the dispatch, where that is not in the table that it writes.

    Attributes:
      aggregator: what folds: the program's, within earshot of attackers who collude.
    """

    def __init__(
        self,
        program: FederatedProgram,
        columns: Mapping[str, jax.Array],
        shared: Shared,
        people: Roster,
        common: Any = (),
        attack: Attack | None = None,
        before: ClientTable | None = None,
    ):
        self.program, self.columns, self.shared, self.people = program, columns, shared, people
        self.common, self.attack, self.before = common, attack, before
        self.aggregator = folding(program, attack, people.attacker)

    def row(self, position: jax.Array, table: ClientTable | tuple[()]) -> tuple[Any, Any]:
        """What this client kept, for the algorithm and for the aggregator; or what a client starts with."""
        own = self.program.client_memory(self.shared)
        if not isinstance(table, ClientTable):
            return own, ()
        seen, row = _read(table, self.people.keeps[position])
        if self.before is not None:
            there, old = _read(self.before, self.people.reads[position])
            seen, row = seen | there, tree.select(seen, row, old)
        of_aggregator = jax.tree.map(jnp.zeros_like, row[1])
        if jax.tree.leaves(of_aggregator):
            of_aggregator = self.program.aggregator.client_memory(update_shape(self.program, self.shared))
        return tree.select(seen, row, (own, of_aggregator))

    def client(self, position: jax.Array, row: tuple[Any, Any]) -> Client:
        """The client of this `row`."""
        people = self.people
        return Client(people.client[position], people.size[position], people.steps[position], people.key[position], row[0])

    def batch(self, position: jax.Array, step: jax.Array) -> Batch:
        """What the client trains on in one step."""
        return self._batch(
            self.program.batches, position, step, self.people.shuffle_words[position], self.people.step_key[position]
        )

    def preview(self, position: jax.Array, step: jax.Array) -> Batch:
        """What it sees in one step of its pass before training."""
        assert self.program.preview
        key = rng.stream(self.people.key[position], "preview")
        words = rng.words(rng.stream(key, "shuffle"))
        return self._batch(self.program.preview, position, step, words, rng.stream(key, "step"))

    def _batch(self, batches: Batches, position: jax.Array, step: jax.Array, words: jax.Array, key: jax.Array) -> Batch:
        people = self.people
        index, mask = batches.indices(words, people.size[position], step)
        # An idle lane asks for rows of a client that may be empty and stand at the very end.
        rows = jnp.minimum(people.start[position] + index, len(next(iter(self.columns.values()))) - 1)
        examples = {name: column.at[rows].get(mode="promise_in_bounds") for name, column in self.columns.items()}
        return self.poisoned(position, Batch(examples, mask, jax.random.fold_in(key, step), step))

    def poisoned(self, position: jax.Array, batch: Batch) -> Batch:
        """What the client trains on: of an attacker, what the attack makes of its batch."""
        if self.attack is None:
            return batch
        return batch._replace(examples=tree.select(self.people.attacker[position], self.attack.poison(batch), batch.examples))

    def num_preview_steps(self, position: jax.Array) -> jax.Array:
        preview = self.program.preview
        return jnp.asarray(preview.num_steps(self.people.size[position]), jnp.int32) if preview else jnp.int32(0)

    def deliver(self, position: jax.Array, result: ClientUpdate, client: Client, old: tuple[Any, Any]) -> tuple[Any, Info, Any]:
        """What arrives of an update, the client's line of the info, and what it keeps if it counts; ``old``: its `row`."""
        if self.attack is None:
            return deliver(self.program, result, client, old, self.common)
        attacks = self.people.attacker[position]
        corrupt = with_notes_of(result.update, self.attack.corrupt(result.update, rng.stream(client.key, "attack")))
        sent = result._replace(update=tree.select(attacks, corrupt, result.update))

        def kept_of(arrived: Any) -> Any:
            # An attacker keeps what its own work gave: what it says would come back to it, and grow from round to round.
            own, kept = (
                _as_known("client_final", "ClientUpdate", self.program.client_sent(of, client, what), client.memory)
                for of, what in ((result, result.update), (sent, arrived))
            )
            return tree.select(attacks, tree.select(_is_finite(own), own, client.memory), kept)

        update, line, (kept, of_aggregator) = deliver(self.program, sent, client, old, self.common, kept_of)
        if type(self.attack).surround is not Attack.surround:
            # What a colluding attacker would have sent is thrown away, and so is what its message left behind.
            of_aggregator = tree.select(attacks, old[1], of_aggregator)
        return update, line, (kept, of_aggregator)

    def keep(self, table: ClientTable | tuple[()], position: jax.Array, line: Info, kept: Any) -> ClientTable | tuple[()]:
        """``table`` with what these clients keep, one or several side by side, of those whose update counts."""
        if not jax.tree.leaves(kept) or not isinstance(table, ClientTable):
            return table
        keeps, beyond = self.people.keeps, len(table.seen)
        at = jnp.where(line["weight"] != 0, keeps.at[position].get(mode="fill", fill_value=beyond), beyond)
        return put_rows(table, at, kept)

    def empty(self, table: ClientTable | tuple[()]) -> Carry:
        """An empty fold, room for every client's line, and what clients keep."""

        def report(position: jax.Array) -> tuple[Any, Info, Any]:
            row = self.row(position, table)
            client = self.client(position, row)
            state = self.program.client_init(self.shared, client)
            return self.deliver(position, self.program.client_final(self.shared, state, client), client, row)

        slots = self.people.size.shape[0]
        update, line, _ = jax.eval_shape(report, jax.ShapeDtypeStruct((), jnp.int32))
        self.aggregator.check(update, slots)
        lines = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), line)
        return Carry(self.aggregator.zero_devices(update, slots, AXIS), lines, table)


def _read(table: ClientTable, at: jax.Array) -> tuple[jax.Array, Any]:
    """Whether there is a row at this place, and the row."""
    seen = (at >= 0) & (at < len(table.seen))
    seen &= table.seen[jnp.where(seen, at, 0)]
    # Of all that are not there the first is read: that one is in a cache.
    at = jnp.where(seen, at, 0)
    return seen, jax.tree.map(lambda rows: rows[at], table.rows)


def put_rows(table: ClientTable, at: jax.Array, rows: Any) -> ClientTable:
    """``table`` with rows at a place, or at several; those beyond its end go nowhere."""
    written = ClientTable(rows, jnp.ones(at.shape, bool))
    if at.ndim or not isinstance(at, jax.core.Tracer):  # Out of a program, a loop is compiled every time.
        return jax.tree.map(functools.partial(_put, at), table, written)

    def write(_: jax.Array, table: ClientTable) -> ClientTable:
        return jax.tree.map(lambda leaf, row: jax.lax.dynamic_update_index_in_dim(leaf, row, at, 0), table, written)

    # Once or not at all, in its place: a scatter takes its time on a CPU, and a choice between rows reads both.
    return jax.lax.fori_loop(0, (at < len(table.seen)).astype(jnp.int32), write, table)


def folding(program: FederatedProgram, attack: Attack | None, attackers: jax.Array) -> Aggregator:
    """What folds a cohort's updates, of which ``bool [slots]`` are attackers'."""
    return program.aggregator if attack is None else attack.surround(program.aggregator, attackers)


def deliver(
    program: FederatedProgram,
    result: ClientUpdate,
    client: Client,
    old: tuple[Any, Any],
    common: Any,
    kept_of: Callable[[Any], Any] | None = None,
) -> tuple[Any, Info, Any]:
    """Sends an update: what arrives, the client's line of the info, and what it keeps if it counts (algorithm, aggregator).

    Keeps out of the fold who took no step and whose update, or what it keeps, is not finite. These count as finite if their
    squared norm is: so no sum of weighted updates overflows either. An update that is not is replaced by zeros and not only
    weighted by 0, since 0 times NaN is NaN. ``kept_of``: what the client keeps by what arrived, if not the program's
    `client_sent`.
    """
    weight = jnp.asarray(result.weight, jnp.float32)
    took_part = client.num_steps > 0
    # Chosen twice, for XLA on a CPU takes four times as long for a difference by itself as for one that it also chooses.
    update = tree.select(took_part, result.update, jax.tree.map(jnp.zeros_like, result.update))
    finite = _is_finite((update, result.memory)) & jnp.isfinite(weight)
    update = tree.select(finite, update, jax.tree.map(jnp.zeros_like, result.update))
    info = {name: jnp.asarray(value) for name, value in result.info.items()}
    taken = _NAMES - _NAMES_OF_SENDING if program.aggregator.plain and info.keys() >= _NAMES_OF_SENDING else _NAMES
    if collisions := sorted(taken & info.keys()):
        raise ValueError(
            f"client_final's info has {', '.join(collisions)}, and so has every round's own info: give it another name than "
            f"{', '.join(sorted(_NAMES))}."
        )
    of_aggregator = old[1]
    if not program.aggregator.plain:
        sent = program.aggregator.send(update, common, old[1], rng.stream(client.key, "send"))
        # Half of a precision is a way of sending, and may overflow.
        finite &= _is_finite((sent.update, sent.memory))
        update = tree.select(took_part & finite, sent.update, jax.tree.map(jnp.zeros_like, sent.update))
        info |= {
            "bits_up": jnp.where(took_part, sent.bits, jnp.zeros_like(sent.bits)),
            "entropy_bits_up": jnp.where(took_part, sent.entropy_bits, 0.0),
        }
        of_aggregator = _as_known(f"{type(program.aggregator).__name__}.send", "Sent", sent.memory, old[1])
    kept = kept_of(update) if kept_of else program.client_sent(result, client, update)
    kept = _as_known("client_final", "ClientUpdate", kept, client.memory)
    # Of half a precision what is kept may overflow where what it is made of does not.
    finite &= _is_finite([leaf for leaf in jax.tree.leaves(kept) if leaf.dtype.itemsize < 4])
    counts = took_part & finite
    # All of one dtype with the updates, so that one all-reduce brings everything together.
    info |= {"weight": jnp.where(counts, weight, 0.0), "dropped": (took_part & ~finite).astype(jnp.float32)}
    return update, info, (kept, of_aggregator)


def _is_finite(a: Any) -> jax.Array:
    """Whether the squared norm of all leaves is, ``bool []``; but for counts and flags, which always are."""
    arrays = map(jnp.asarray, jax.tree.leaves(a))
    return jnp.isfinite(tree.squared_norm([leaf for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.inexact)]))


def _as_known(hook: str, result: str, kept: Any, known: Any) -> Any:
    """What a client keeps, in the dtypes of what it starts with; raises ``ValueError`` if it is of another form."""
    forms = [(str(jax.tree.structure(x)), [jnp.shape(leaf) for leaf in jax.tree.leaves(x)]) for x in (kept, known)]
    for of_kept, of_known in zip(*forms, strict=True):
        if of_kept != of_known:
            raise ValueError(
                f"{hook} keeps {of_kept}, and client_memory starts with {of_known}: give {result} a memory of that form."
            )
    return jax.tree.map(lambda new, old: jnp.asarray(new).astype(jnp.result_type(old)), kept, known)


def round_info(
    lines: Info, plan: RoundPlan, num_clients: jax.Array, bits_down: jax.Array, update: Any, phases: int = 1
) -> RoundInfo:
    """The round's info from the lines ``[slots, ...]`` that `deliver` wrote; what the plan knows is not communicated.

    Args:
      lines: one per slot.
      plan: sizes and steps.
      num_clients: ``int32 []``.
      bits_down: what the server sent to one client.
      update: shapes of an update that is sent as it is.
      phases: how many messages of about this size make a round.
    """
    dropped = lines["dropped"] > 0
    took_part = plan.steps > 0
    bits = tree.num_bits(update)
    if "bits_up" not in lines:
        sent = tree.add_bits(bits, most=bits)
        lines |= {
            "bits_up": jnp.where(took_part, sent, jnp.zeros_like(sent)),
            "entropy_bits_up": jnp.where(took_part, jnp.float32(bits), 0.0),
        }
    lines |= {
        "bits_up": tree.add_bits(lines["bits_up"], most=phases * bits),
        "bits_down": jnp.where(took_part, bits_down, jnp.zeros_like(bits_down)),
    }
    return RoundInfo(
        clients=lines | {"num_examples": plan.size, "num_steps": plan.steps, "dropped": dropped},
        num_dropped=jnp.sum(dropped, dtype=jnp.int32),
        num_aggregated=jnp.sum(lines["weight"] != 0, dtype=jnp.int32),
        num_clients=num_clients,
    )


def run_sequential(lane: Lane, queue: jax.Array, window: jax.Array, carry: Carry) -> Carry:
    """One client at a time, each for its own number of steps: nothing is padded. The way of a CPU.

    Args:
      lane: the device's clients and data.
      queue: ``int32 [slots]``, positions in the cohort.
      window: ``int32 [2]``, which part of the queue to train: from, and up to.
      carry: the fold so far, and what clients left behind.
    """
    program, shared = lane.program, lane.shared

    def run_client(i: jax.Array, carry: Carry) -> Carry:
        position = queue[i]
        row = lane.row(position, carry.table)
        client = lane.client(position, row)
        state = program.client_init(shared, client)
        if program.preview:
            state = jax.lax.fori_loop(
                0,
                lane.num_preview_steps(position),
                lambda step, state: program.client_preview(shared, state, lane.preview(position, step)),
                state,
            )
        state = jax.lax.fori_loop(
            0,
            client.num_steps,
            lambda step, state: program.client_step(shared, state, lane.batch(position, step)),
            program.client_begin(shared, state, client),
        )
        update, line, kept = lane.deliver(position, program.client_final(shared, state, client), client, row)
        accumulator = lane.aggregator.accumulate(carry.accumulator, update, line["weight"], position)
        # Not before the fold, which may be of what was read from the row: XLA would copy the whole table.
        table = lane.keep(carry.table, tree.after(position, accumulator), line, kept)
        return Carry(accumulator, _write(carry.lines, position, line), table)

    return jax.lax.fori_loop(window[0], window[1], run_client, carry)


def _write(room: Info, position: jax.Array, lines: Info) -> Info:
    """Lines into the room, at one position or at several; a position beyond the end goes nowhere."""
    return {name: _put(position, rows, lines[name]) for name, rows in room.items()}


def _put(at: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    """``rows`` with ``new`` ones at one place or at several, which are different; those beyond the end go nowhere."""
    if not at.ndim:
        return rows.at[at].set(new, mode="drop")
    # Each that goes nowhere has a place of its own beyond the end, so that all differ, as is promised: without that promise a
    # GPU that must give the same bits every time may write one after another.
    at = jnp.where(at < len(rows), at, len(rows) + jnp.arange(len(at), dtype=at.dtype))
    return rows.at[at].set(new, mode="drop", unique_indices=True)


def run_side_by_side(lane: Lane, queues: jax.Array, windows: jax.Array, carry: Carry, steps_per_check: int) -> Carry:
    """Many lanes at once (`jax.vmap`), each starting its next client when one ends. The way of a GPU or TPU.

    No lane waits for another before its queue is empty, so no step is spent on padding until the very end.

    Args:
      lane: the device's clients and data.
      queues: ``int32 [lanes, slots]``, positions in the cohort.
      windows: ``int32 [lanes, 2]``, which part of each queue to train.
      carry: the fold so far, and what clients left behind.
      steps_per_check: how many steps to take before asking whether all lanes are done: a loop condition is read back
        to the host on a GPU, which costs more than a few idle steps.
    """
    program, shared = lane.program, lane.shared
    slots = lane.people.size.shape[0]

    def tick(table: Any, at: tuple[Any, ...], queue: jax.Array, window: jax.Array) -> tuple[tuple[Any, ...], jax.Array, Any]:
        slot, step, state, accumulator = at
        position = queue[jnp.minimum(slot, queue.shape[0] - 1)]
        row = lane.row(position, table)
        client = lane.client(position, row)
        looks = lane.num_preview_steps(position)
        state = tree.select(step == 0, program.client_init(shared, client), state)
        if program.preview:
            state = tree.select(step < looks, program.client_preview(shared, state, lane.preview(position, step)), state)
        state = tree.select(step == looks, program.client_begin(shared, state, client), state)
        train = step - looks
        stepped = program.client_step(shared, state, lane.batch(position, jnp.maximum(train, 0)))
        state = tree.select((train >= 0) & (train < client.num_steps), stepped, state)
        ended = (slot < window[1]) & (train >= 0) & (train + 1 >= client.num_steps)
        update, line, kept = lane.deliver(position, program.client_final(shared, state, client), client, row)
        folded = lane.aggregator.accumulate(accumulator, update, line["weight"], position)
        # select and not a weight of 0: an idle lane must leave every kind of accumulator alone.
        accumulator = tree.select(ended, folded, accumulator)
        at = slot + ended.astype(jnp.int32), jnp.where(ended, 0, step + 1), state, accumulator
        return at, jnp.where(ended, position, slots), (line, kept)

    def ticks(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        def body(carry: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
            at, lines, table = carry
            at, positions, (line, kept) = jax.vmap(tick, in_axes=(None, 0, 0, 0))(table, at, queues, windows)
            return (at, _write(lines, positions, line), lane.keep(table, positions, line, kept)), None

        return jax.lax.scan(body, carry, length=steps_per_check)[0]

    def begin() -> Any:
        position = jnp.int32(0)
        return program.client_init(shared, lane.client(position, lane.row(position, carry.table)))

    lanes = windows.shape[0]
    client_state = jax.eval_shape(begin)
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), client_state)
    first = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), (jnp.int32(0), blank, lane.empty(carry.table).accumulator)
    )
    at, lines, table = jax.lax.while_loop(
        lambda c: jnp.any(c[0][0] < windows[:, 1]), ticks, ((windows[:, 0], *first), carry.lines, carry.table)
    )
    aggregator = lane.aggregator
    return Carry(aggregator.merge(carry.accumulator, aggregator.merge_stacked(at[-1])), lines, table)
