"""Exchanges among equal workers, or by servers, after which every worker has the mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.decentralized.costs._exchange import NODES, Cost, Exchange, parts_of, send


@dataclasses.dataclass(frozen=True)
class AllToAll(Exchange):
    """Every worker sends its vector to every other one: k n (n - 1) in total.

    >>> AllToAll(8).cost(1)
    Cost(worker=28, busiest=56, total=224, rounds=7, longest=28)
    """

    def cost_of(self, values: int, message: Callable[[int], int]) -> Cost:
        others, size = self.workers - 1, message(values)
        return Cost(others * size, 2 * others * size, self.workers * others * size, others, others * size)

    def exchange(self, x: jax.Array) -> jax.Array:
        n = self.workers
        return sum((send(x, ((i, (i + shift) % n) for i in range(n))) for shift in range(1, n)), start=x) / n


@dataclasses.dataclass(frozen=True)
class ParameterServer(Exchange):
    """Every worker sends k to the servers and receives the mean, k: k n / s into each server, and as much out of it.

    Each server has its own part of the values. Servers are nodes of their own.

    Attributes:
      workers: n.
      servers: s, nodes that are not workers.

    Raises:
      ValueError: ``workers`` or ``servers`` is not a positive whole number.

    >>> ParameterServer(6, servers=2).cost(100)
    Cost(worker=400, busiest=2400, total=4800, rounds=12, longest=2400)
    """

    servers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, servers=self.servers)

    @property
    def nodes(self) -> int:
        """n + s."""
        return self.workers + self.servers

    def cost_of(self, values: int, message: Callable[[int], int]) -> Cost:
        n, s = self.workers, self.servers
        size, most = message(-(-values // s)), max(n, s)
        return Cost(s * size, 2 * most * size, 2 * n * s * size, 2 * most, 2 * most * size)

    def exchange(self, x: jax.Array) -> jax.Array:
        n, s, rounds = self.workers, self.servers, max(self.workers, self.servers)
        parts, node = parts_of(x, s), jax.lax.axis_index(NODES)
        # In round t, server j and worker (j + t) % rounds have a message for each other, about part j.
        pairs = [[((j + t) % rounds, n + j) for j in range(s) if (j + t) % rounds < n] for t in range(rounds)]
        part = [(node - t) % rounds for t in range(rounds)]
        result, total = jnp.zeros_like(parts), jnp.zeros_like(parts[0])
        for t in range(rounds):
            total = total + send(parts.at[part[t]].get(mode="clip"), pairs[t])
        mean = total / n
        for t in range(rounds):
            received = send(mean, ((server, worker) for worker, server in pairs[t]))
            result = jnp.where(node < n, result.at[part[t]].set(received, mode="drop"), result)
        return result.reshape(-1)[: len(x)]


@dataclasses.dataclass(frozen=True)
class RingAllReduce(Exchange):
    """Parts of the vectors go around a ring, to sum them, and once more, to distribute the sums: 2 k (n - 1) / n per worker.

    This is also what `moved` counts for `jax.lax.psum`, and for `jax.lax.psum_scatter` followed by `jax.lax.all_gather`.

    >>> RingAllReduce(8).cost(16)
    Cost(worker=112, busiest=224, total=896, rounds=14, longest=112)
    """

    def cost_of(self, values: int, message: Callable[[int], int]) -> Cost:
        rounds = 2 * (self.workers - 1)
        sent = rounds * message(-(-values // self.workers))
        return Cost(sent, 2 * sent, self.workers * sent, rounds, sent)

    def exchange(self, x: jax.Array) -> jax.Array:
        n, node = self.workers, jax.lax.axis_index(NODES)
        parts, pairs = parts_of(x, n), [(i, (i + 1) % n) for i in range(n)]
        for t in range(n - 1):
            parts = parts.at[(node - t - 1) % n].add(send(parts[(node - t) % n], pairs))
        parts = parts / n  # Part node + 1 is complete.
        for t in range(n - 1):
            parts = parts.at[(node - t) % n].set(send(parts[(node + 1 - t) % n], pairs))
        return parts.reshape(-1)[: len(x)]


@dataclasses.dataclass(frozen=True)
class RecursiveHalving(Exchange):
    """Rabenseifner's algorithm: pairs exchange halves, then quarters and so on, and double them back.

    It sends as much as the ring in 2 log2 n instead of 2 (n - 1) rounds. If n is not a power of two, the workers beyond the
    largest power of two in n first send their whole vectors to others, and receive the mean at the end.

    >>> RecursiveHalving(8).cost(16)
    Cost(worker=112, busiest=224, total=896, rounds=6, longest=112)
    """

    def cost_of(self, values: int, message: Callable[[int], int]) -> Cost:
        doublings = self.workers.bit_length() - 1
        power = 1 << doublings
        more, part = self.workers - power, -(-values // power)
        # Both halves of the algorithm send messages of 1, 2, 4, ... parts.
        halved = 2 * sum(message(part << doubling) for doubling in range(doublings))
        whole = message(values) if more else 0
        sent, rounds = halved + whole, 2 * doublings + 2 * (more > 0)
        return Cost(sent, 2 * sent, power * halved + 2 * more * whole, rounds, halved + 2 * whole)

    def exchange(self, x: jax.Array) -> jax.Array:
        node, power = jax.lax.axis_index(NODES), 1 << (self.workers.bit_length() - 1)
        extra = [(power + i, i) for i in range(self.workers - power)]
        total = parts_of(x + send(x, extra) if extra else x, power).reshape(-1)
        distances = [power >> bit for bit in range(1, power.bit_length())]  # power / 2, ..., 2, 1
        pairs = {distance: [(i, i ^ distance) for i in range(power)] for distance in distances}
        for distance in distances:
            halves, upper = total.reshape(2, -1), (node // distance) % 2
            total = halves[upper] + send(halves[1 - upper], pairs[distance])
        mean = total / self.workers
        for distance in reversed(distances):
            received, upper = send(mean, pairs[distance]), (node // distance) % 2
            mean = jnp.where(upper == 1, jnp.concatenate([received, mean]), jnp.concatenate([mean, received]))
        mean = mean[: len(x)]
        return jnp.where(node < power, mean, send(mean, ((i, j) for j, i in extra))) if extra else mean
