"""One call of `Clients.aggregate` or `Clients.map`: what the server sends, and what clients send back and keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng, tree
from fedsim.aggregators import Aggregator, with_aux_of, with_empty_aux
from fedsim.attacks import Attack
from fedsim.model import ModelParts
from fedsim.rounds._client import Client, ClientPlan, ClientUpdate
from fedsim.rounds._state import Shared, with_params

# Names that `RoundInfo.clients` has for every algorithm. Where the aggregator sends updates as they are, an algorithm may
# report bits itself.
_NAMES_OF_BITS = {"bits_up", "entropy_bits_up"}
_NAMES = {
    "num_examples",
    "num_steps",
    "weight",
    "dropped",
    "attacker",
    "staleness",
    "update_norm",
    "bits_down",
} | _NAMES_OF_BITS


class Call(NamedTuple):
    """A call of `Clients.aggregate`, `Clients.map` or `Clients.map_rows` in a round.

    Attributes:
      name: unique in the round.
      work_name: the name of the clients' work, for error messages.
      key: the root key of the call.
      shared: what the clients receive.
      statistics: the running statistics of the model that they receive besides, and send; () if there are none.
      bits_down: the size of that message.
      aggregator: of the updates; None for `Clients.map`.
      downlink: compresses what the clients receive; None sends it as it is.
      fold: accumulates the updates: ``aggregator``, or the wrapper that a colluding attack adds to it; None for `Clients.map`.
      clients: what is known of each client before its work, `ClientPlan` with leaves ``[slots, ...]``.
      rows: the clients' own values for `Clients.map_rows`, leaves ``[clients of the population, ...]``; None for the others.
      is_divisible: whether the rows may be divided over devices.

    A subclass of `Clients` gets it, and runs the work for it:

    >>> import types
    >>> from fedsim.rounds import Clients, RoundPlan
    >>> class Described(Clients):
    ...     def _map(self, call, work): return call.name, call.work_name, call.num_entries
    >>> plan = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), RoundPlan.shapes(slots=3))
    >>> clients = Described(types.SimpleNamespace(staleness=None), plan, jax.random.key(0))
    >>> def size(shared, client): return client.num_examples
    >>> clients.map(size, shared=())
    ('map', 'size', 3)
    """

    name: str
    work_name: str
    key: jax.Array
    shared: Shared
    statistics: Any
    bits_down: jax.Array
    aggregator: Aggregator | None
    downlink: Any
    fold: Aggregator | None
    clients: ClientPlan
    rows: Any = None
    is_divisible: bool = False

    @property
    def num_entries(self) -> int:
        """The number of clients that have a place among the entries: those of ``rows``, or all slots."""
        return len(self.clients.slot) if self.rows is None else len(jax.tree.leaves(self.rows)[0])


class Received(NamedTuple):
    """What the server receives from a client, and what the client keeps.

    Attributes:
      update: zeros if the client took no step or what it sent is not finite, or what the aggregator sends of zeros, see
        `Aggregator.counts_nonfinite`.
      entries: what the client adds to the round's info; its ``weight`` is 0 if the update does not count.
      memory: what the client keeps for the algorithm; with parts of the model that it keeps, a pair of the two.
      aggregator_memory: what the client keeps for the aggregator of this call.
    """

    update: Any
    entries: dict[str, Any]
    memory: Any
    aggregator_memory: Any


def send_down(downlink: Any, shared: Shared, memory: Any, key: jax.Array) -> tuple[Shared, Any, jax.Array]:
    """Sends ``shared`` to the clients.

    Args:
      downlink: a compressor of the floats in ``shared.params``, or of all floats if ``shared`` has no ``params``; None sends
        everything as it is.
      shared: what the server sends, a pytree of arrays.
      memory: what the server keeps for the compressor, at first ``downlink.init`` of the list of these floats; () for None.
      key: the compressor's randomness.

    Returns:
      What the clients receive, the new memory, and the size of the message in bits, ``[]`` (see `fedsim.tree.bits_dtype`).

    >>> from fedsim.compressors import Cast
    >>> shared, key = {"w": jnp.array([0.1, 0.2]), "round": jnp.int32(3)}, jax.random.key(0)
    >>> [send_down(downlink, shared, (), key)[2].item() for downlink in (None, Cast())]
    [96, 64]
    """
    plain = tree.num_bits(shared)
    if downlink is None:
        return shared, memory, tree.add_bits(plain, most=plain)
    floats = compressed_floats(shared)
    sent = downlink.transmit(floats, key, memory)
    received = iter(sent.value)
    params = jax.tree.map(lambda x: next(received) if tree.is_float(x) else x, getattr(shared, "params", shared))
    bits = tree.add_bits(sent.bits, plain - tree.num_bits(floats), most=tree.most_bits(plain, compressed=True))
    return with_params(shared, params), sent.memory, bits


def compressed_floats(shared: Shared) -> list[Any]:
    """Returns the floats that a downlink compresses: those of ``shared.params``, or all if ``shared`` has no ``params``."""
    return [leaf for leaf in jax.tree.leaves(getattr(shared, "params", shared)) if tree.is_float(leaf)]


def send_up(
    call: Call,
    client: Client,
    result: ClientUpdate,
    server_memory: Any,
    aggregator_memory: Any,
    attack: Attack | None,
    attacks: jax.Array,
    *,
    with_norm: bool,
) -> Received:
    """Sends a client's update to the server, once, after the client's last step.

    An attacker corrupts the update, then the aggregator's `send` compresses or clips it. The update does not count if the
    client took no step, or if the update or what the client would keep is not finite. Then zeros arrive, since a weight of 0
    alone would not do: 0 times NaN is NaN. With `Aggregator.counts_nonfinite`, the client then sends zeros with its noise,
    counts, and keeps what it had before.

    Args:
      call: the call that the update belongs to.
      client: the client.
      result: what the client's work returned, see `check_update`.
      server_memory: what the server keeps for the aggregator of this call.
      aggregator_memory: what the client kept for the aggregator of this call.
      attack: the cohort's attack or None.
      attacks: whether this client is an attacker, ``bool []``.
      with_norm: whether the entries have the norm of the update, see `fedsim.Algorithm`.

    Raises:
      ValueError: ``result`` takes a name of the round's own info, or holds a memory of another structure than
        ``client_memory`` returns, or one computed from the received update, if the aggregator's `send` changes its structure.
    """
    aggregator = call.aggregator
    assert aggregator is not None
    entries = {name: jnp.asarray(value) for name, value in result.info.items()}
    _check_names(call.work_name, entries, aggregator.sends_unchanged)
    weight, memory = jnp.asarray(result.weight, jnp.float32), client.memory if result.memory is None else result.memory
    sent, zeros = result.update, jax.tree.map(jnp.zeros_like, result.update)
    if attack is not None:
        sent = tree.select(attacks, with_aux_of(sent, attack.corrupt(sent, rng.stream(client.key, "attack"))), sent)

    took_part = client.num_steps > 0
    # The selection comes before the norm: XLA on a CPU takes four times as long for the norm of a difference.
    arrived = tree.select(took_part, sent, zeros)
    parts = client.parts if result.parts is None else result.parts
    of_client = parts.of_client if isinstance(parts, ModelParts) else ()
    finite = _is_finite((arrived, () if callable(memory) else memory, of_client)) & jnp.isfinite(weight)
    counts = jnp.isfinite(weight) if aggregator.counts_nonfinite else finite
    arrived = tree.select(finite, arrived, zeros)
    if with_norm:
        inexact = [x for x in jax.tree.leaves(with_empty_aux(arrived)) if jnp.issubdtype(x.dtype, jnp.inexact)]
        entries["update_norm"] = tree.root(tree.squared_norm(inexact)).astype(jnp.float32)
    if not aggregator.sends_unchanged:
        message = aggregator.send(arrived, server_memory, aggregator_memory, rng.stream(client.key, "send"))
        # A message in half precision may overflow where the update does not.
        is_message_finite = _is_finite((message.update, message.memory))
        finite, counts = finite & is_message_finite, counts & is_message_finite
        arrived = tree.select(took_part & counts, message.update, jax.tree.map(jnp.zeros_like, message.update))
        entries["bits_up"] = jnp.where(took_part, message.bits, jnp.zeros_like(message.bits))
        entries["entropy_bits_up"] = jnp.where(took_part, message.entropy_bits, 0.0)
        if jax.tree.leaves(aggregator_memory):
            kept = _in_form_of(aggregator_memory, message.memory, f"{type(aggregator).__name__}.send", "Sent")
            # The message of a colluding attacker is replaced later, so it must not leave a memory behind.
            colludes = attack is not None and type(attack).wrap_aggregator is not Attack.wrap_aggregator
            aggregator_memory = tree.select(attacks, aggregator_memory, kept) if colludes else kept

    if callable(memory) and str(jax.tree.structure(arrived)) != str(jax.tree.structure(result.update)):
        raise ValueError(
            f"The memory of {call.work_name} is a function of the update that the server receives, but with "
            f"{type(aggregator.innermost).__name__} it receives more than an update: use another aggregator."
        )

    def new_memory(arrived: Any) -> Any:
        return _in_form_of(client.memory, memory(arrived) if callable(memory) else memory, call.work_name, "ClientUpdate")

    kept = new_memory(arrived)
    if attack is not None:
        # An attacker keeps what its honest work gives. Otherwise what it sent would come back to it and grow from round to
        # round.
        honest = new_memory(result.update)
        kept = tree.select(attacks, tree.select(_is_finite(honest), honest, client.memory), kept)
    # A memory in half precision may overflow where the update does not.
    finite &= _is_finite([leaf for leaf in jax.tree.leaves(kept) if leaf.dtype.itemsize < 4])
    if aggregator.counts_nonfinite:
        before = client.parts.of_client if isinstance(client.parts, ModelParts) else ()
        kept, of_client = tree.select(finite, (kept, of_client), (client.memory, before))
    else:
        counts = finite
    # These are floats, like updates, so that one all-reduce over devices suffices.
    entries["weight"] = jnp.where(took_part & counts, weight, 0.0)
    entries["dropped"] = (took_part & ~finite).astype(jnp.float32)
    return Received(arrived, entries, (kept, of_client) if jax.tree.leaves(of_client) else kept, aggregator_memory)


def _is_finite(a: Any) -> jax.Array:
    """Returns whether the squared norm of the floats is finite, ``bool []``. Then sums of weighted updates do not overflow.

    Complex numbers count as two floats.
    """
    arrays = map(jnp.asarray, jax.tree.leaves(a))
    return jnp.isfinite(tree.squared_norm([leaf for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.inexact)]))


def check_update(work_name: str, result: Any) -> None:
    """Raises ``ValueError`` unless a client returns a `ClientUpdate` whose update and info hold arrays, and a scalar weight."""

    def is_number(x: Any) -> bool:
        if x is None or isinstance(x, str):  # JAX would take these for dtypes.
            return False
        try:
            return bool(jax.dtypes.issubdtype(jnp.result_type(x), np.number)) or jnp.result_type(x) == np.bool_
        except (TypeError, ValueError):
            return False

    if not isinstance(result, ClientUpdate):
        raise ValueError(
            f"Expected {work_name} to return a ClientUpdate, got {type(result).__name__}: return "
            "fedsim.ClientUpdate(update, weight=...)."
        )
    weight = result.weight
    if not is_number(weight) or jnp.shape(weight) or jnp.iscomplexobj(weight):
        got = f"shape {list(jnp.shape(weight))}" if is_number(weight) else f"weight={weight!r}"
        raise ValueError(
            f"Expected the ClientUpdate of {work_name} to have one real number as its weight, shape [], got {got}. For equal "
            "weights give 1.0."
        )
    if not isinstance(result.info, Mapping):
        raise ValueError(
            f"Expected the ClientUpdate of {work_name} to have a dict as info, from names to scalars or small arrays, got "
            f"{type(result.info).__name__}. Give the number a name, as in info={{'loss': loss}}."
        )
    for name, value in result.info.items():
        if not isinstance(name, str) or not is_number(value):
            raise ValueError(
                f"Expected the info of {work_name} to map names to arrays of numbers, got {name!r}: {value!r}. Split "
                "structures into one array per name."
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(result.update):
        if not is_number(leaf):
            raise ValueError(
                f"Expected the update of {work_name} to be a pytree of arrays of numbers, got "
                f"update{jax.tree_util.keystr(path)}={leaf!r}. Leave out what is not a number."
            )


def _check_names(work_name: str, entries: dict[str, Any], plain: bool) -> None:
    """Raises ``ValueError`` if a client's info uses a name of the round's own info."""
    taken = _NAMES - _NAMES_OF_BITS if plain and entries.keys() >= _NAMES_OF_BITS else _NAMES
    if collisions := sorted(taken & entries.keys()):
        raise ValueError(
            f"The info of {work_name} has {', '.join(collisions)}, and so has every round's own info: give it another "
            f"name than {', '.join(sorted(_NAMES))}."
        )


def _in_form_of(known: Any, memory: Any, work_name: str, result: str) -> Any:
    """Casts a memory to the dtypes of the known one; raises ``ValueError`` if structures or shapes differ."""
    forms = [(str(jax.tree.structure(x)), [jnp.shape(leaf) for leaf in jax.tree.leaves(x)]) for x in (memory, known)]
    for new, old in zip(*forms, strict=True):
        if new != old:
            raise ValueError(
                f"{work_name} keeps {new}, and client_memory starts with {old}: give {result} a memory of that form."
            )
    for new, old in zip(jax.tree.leaves(memory), jax.tree.leaves(known), strict=True):
        if tree.is_float(jnp.asarray(new)) and not tree.is_float(jnp.asarray(old)):
            raise ValueError(
                f"{work_name} keeps floats where client_memory starts with {jnp.result_type(old)}: start with floats."
            )
    return jax.tree.map(lambda new, old: jnp.asarray(new).astype(jnp.result_type(old)), memory, known)
