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
      num_rows: how many rows every sender sends.
    """

    pairs: tuple[tuple[int, int], ...]
    num_rows: int


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
      rows: those of its block that each device sends, in the order of the shifts, ``int32 [period, devices, most rows]``.
    """

    mesh: Mesh
    block: int
    places: np.ndarray
    entries: np.ndarray | None
    shifts: Sequence[tuple[Shift, ...]]
    rows: np.ndarray

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
        shifts, rows = [], []
        for number, (sender, receiver) in enumerate(zip(sources // block, takes // block, strict=True)):
            remote = np.nonzero((weights[number] > 0) & (sender != receiver))
            distance = (receiver - sender)[remote] % devices
            of_round: list[Shift] = []
            sent = np.zeros((devices, 0), np.int32)
            for shift in range(1, devices):
                taken: dict[tuple[int, int], np.ndarray] = {}
                for device in range(devices):
                    which = tuple(index[(distance == shift) & (receiver[remote] == device)] for index in remote)
                    if len(which[0]):
                        pair = (device - shift) % devices, device
                        taken[pair], at = np.unique(sources[number][which] % block, return_inverse=True)
                        places[number][which] = block + sent.shape[1] + at
                if taken:
                    more = np.zeros((devices, max(map(len, taken.values()))), np.int32)
                    for (first, _), own in taken.items():
                        more[first, : len(own)] = own
                    of_round.append(Shift(tuple(taken), more.shape[1]))
                    sent = np.concatenate([sent, more], axis=1)
            shifts.append(tuple(of_round))
            rows.append(sent)
        most = max(sent.shape[1] for sent in rows)
        padded = np.stack([np.pad(sent, ((0, 0), (0, most - sent.shape[1]))) for sent in rows])
        entries = None if targets is None else _by_device(weights > 0, takes // block, devices)
        return cls(mesh, block, places.astype(np.int32), entries, shifts, padded)

    def exchanged(self, values: Any, round: jax.Array) -> Any:
        """Returns what a device holds after the messages of a round, leaves ``[block + most rows, ...]``.

        Args:
          values: of its block, leaves ``[block, ...]``, inside a `jax.shard_map`.
          round: the number of the round, ``int32 []``.
        """
        (axis,) = self.mesh.axis_names
        number, (leaves, structure) = round % len(self.shifts), jax.tree.flatten(values)
        rows = jnp.asarray(self.rows)[number, jax.lax.axis_index(axis)]
        # Rounds in which the same devices send equally many rows share a program.
        programs = list(dict.fromkeys(self.shifts))
        program = jnp.asarray([programs.index(shifts) for shifts in self.shifts], jnp.int32)[number]
        # Leaves of one dtype are sent together.
        for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
            alike = [at for at, leaf in enumerate(leaves) if leaf.dtype == dtype]
            sent = jnp.concatenate([leaves[at].reshape(self.block, -1)[rows] for at in alike], axis=1)
            received = jax.lax.switch(program, [functools.partial(_received, shifts, axis) for shifts in programs], sent)
            ends = np.cumsum([leaves[at][0].size for at in alike])
            for at, own in zip(alike, jnp.split(received, ends[:-1], axis=1), strict=True):
                leaves[at] = jnp.concatenate([leaves[at], own.reshape(-1, *leaves[at].shape[1:])])
        return jax.tree.unflatten(structure, leaves)


def _received(shifts: Sequence[Shift], axis: str, sent: jax.Array) -> jax.Array:
    """Returns what a device receives if all send these rows, in the order of the shifts; what follows is not sent."""
    received, start = [], 0
    for pairs, num_rows in shifts:
        received.append(jax.lax.ppermute(sent[start : start + num_rows], axis, pairs))
        start += num_rows
    return jnp.concatenate([*received, sent[start:]])


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
