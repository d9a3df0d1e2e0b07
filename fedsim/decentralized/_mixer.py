"""`Mixer`: mixing matrices as arrays, which compiled rounds apply to the values of all nodes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedsim import rng, tree
from fedsim.aggregators import widened
from fedsim.decentralized._block_exchange import BlockExchange
from fedsim.decentralized._mixing import TOLERANCE, Matrix
from fedsim.decentralized._robust_mixing import RobustMixing

# Rows of matrices are padded to the longest one if that multiplies the entries by at most this. Then a loop over the places in
# a row, for all nodes at the same time, is faster than a segment sum.
_MOST_PADDING = 4
# Up to so many places in a row are summed in one pass over memory.
_MOST_FUSED = 8


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mixer:
    """The mixing matrices of a period.

    Attributes:
      sources: the nodes whose values a node takes, ``int32 [period, entries, nodes]``, or ``[period, entries]`` with
        ``targets``.
      weights: ``float64``, the weights, like ``sources``; 0 where a node takes fewer values.
      links: ``int32``, like ``sources``: the number of the link over which the value comes, from 1, the same in both
        directions; 0 for the own value.
      receivers: ``float32 [period, nodes]``, to how many others a node sends.
      rest: ``float64 [period, nodes]``, by how much the sum of a node's weights exceeds 1, which is 0 in most matrices.
      targets: None, or the nodes that take the values, ``int32 [period, entries]``.
      blocks: what devices send each other, if each has the values of a block of nodes; None if every device has all values.

    >>> from fedsim.decentralized import ring
    >>> mixer = Mixer.of(ring(4).matrices())
    >>> mixer({"w": jnp.array([[3.0], [0.0], [0.0], [0.0]])}, round=jnp.int32(0))["w"].ravel().tolist()
    [1.0, 1.0, 0.0, 1.0]
    """

    sources: Any
    weights: Any
    links: Any
    receivers: Any
    rest: Any
    targets: Any = None
    blocks: BlockExchange | None = None

    @classmethod
    def of(cls, matrices: Sequence[Matrix], *, padded: bool = False, mesh: Mesh | None = None) -> Mixer:
        """Returns the mixer of matrices ``[nodes, nodes]``.

        Args:
          matrices: of a period.
          padded: whether all rows have equally many entries; otherwise they have if that is faster.
          mesh: the devices that the nodes are divided over, in blocks of equal size; None: every device has all nodes.
        """
        nodes, period = matrices[0].shape[0], len(matrices)
        entries = [matrix.tocoo() for matrix in matrices]
        receivers = [np.bincount(each.col[each.row != each.col], minlength=nodes) for each in entries]
        rest = np.array([matrix.sum(axis=1) - 1 for matrix in matrices])
        width = max(int(np.diff(matrix.indptr).max()) for matrix in matrices)
        most = max(matrix.nnz for matrix in matrices)
        padded = padded or width * nodes <= _MOST_PADDING * most
        shape = (period, width, nodes) if padded else (period, most)
        weights, links = np.zeros(shape), np.zeros(shape, np.int32)
        targets = np.full(shape, nodes - 1, np.int32)  # sorted, also those of entries with weight 0
        # With weight 0 a node takes its own value, so that no other one can reach it that is not finite.
        sources = np.broadcast_to(np.arange(nodes, dtype=np.int32), shape).copy() if padded else targets.copy()
        for number, (matrix, each) in enumerate(zip(matrices, entries, strict=True)):
            place = np.arange(matrix.nnz)
            at = (place - matrix.indptr[each.row], each.row) if padded else (place,)
            sources[number][at], weights[number][at], targets[number][at] = each.col, each.data, each.row
            links[number][at] = numbered_links(each.row, each.col)
        listed = None if padded else targets
        return cls(
            sources=sources,
            weights=weights,
            links=links,
            receivers=np.array(receivers, np.float32),
            rest=np.where(np.abs(rest) <= TOLERANCE, 0, rest),
            targets=listed,
            blocks=None if mesh is None else BlockExchange.of(sources, weights, listed, nodes, mesh),
        )

    def __call__(
        self, values: Any, round: jax.Array, message_loss: MessageLoss | None = None, sent: Any = None,
        robust: RobustMixing | None = None, *, difference: bool = False,
    ) -> Any:  # fmt: skip
        """Returns, for every node i, the sum over j of W_ij times the value of j.

        It is computed as the own value plus the sum of W_ij times the difference between the values of j and i, so nodes that
        agree stay where they are, although weights are rounded. Sums are at least ``float32``, and rounded once.

        Args:
          values: a pytree of floats, leaves ``[nodes, ...]``.
          round: the number of the round, ``int32 []``, which chooses the matrix of the period.
          message_loss: which messages are lost; None: none.
          sent: what the nodes send, like ``values``; None: the values.
          robust: replaces the sum; the mixer must be padded.
          difference: whether to return the difference to the own value.

        Raises:
          ValueError: a leaf of ``values`` is not of floats, or does not have an entry for every node.
        """
        nodes = self.receivers.shape[1]
        for leaf in jax.tree.leaves(values):
            if not tree.is_float(leaf):
                raise ValueError(f"Expected floats to mix, got values of dtype {leaf.dtype}: use values.astype(jnp.float32).")
            if leaf.shape[:1] != (nodes,):
                raise ValueError(f"Expected values [{nodes}, ...] to mix, one per node, got {list(leaf.shape)}.")
        taken = self._taken(round, message_loss, attacked=sent is not None, robust=robust is not None)
        mix = functools.partial(self._mixed, robust, difference)
        if self.blocks is None:
            return mix(values, sent, taken, round)
        (axis,) = self.blocks.mesh.axis_names
        rows, columns = P(axis), P(None, axis) if self.targets is None else P(axis)
        specs = rows, rows, Taken(columns, columns, rows, columns), P()
        on_devices = jax.shard_map(mix, mesh=self.blocks.mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return on_devices(values, sent, taken, round)

    def _taken(self, round: jax.Array, message_loss: MessageLoss | None, *, attacked: bool, robust: bool) -> Taken:
        """Returns what nodes take in a round.

        Args:
          round, message_loss: as above.
          attacked: whether what is sent differs from what nodes have; it is held behind that.
          robust: whether own values have the weight 0.
        """
        nodes, blocks = self.receivers.shape[1], self.blocks
        block = nodes if blocks is None else blocks.block

        def of_round(x: Any) -> jax.Array:
            return jnp.asarray(x)[round % len(self.weights)]

        weights, links = of_round(self.weights), of_round(self.links)
        takes = jnp.arange(nodes, dtype=jnp.int32) if self.targets is None else of_round(self.targets)
        own = jnp.broadcast_to(takes, weights.shape) % block  # where the device of a node holds the node's own value
        places = of_round(self.sources if blocks is None else blocks.places)
        arrives, rest = links > 0, of_round(self.rest)
        if message_loss is not None:
            lost = message_loss.lost(links)
            arrives &= ~lost
            if message_loss.stays_with_sender:
                missing, everyone = jnp.where(lost, weights, 0), jnp.broadcast_to(takes, weights.shape)
                rest = rest.at[of_round(self.sources)].add(missing).at[everyone].add(-missing)
                weights = jnp.where(lost, 0, weights)
            else:
                places = jnp.where(lost, own, places)
        if attacked:
            places = jnp.where(arrives, places + block, places)
        if robust:
            weights = jnp.where(links > 0, weights, 0)
        if self.targets is None:
            return Taken(places, weights, rest, None)
        if blocks is None:
            return Taken(places, weights, rest, own)
        entries = of_round(blocks.entries)
        targets = own.at[entries].get(mode="fill", fill_value=block - 1)
        places = places.at[entries].get(mode="fill", fill_value=block - 1)
        return Taken(places, weights.at[entries].get(mode="fill", fill_value=0), rest, targets)

    def _mixed(
        self, robust: RobustMixing | None, difference: bool, values: Any, sent: Any, taken: Taken, round: jax.Array
    ) -> Any:
        """Mixes the values of all nodes, or of those of a device, leaves ``[nodes, ...]``."""
        held = values if sent is None else sent
        if self.blocks is not None:
            held = self.blocks.exchanged(held, round)
        if sent is not None:
            held = jax.tree.map(lambda own, x: jnp.concatenate([own, x]), values, held)
        own, held = map(widened, (values, held))
        if robust is not None:
            received = jax.tree.map(lambda x: x[taken.places], held)
            mixed = jax.vmap(robust, in_axes=(0, 1, 1))(own, received, taken.weights)
            mixed = tree.subtract(mixed, own) if difference else mixed
        else:
            mixed = jax.tree.map(lambda x, others: _pull(x, others, taken), own, held)
            mixed = mixed if difference else tree.add(own, mixed)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), mixed, values)


class Taken(NamedTuple):
    """What nodes take in a round.

    Attributes:
      places: where their device holds the values, ``int32 [entries, nodes]``, or ``[entries]`` with ``targets``.
      weights: floats like ``places``, ``float64`` with x64.
      rest: by how much the sum of a node's weights exceeds 1, floats ``[nodes]``.
      targets: None, or which node of the device takes each value, ``int32 [entries]``.
    """

    places: Any
    weights: Any
    rest: Any
    targets: Any


class MessageLoss(NamedTuple):
    """Which messages of a round are lost.

    Attributes:
      key: the PRNG key of the round.
      messages: the probability that a message is lost.
      links: the probability that a link loses the messages in both directions.
      stays_with_sender: whether what is lost is added to what the sender keeps, so that columns still sum to 1; otherwise the
        receiver uses its own value in its place, so that rows do.
    """

    key: jax.Array
    messages: float | jax.Array
    links: float | jax.Array
    stays_with_sender: bool

    def lost(self, links: jax.Array) -> jax.Array:
        """Returns whether each message is lost, ``bool`` like the numbers of links, which are 0 for own values."""
        of_links, of_messages = jax.random.split(self.key)
        uniform = jax.vmap(lambda link: jax.random.uniform(jax.random.fold_in(of_links, link), (), jnp.float32))(links.ravel())
        fails = uniform.reshape(links.shape) < self.links
        return (links > 0) & (fails | (jax.random.uniform(of_messages, links.shape, jnp.float32) < self.messages))


def numbered_links(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Numbers the unordered pairs of different nodes from 1; 0 for equal ones."""
    pairs = np.stack([np.minimum(rows, columns), np.maximum(rows, columns)], axis=1)
    _, number = np.unique(pairs, axis=0, return_inverse=True)
    return np.where(rows == columns, 0, number.ravel() + 1)


