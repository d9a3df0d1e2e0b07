"""Exchanges along trees: sums go up to worker 0, and the mean goes down again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedsim.decentralized.costs._exchange import NODES, Cost, Exchange, send

Pairs = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Tree(Exchange):
    """Base class of exchanges along trees."""

    def rounds(self) -> list[Pairs]:
        """Returns who sends to whom in the rounds in which sums go up."""
        raise NotImplementedError(f"{type(self).__name__} must define rounds.")

    def exchange(self, x: jax.Array) -> jax.Array:
        rounds, node = self.rounds(), jax.lax.axis_index(NODES)
        for pairs in rounds:
            x = x + send(x, pairs)
        x = x / self.workers
        for pairs in reversed(rounds):
            received = send(x, ((parent, child) for child, parent in pairs))
            x = jnp.where(jnp.isin(node, jnp.array([child for child, _ in pairs])), received, x)
        return x


@dataclasses.dataclass(frozen=True)
class BinomialTree(Tree):
    """A binomial tree, in which the number of workers that have not sent their sum yet halves in every round.

    Everyone sends whole vectors: 2 k (n - 1) in total, in 2 log2 n rounds. Worker 0 sends most, k log2 n; half of the
    workers send k.

    >>> BinomialTree(8).cost(100)
    Cost(worker=1200, busiest=2400, total=5600, rounds=6, longest=2400)
    """

    def cost_of(self, values: int, message: Callable[[int], int]) -> Cost:
        depth, size = (self.workers - 1).bit_length(), message(values)
        return Cost(depth * size, 2 * depth * size, 2 * (self.workers - 1) * size, 2 * depth, 2 * depth * size)

    def rounds(self) -> list[Pairs]:
        distances = [1 << bit for bit in range((self.workers - 1).bit_length())]
        return [[(i, i - distance) for i in range(distance, self.workers, 2 * distance)] for distance in distances]


@dataclasses.dataclass(frozen=True)
class BinaryTree(Tree):
    """The tree of `fedsim.decentralized.binary_tree`, level by level, in which no worker has more than three neighbours.

    Everyone sends whole vectors: 2 k (n - 1) in total, and k per neighbour. A worker receives from its first child, then from
    its second one.

    >>> BinaryTree(7).cost(100)
    Cost(worker=1200, busiest=2400, total=4800, rounds=8, longest=3200)
    """

    def cost_of(self, values: int, message: Callable[[int], int]) -> Cost:
        n, size = self.workers, message(values)
        degree = min(3, (n + 1) // 2) if n > 1 else 0
        depth = n.bit_length() - 1
        # If n is a power of two, the last level is a single first child.
        rounds = 2 * (2 * depth - (n > 1 and n == 1 << depth))
        return Cost(degree * size, 2 * degree * size, 2 * (n - 1) * size, rounds, rounds * size)

    def rounds(self) -> list[Pairs]:
        depth = self.workers.bit_length() - 1
        levels = [range((1 << level) - 1, min((2 << level) - 1, self.workers)) for level in range(depth, 0, -1)]
        return [[(i, (i - 1) // 2) for i in level[side::2]] for level in levels for side in (0, 1) if len(level) > side]
