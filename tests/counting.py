"""Algorithms, aggregators and executions for tests: client memory, rounds with two calls, aggregator memory."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedsim
from fedsim import aggregators

EXECUTIONS = {
    "jit, 3 lanes, streamed": fedsim.Jit(lanes=3, memory="stream"),
    "pmap, 2 devices, 2 lanes": fedsim.Pmap(devices=2, lanes=2),
    "debug": fedsim.Debug(),
    "jit": fedsim.Jit(),
    "jit, on the device": fedsim.Jit(memory="resident"),
    "jit, streamed": fedsim.Jit(memory="stream"),
    "pmap, 8 devices, streamed": fedsim.Pmap(devices=8, memory="stream"),
}
BATCHES = fedsim.Batches(size=4, epochs=2)
PREVIEW = fedsim.Batches(size=3, shuffle=False)


def add_first_feature(total, batch):
    return total + jnp.sum(batch.examples["x"][:, 0], where=batch.mask)


class Memory(NamedTuple):
    visits: jax.Array
    total: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Counting(fedsim.Algorithm):
    """Client memory holds the number of rounds and the sums of the received states and of the first feature of the examples."""

    refuse: float = -1.0

    def init(self, key):
        return jnp.float32(0)

    def client_memory(self, shared):
        return Memory(jnp.int32(0), jnp.full((2,), 100.0))

    def client_update(self, shared, client):
        total = client.for_each_batch(PREVIEW, add_first_feature, jnp.float32(0), "look")
        steps = client.for_each_batch(self.batches, lambda steps, batch: steps + 1, jnp.float32(1000))
        memory = Memory(client.memory.visits + 1, client.memory.total + jnp.stack([shared, total]))
        bad = client.position == jnp.int32(self.refuse)
        update = jnp.where(bad, jnp.nan, total + steps)
        return fedsim.ClientUpdate(update, jnp.float32(1), {"seen": total, "visits": memory.visits}, memory)

    def server_update(self, state, update, info):
        return state + update


def expected_state(rounds, refuse=-1.0):
    """Runs `Counting` in plain Python; returns the server state and the memory by client id."""
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


class Maximum(aggregators.StackAggregator):
    def combine(self, updates, weights):
        return jax.tree.map(lambda rows: jnp.max(jnp.where(weights != 0, rows, -jnp.inf)), updates)


@dataclasses.dataclass(frozen=True, eq=False)
class Damped(aggregators.Wrapper):
    """An aggregator with server memory, client memory, server noise and client noise."""

    def init(self, update):
        return jnp.float32(0)

    def client_memory(self, update):
        return jnp.full(update.shape, 7.0)

    def send(self, update, common, memory, key):
        sent = update + memory + common / 10 + jax.random.uniform(key)
        return aggregators.Sent(sent, memory + 1, jnp.uint32(3), jnp.float32(2.5))

    def finish_round(self, accumulator, memory, key):
        update = self.finish(accumulator)
        return update + jax.random.uniform(key), memory + 1


class Variance(fedsim.Algorithm):
    """Two calls of the clients: the cohort's mean of x, then the mean of the squared distance to that mean."""

    def init(self, key):
        return {"mean": jnp.float32(0), "variance": jnp.float32(0)}

    def round(self, state, clients):
        mean, _ = clients.aggregate(self.client_mean, state, name="mean")
        state = state | {"mean": mean}
        variance, info = clients.aggregate(self.client_variance, state)
        return state | {"variance": variance}, info

    def client_mean(self, shared, client):
        return self.mean_of(client, lambda x: x)

    def client_variance(self, shared, client):
        return self.mean_of(client, lambda x: jnp.square(x - shared["mean"]))

    def mean_of(self, client, f):
        def add(total, batch):
            return total + jnp.sum(f(batch.examples["x"][:, 0]), where=batch.mask)

        size = jnp.maximum(client.num_examples, 1).astype(jnp.float32)
        return fedsim.ClientUpdate(client.for_each_batch(self.batches, add, jnp.float32(0)) / size, size)