class Neighbours:
    """What the nodes exchange in a round.

    Args:
      mixer: the mixing matrices.
      round: the number of the round.
      key: the PRNG key of the round's exchange.
      message_loss: which messages are lost; None: none.
      corrupt: a function of values ``[nodes, ...]`` and a key to what is sent in their place; None: no node is malicious.
      robust: replaces the weighted mean of what a node has and receives; None: nothing does.

    Attributes:
      key, message_loss: as above.
      bits: the bits of all messages so far, ``float32 []``.

    >>> from fedsim.decentralized import ring
    >>> neighbours = Neighbours(Mixer.of(ring(4).matrices()), jnp.int32(0), jax.random.key(0))
    >>> _ = neighbours.mix(jnp.ones([4, 10]))
    >>> float(neighbours.bits)  # 8 messages of 10 floats
    2560.0
    """

    def __init__(
        self, mixer: Mixer, round: jax.Array, key: jax.Array, message_loss: MessageLoss | None = None,
        corrupt: Callable[[Any, jax.Array], Any] | None = None, robust: RobustMixing | None = None,
    ) -> None:  # fmt: skip
        self._mixer, self._round, self._corrupt, self._robust = mixer, round, corrupt, robust
        self.key, self.message_loss, self.bits, self._calls = key, message_loss, jnp.float32(0), 0

    def mix(
        self, values: Any, bits: jax.Array | float | None = None, *, keeps_sum: bool = False, difference: bool = False,
        trusted: bool = False,
    ) -> Any:  # fmt: skip
        """Sends values to neighbours, and returns for every node i the sum over j of W_ij times the value of j.

        Attackers send something else, and robust mixing replaces the sum. If several values are mixed in a round, the same
        messages are lost.

        Args:
          values: a pytree of floats, leaves ``[nodes, ...]``.
          bits: the size of a node's message, a number or ``[nodes]``; None: that of the uncompressed value.
          keeps_sum: whether the sum over nodes must not change, for values that nodes keep for ever. If the columns of the
            matrix sum to 1, the sender then keeps what is lost, whatever the algorithm does with other values.
          difference: whether to return the difference to the own value, which is more exact than to subtract it afterwards.
          trusted: whether attackers send these values as they are, and nothing replaces the sum, as for running statistics.
        """
        receivers = jnp.asarray(self._mixer.receivers)[self._round % len(self._mixer.receivers)]
        bits = tree.num_bits(values) / len(receivers) if bits is None else bits
        self.count(jnp.sum(receivers * jnp.asarray(bits, jnp.float32)))
        sent = None
        if self._corrupt is not None and not trusted:
            sent = self._corrupt(values, jax.random.fold_in(rng.stream(self.key, "attack"), self._calls))
            self._calls += 1
        loss = self.message_loss
        loss = loss._replace(stays_with_sender=loss.stays_with_sender or keeps_sum) if loss is not None else None
        robust = None if trusted else self._robust
        return self._mixer(values, self._round, loss, sent, robust, difference=difference)

    def count(self, bits: jax.Array | float) -> None:
        """Adds the bits of messages that are sent in another way than by `mix`."""
        self.bits = self.bits + jnp.asarray(bits, jnp.float32)  # An int may be larger than int32.


def _pull(own: jax.Array, held: jax.Array, taken: Taken) -> jax.Array:
    """Returns the weighted sums of the differences between what nodes take and what they have, like ``own``."""

    def scaled(own: jax.Array, places: jax.Array, weights: jax.Array) -> jax.Array:
        return (held[places] - own) * tree.per_row(weights, own).astype(own.dtype)

    places, weights, rest, targets = taken
    if targets is not None:
        total = jax.ops.segment_sum(scaled(own[targets], places, weights), targets, len(own), indices_are_sorted=True)
    elif len(weights) <= _MOST_FUSED:
        total = functools.reduce(jnp.add, map(functools.partial(scaled, own), places, weights))
    else:
        add = lambda entry, total: total + scaled(own, places[entry], weights[entry])  # noqa: E731
        total = jax.lax.fori_loop(1, len(weights), add, scaled(own, places[0], weights[0]))
    return total + tree.per_row(rest, own).astype(own.dtype) * own
