"""`Exchange`: base class of exchanges; `Cost`: what one costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng
from fedsim.compressors import Compressor

NODES = "nodes"  # the axis of the devices


class Cost(NamedTuple):
    """What one exchange costs.

    Attributes:
      worker: the bytes that one worker sends; where workers differ, the one that sends most.
      busiest: the bytes that the busiest node, a worker or a server, sends and receives together.
      total: the bytes of all messages of all nodes, each counted once.
      rounds: the number of rounds, in each of which a node sends at most one message and receives at most one.
      longest: the bytes on the longest path: the sum over the rounds of the size of the round's largest message.

    >>> Cost(worker=56, busiest=112, total=448, rounds=14, longest=56).seconds(alpha=1e-3, beta=1e-6)
    0.014056
    """

    worker: int
    busiest: int
    total: int
    rounds: int
    longest: int

    def seconds(self, alpha: float, beta: float) -> float:
        """Returns the seconds of the exchange in the α–β model.

        Args:
          alpha: the latency of a message, in seconds.
          beta: the seconds per byte, the inverse of a link's bandwidth.

        Raises:
          ValueError: one of them is negative.
        """
        checks.number(least=0, alpha=alpha, beta=beta)
        return alpha * self.rounds + beta * self.longest


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Base class of exchanges. Subclasses define `exchange`, and `cost_of` independently of it.

    Attributes:
      workers: n, at least 1.

    Raises:
      ValueError: ``workers`` is not a positive whole number.
    """

    workers: int

    def __post_init__(self) -> None:
        checks.whole(1, workers=self.workers)

    @property
    def nodes(self) -> int:
        """The number of nodes: the workers, and after them servers, if there are some."""
        return self.workers

    def cost(self, values: int, compressor: Compressor | None = None) -> Cost:
        """Returns the cost of an exchange, from closed forms.

        A vector that is sent in parts is padded with zeros to parts of equal size.

        Args:
          values: k, the number of values of a worker's vector, ``float32``.
          compressor: by which every message is compressed on its own, see `message_bytes`; None: not compressed.

        Raises:
          ValueError: ``values`` is not a positive whole number.

        >>> from fedsim.compressors import QSGD
        >>> from fedsim.decentralized.costs import AllToAll
        >>> AllToAll(4).cost(1000).total, AllToAll(4).cost(1000, QSGD(levels=7)).total  # 4 (4 - 1) messages
        (48000, 6048)
        """
        checks.whole(1, values=values)
        checks.instance(Compressor, "fedsim.compressors.QSGD()", or_none=True, compressor=compressor)
        return self.cost_of(values, lambda count: message_bytes(count, compressor))

    def program(self, devices: Sequence[jax.Device] | None = None) -> Any:
        """Returns a compiled function (`jax.jit`) that makes the exchange, with one device for each node.

        It maps ``[nodes, k]``, the vectors of the workers, to what each of them has afterwards. Rows of servers are ignored,
        and zero afterwards.

        Args:
          devices: at least as many as there are nodes; None: all devices.

        Raises:
          ValueError: there are fewer devices than nodes.
        """
        devices = jax.devices() if devices is None else devices
        if len(devices) < self.nodes:
            raise ValueError(
                f"Expected at least {self.nodes} devices, one for each node, got {len(devices)}: call fedsim.use_all_cores("
                f"{self.nodes}) before JAX starts, which makes virtual devices, or give fewer workers."
            )
        mesh = jax.sharding.Mesh(np.array(devices[: self.nodes]), (NODES,))
        function = jax.shard_map(
            lambda x: self.exchange(x[0])[None], mesh=mesh, in_specs=jax.P(NODES), out_specs=jax.P(NODES), check_vma=False
        )
        return jax.jit(function)

    def cost_of(self, values: int, message: Callable[[int], int]) -> Cost:
        """Returns the cost for k ``values``, where ``message`` maps a number of values to the bytes of a message of them."""
        raise NotImplementedError(f"{type(self).__name__} must define cost_of.")

    def exchange(self, x: jax.Array) -> jax.Array:
        """Returns what a node has after the exchange, ``[k]``, from its own vector ``[k]``, inside `jax.shard_map`."""
        raise NotImplementedError(f"{type(self).__name__} must define exchange.")


def message_bytes(values: int, compressor: Compressor | None = None) -> int:
    """Returns the bytes of a message of ``float32`` values, a vector.

    `IntegerQuantizer` and `PowerSGD` do not compress vectors, only matrices, so with them the message has its full size.

    Args:
      values: their number.
      compressor: its own count of bits, rounded up to bytes. Where it depends on the values, as for `MagnitudePruning`, they
        are drawn from the standard normal law. None: 4 bytes per value.

    >>> from fedsim.compressors import MagnitudePruning, UniformQuantizer
    >>> message_bytes(1000), message_bytes(1000, UniformQuantizer(levels=16))  # 4 bits per value, minimum and maximum
    (4000, 508)
    >>> message_bytes(1000, MagnitudePruning(threshold=2.0))  # 1 bit per value, and 43 values beyond 2 standard deviations
    297
    """
    if compressor is None:
        return 4 * values

    def bits() -> jax.Array:
        vector = jax.random.normal(rng.root(0), (values,), jnp.float32)
        return compressor.transmit(vector, rng.root(1), compressor.init(vector)).bits

    return -(-int(jax.jit(bits)()) // 8)  # Compiled, so that vectors of a size that is known are never made.


def send(x: jax.Array, pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Sends an array from the first node of each pair to the second one; nodes that receive nothing get zeros."""
    return jax.lax.ppermute(x, NODES, list(pairs))


def parts_of(x: jax.Array, parts: int) -> jax.Array:
    """Returns a vector ``[k]`` as ``[parts, ceil(k / parts)]``, padded with zeros."""
    return jnp.pad(x, (0, -len(x) % parts)).reshape(parts, -1)
