"""`BlockExchange`: what devices send each other if each of them has the values of a block of nodes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh


class Shift(NamedTuple):
    """What devices send at the same time, each to the one at a certain distance behind it.

    Attributes:
      pairs: of a sender and a receiver; devices from which nothing is taken send nothing.
      rows: those of its block that each device sends, ``int32 [devices, rows]``.
    """

    pairs: list[tuple[int, int]]
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class BlockExchange:
    """Which rows of their blocks devices send each other so that each has all values that its nodes take, each row once.

    A device then holds the values of its block, and behind them the values that it has received. Messages that are sent at the
    same time have as many rows as the longest of them.

    Attributes:
      mesh: the devices.
      block: the number of nodes of each device.
      places: where a device holds each value that its nodes take, ``int32``, like the sources.
      entries: which of the values each device takes, ``int32 [period, devices * entries]``, if they are listed with their
        targets; beyond the end of the list where a device takes fewer. Otherwise None.
      shifts: for each round of a period.
      most_received: the most rows that a device receives in a round.
    """

    mesh: Mesh
    block: int
    places: np.ndarray
    entries: np.ndarray | None
    shifts: Sequence[Sequence[Shift]]
    most_received: int

    @classmethod
    def of(cls, sources: np.ndarray, weights: np.ndarray, targets: np.ndarray | None, nodes: int, mesh: Mesh) -> BlockExchange:
        """Returns what devices send each other, see `fedsim.decentralized._mixer.Mixer` for the first three arguments.

        Args:
          sources, weights, targets: the nodes whose values other nodes take. Values of weight 0 are not sent.
          nodes: their number, a multiple of the number of devices.
          mesh: the devices.
        """
        devices, block = mesh.size, nodes // mesh.size
        takes = np.broadcast_to(np.arange(nodes), sources.shape) if targets is None else targets
        places = np.where(weights > 0, sources, takes) % block
        shifts, most_received = [], 0
        for number, (sender, receiver) in enumerate(zip(sources // block, takes // block, strict=True)):
            remote = np.nonzero((weights[number] > 0) & (sender != receiver))
            distance = (receiver - sender)[remote] % devices
            of_round, received = [], 0
            for shift in range(1, devices):
                pairs, rows = [], []
                for device in range(devices):
                    which = tuple(index[(distance == shift) & (receiver[remote] == device)] for index in remote)
                    taken, at = np.unique(sources[number][which] % block, return_inverse=True)
                    places[number][which] = block + received + at
                    if len(taken):
                        pairs.append(((device - shift) % devices, device))
                        rows.append(taken)
                if pairs:
                    sent = np.zeros((devices, max(map(len, rows))), np.int32)
                    for (first, _), taken in zip(pairs, rows, strict=True):
                        sent[first, : len(taken)] = taken
                    of_round.append(Shift(pairs, sent))
                    received += sent.shape[1]
            shifts.append(of_round)
            most_received = max(most_received, received)
        entries = None if targets is None else _by_device(weights > 0, takes // block, devices)
        return cls(mesh, block, places.astype(np.int32), entries, shifts, most_received)

    def exchanged(self, values: Any, round: jax.Array) -> Any:
        """Returns what a device holds after the messages of a round, leaves ``[block + most_received, ...]``.

        Args:
          values: of its block, leaves ``[block, ...]``, inside a `jax.shard_map`.
          round: the number of the round, ``int32 []``.
        """
        (axis,) = self.mesh.axis_names

        def run(shifts: Sequence[Shift], x: jax.Array) -> jax.Array:
            device = jax.lax.axis_index(axis)
            received = [jax.lax.ppermute(x[jnp.asarray(rows)[device]], axis, pairs) for pairs, rows in shifts]
            missing = self.most_received - sum(map(len, received))
            return jnp.concatenate([x, *received, jnp.zeros((missing, *x.shape[1:]), x.dtype)])

        programs = [functools.partial(run, shifts) for shifts in self.shifts]
        if len(programs) == 1:
            return jax.tree.map(programs[0], values)
        return jax.tree.map(lambda x: jax.lax.switch(round % len(programs), programs, x), values)


def _by_device(used: np.ndarray, receiver: np.ndarray, devices: int) -> np.ndarray:
    """Returns the entries of each device, ``int32 [period, devices * entries]``."""
    own = [
        [np.flatnonzero(of_round & (to == device)) for device in range(devices)]
        for of_round, to in zip(used, receiver, strict=True)
    ]
    entries = np.full((len(used), devices, max(len(at) for of_round in own for at in of_round)), used.shape[1], np.int32)
    for number, of_round in enumerate(own):
        for device, at in enumerate(of_round):
            entries[number, device, : len(at)] = at
    return entries.reshape(len(used), -1)
