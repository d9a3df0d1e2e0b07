"""Random draws on the host: one stream per purpose, in blocks of dispatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import jax
import numpy as np

from fedsim import rng

T = TypeVar("T")

BLOCK = 4096  # dispatches


def purpose_generator(key: jax.Array, purpose: str, block: int = 0) -> np.random.Generator:
    """Returns the generator of a purpose, for draws once per client, or for a block of dispatches.

    Args:
      key: the run's root key.
      purpose: the purpose.
      block: the number of the block.

    >>> key = rng.root(0)
    >>> float(purpose_generator(key, "latency").random()) == float(purpose_generator(key, "delay").random())
    False
    """
    words = rng.words(rng.stream(rng.stream(key, "systems"), purpose))
    return rng.generator(np.asarray(words), block)


class Blocks(Generic[T]):
    """What each dispatch draws, as a function of the number of the dispatch alone.

    The draws of a block of dispatches are made at once and kept until a dispatch of another block asks. So the memory does not
    grow, and a run can begin at any dispatch.

    Args:
      draw: a function from the number of a block to the draws of its `BLOCK` dispatches.

    >>> factors = Blocks(lambda block: purpose_generator(rng.root(0), "variation", block).random(BLOCK).tolist())
    >>> factors[5000] == factors[5], factors[5] == factors[5]
    (False, True)
    """

    def __init__(self, draw: Callable[[int], Sequence[T]]) -> None:
        self._draw = draw
        self._block = -1
        self._values: Sequence[T] = ()

    def __getitem__(self, number: int) -> T:
        block, index = divmod(number, BLOCK)
        if block != self._block:
            self._block, self._values = block, self._draw(block)
        return self._values[index]
