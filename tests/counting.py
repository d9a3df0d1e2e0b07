"""Algorithms whose clients count and remember, aggregators that remember, a round of two phases; and ways of executing them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedsim
from fedsim import aggregators, execution

EXECUTIONS = {
    "jit": fedsim.Jit(),
    "jit, on the device": fedsim.Jit(memory="resident"),
    "jit, streamed": fedsim.Jit(memory="stream"),
    "jit, 3 lanes, streamed": fedsim.Jit(lanes=3, memory="stream"),
    "pmap, 8 devices, streamed": fedsim.Pmap(devices=8, memory="stream"),
    "pmap, 2 devices, 2 lanes": fedsim.Pmap(devices=2, lanes=2),
    "debug": fedsim.Debug(),
}
BATCHES = fedsim.Batches(size=4, epochs=2)
LOOK = fedsim.Batches(size=3, shuffle=False)


class Kept(NamedTuple):
    visits: jax.Array
    total: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Counting(fedsim.Algorithm):
    """Each client counts its visits, sums what it was sent, previews the sum of its examples, and keeps both."""

    refuse: float = -1.0

    @property
    def preview(self):
        return LOOK

    def init(self, key):
        return jnp.float32(0)

    def client_memory(self, shared):
        return Kept(jnp.int32(0), jnp.full((2,), 100.0))

    def client_init(self, shared, client):
        return jnp.float32(0), jnp.float32(0), client.memory.visits

    def client_preview(self, shared, state, batch):
        seen, steps, visits = state
        return seen + jnp.sum(batch.examples["x"][:, 0], where=batch.mask), steps, visits

    def client_begin(self, shared, state, client):
        return state[0], state[1] + 1000, state[2]

    def client_step(self, shared, state, batch):
        return state[0], state[1] + 1, state[2]

    def client_final(self, shared, state, client):
        seen, steps, visits = state
        kept = Kept(visits + 1, client.memory.total + jnp.stack([shared, seen]))
        bad = client.position == jnp.int32(self.refuse)
        update = jnp.where(bad, jnp.nan, seen + steps)
        return execution.ClientUpdate(update, jnp.float32(1), {"seen": seen, "visits": kept.visits}, kept)

    def server_update(self, state, update):
        return state + update


def by_hand(rounds, refuse=-1.0):
    """`Counting` in plain Python."""
    server, memory = 0.0, {}
    for cohort in rounds:
        updates = []
        for position, (client_id, dataset, _) in zip(cohort.clients.tolist(), cohort, strict=True):
            if not len(dataset):
                continue
            seen = float(dataset["x"][:, 0].sum())
            if position != refuse:
                visits, total = memory.get(client_id, (0, np.full(2, 100.0)))
                memory[client_id] = visits + 1, total + np.array([server, seen])
                updates.append(seen + 1000 + int(BATCHES.num_steps(len(dataset))))
        server += float(np.mean(updates)) if updates else 0.0
    return server, memory


def cohorts(population, seed=3):
    draw = np.random.default_rng(seed)
    for r in range(5):
        yield fedsim.Cohort(population, draw.permutation(8)[:4], r, fedsim.rng.root(0))


class Upper(aggregators.SideBySide):
    def combine(self, updates, weights):
        return jax.tree.map(lambda rows: jnp.max(jnp.where(weights != 0, rows, -jnp.inf)), updates)


@dataclasses.dataclass(frozen=True, eq=False)
class Damped(aggregators.Wrapper):
    """A server memory, a client memory, noise of the server and of the client."""

    def init(self, update):
        return jnp.float32(0)

    def client_memory(self, update):
        return jnp.full(update.shape, 7.0)

    def send(self, update, common, memory, key):
        sent = update + memory + common / 10 + jax.random.uniform(key)
        return aggregators.Sent(sent, memory + 1, jnp.uint32(3), jnp.float32(2.5))

    def conclude(self, accumulator, memory, key):
        update = self.finish(accumulator)
        return update + jax.random.uniform(key), memory + 1


class MeanFirst(fedsim.Algorithm):
    """Two phases: the mean of x over the cohort, then the mean of the squared distance to it, which needs the first."""

    def init(self, key):
        return {"mean": jnp.float32(0), "variance": jnp.float32(0)}

    def client_init(self, shared, client):
        return jnp.float32(0)

    def client_final(self, shared, state, client):
        size = jnp.maximum(client.num_examples, 1).astype(jnp.float32)
        return execution.ClientUpdate(state / size, size)

    def client_step(self, shared, state, batch):
        return state + jnp.sum(batch.examples["x"][:, 0], where=batch.mask)

    def server_update(self, state, update):
        return state | {"mean": update}


class Variance(MeanFirst):
    @property
    def phases(self):
        return MeanFirst(batches=self.batches), self

    def client_step(self, shared, state, batch):
        return state + jnp.sum(jnp.square(batch.examples["x"][:, 0] - shared["mean"]), where=batch.mask)

    def server_update(self, state, update):
        return state | {"variance": update}
