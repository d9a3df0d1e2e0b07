"""`VerticalAlgorithm`: one exchange between parties, then local steps of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import checks, rng, tree
from fedsim.compressors import Compressor, Identity
from fedsim.model import Params
from fedsim.vertical._batches import VerticalBatch
from fedsim.vertical._model import VerticalModel


class VerticalState(NamedTuple):
    """What the parties keep between rounds.

    Attributes:
      params: the parameters by party, see `VerticalModel`.
      opt_state: the state of each party's optimizer.
      round: the number of exchanges so far, ``int32 []``, at which `BatchSampler.rounds` continues.

    >>> VerticalState(params={"bank": {}}, opt_state={"bank": ()}, round=jnp.int32(0)).params
    {'bank': {}}
    """

    params: dict[str, Params]
    opt_state: dict[str, optax.OptState]
    round: jax.Array


class Messages(NamedTuple):
    """Values by their receiver or sender, and the sizes of the messages in bits (see `fedsim.tree.bits_dtype`)."""

    values: dict[str, Any]
    bits: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class VerticalAlgorithm:
    """Base class of vertical algorithms: one exchange per batch, then local steps of each party.

    In a round, the passive parties send their embeddings of the batch up to the party with the labels, which answers with
    messages down. Then every party takes `local_steps` steps of its optimizer on its own parameters, with what it received.
    Subclasses define what is sent down and the gradient of a local step; those with several local steps have a field for them.

    Attributes:
      model: a `VerticalModel`.
      optimizer: an optax transformation for all parties, or one by party. Each party has its own state of it.
      compressor: compresses every message, each as a whole batch. Memories, such as those of error feedback, are not kept,
        because embeddings are of other people in every batch.
      missing: the probability that a passive party is missing in a round. It sends and receives nothing and does not step, and
        zeros replace its embedding. (Its last embedding would be that of other people.)

    Raises:
      ValueError: an attribute is not of the kind that is described, or ``optimizer`` has one for a party that does not exist.

    >>> import numpy as np, fedsim
    >>> from fedsim import vertical
    >>> x, y = np.eye(4), np.array([0, 1, 0, 1])
    >>> data = vertical.align(vertical.divide_columns(x, y, {"bank": [0, 1], "shop": [2, 3]}, labels_at="bank"), secret="s")
    >>> model = vertical.VerticalModel.of(data, bottoms=vertical.dense(2), top=vertical.sum_embeddings(), num_classes=2)
    >>> class FrozenBottoms(vertical.SplitLearning):  # only the party with the labels trains
    ...     def local_gradient(self, party, own, received, batch):
    ...         gradient = super().local_gradient(party, own, received, batch)
    ...         return gradient if party == self.model.labels_at else jax.tree.map(jnp.zeros_like, gradient)
    >>> algorithm = FrozenBottoms(model=model, optimizer=optax.sgd(0.5))
    >>> state = algorithm.init(jax.random.key(0))
    >>> after, info = algorithm.apply(state, vertical.BatchSampler(data, size=4, seed=0).batch(0))
    >>> jax.tree.map(lambda a, b: bool((a == b).all()), after.params["shop"], state.params["shop"])
    {'bottom': {'mlp/~/linear_0': {'b': True, 'w': True}}}
    """

    model: VerticalModel
    optimizer: optax.GradientTransformation | Mapping[str, optax.GradientTransformation]
    compressor: Compressor = dataclasses.field(default_factory=Identity)
    missing: float = 0.0

    def __post_init__(self) -> None:
        checks.instance(VerticalModel, "VerticalModel.of(data, ...)", model=self.model)
        given: dict[str, Any] = {"optimizer": self.optimizer}
        if isinstance(self.optimizer, Mapping):
            if unknown := sorted(set(self.optimizer) - set(self.model.parties)):
                raise ValueError(
                    f"Expected optimizers of the parties {', '.join(self.model.parties)}, got those of {', '.join(unknown)}, "
                    "too: leave them out, or correct their names."
                )
            given = {f"optimizer[{party!r}]": self.optimizer.get(party) for party in self.model.parties}
        checks.optimizer(or_schedule=False, **given)
        checks.whole(1, local_steps=self.local_steps)
        checks.instance(Compressor, "UniformQuantizer(levels=16)", compressor=self.compressor)
        checks.number(least=0, below=1, missing=self.missing)

    @property
    def local_steps(self) -> int:
        """The number of local steps of each party per exchange, all on the same batch."""
        return 1

    def optimizer_of(self, party: str) -> optax.GradientTransformation:
        """Returns a party's optimizer."""
        return self.optimizer[party] if isinstance(self.optimizer, Mapping) else self.optimizer

    def init(self, key: jax.Array) -> VerticalState:
        """Returns the state before the first exchange."""
        params = self.model.init(rng.stream(key, "init"))
        opt_state = {party: self.optimizer_of(party).init(own) for party, own in params.items()}
        return VerticalState(params, opt_state, jnp.int32(0))

    def apply(self, state: VerticalState, batch: VerticalBatch) -> tuple[VerticalState, dict[str, Any]]:
        """Runs one exchange and the local steps that follow it.

        Returns:
          The state, and the info of the exchange: ``loss``, the mean loss of the batch before the local steps, ``float32 []``;
          and by passive party ``bits_up``, ``bits_down`` and ``present``, ``bool []``.

        Raises:
          ValueError: the batch does not have the features of the parties of the model, or has labels that are no classes of it.
        """
        if set(batch.features) != set(self.model.bottoms):
            raise ValueError(
                f"Expected a batch with the features of {', '.join(self.model.bottoms)}, got those of "
                f"{', '.join(batch.features) or 'nobody'}: sample from the data that the model was made for."
            )
        if not isinstance(batch.labels, jax.core.Tracer):
            self.model.check_labels(batch.labels)
        return self._apply(state, batch)

    @functools.partial(jax.jit, static_argnums=0)
    def _apply(self, state: VerticalState, batch: VerticalBatch) -> tuple[VerticalState, dict[str, Any]]:
        present = self._present(batch.key)
        up = self.send_up(state.params, batch, present)
        down = self.send_down(state.params, up, batch)
        params, opt_state = {}, {}
        for party in self.model.parties:
            before = state.params[party], state.opt_state[party]
            after = self._train(party, before, down.values[party], batch)
            params[party], opt_state[party] = tree.select(present[party], after, before) if party in present else after
        loss = jnp.mean(self.model.losses(state.params[self.model.labels_at], up.values, batch.labels))
        bits_down = {party: jnp.where(here, bits := down.bits[party], jnp.zeros_like(bits)) for party, here in present.items()}
        info = {"loss": loss, "bits_up": up.bits, "bits_down": bits_down, "present": present}
        return VerticalState(params, opt_state, state.round + 1), info

    def send_up(self, params: Mapping[str, Params], batch: VerticalBatch, present: Mapping[str, jax.Array]) -> Messages:
        """Returns the embeddings that the party with the labels has after the exchange, its own included."""
        arrived: dict[str, Any] = {}
        bits = {}
        for party, features in batch.features.items():
            embedding = self.model.embed(party, params[party], features)
            if party == self.model.labels_at:
                arrived[party] = embedding
                continue
            sent, size = self.send(embedding, batch.key, f"up from {party}")
            arrived[party] = jnp.where(present[party], sent, jnp.zeros_like(sent))
            bits[party] = jnp.where(present[party], size, jnp.zeros_like(size))
        return Messages(arrived, bits)

    def send_down(self, params: Mapping[str, Params], up: Messages, batch: VerticalBatch) -> Messages:
        """Returns what each party has for its local steps, and the sizes of the messages to the passive parties.

        Args:
          params: of all parties; only those of the party with the labels may be used.
          up: what `send_up` returned.
          batch: of which only the labels, and what the party with the labels holds, may be used.
        """
        raise NotImplementedError(f"{type(self).__name__} must define send_down.")

    def local_gradient(self, party: str, own: Params, received: Any, batch: VerticalBatch) -> Params:
        """Returns the gradient of a local step with respect to ``own``, the party's parameters.

        It may use the party's own features and, at the party with the labels, the labels.
        """
        raise NotImplementedError(f"{type(self).__name__} must define local_gradient.")

    def send(self, value: Any, key: jax.Array, name: str) -> tuple[Any, jax.Array]:
        """Returns what the receiver decodes of a message, and its size in bits. ``name`` is unique in a round."""
        sent = self.compressor.transmit(value, rng.stream(key, name))
        return sent.value, sent.bits

    def with_own(
        self, embeddings: Mapping[str, jax.Array], party: str, own: Params, batch: VerticalBatch
    ) -> dict[str, jax.Array]:
        """Returns the embeddings with the party's own, if it has features, computed from its current parameters ``own``."""
        fresh = {party: self.model.embed(party, own, batch.features[party])} if party in batch.features else {}
        return {**embeddings, **fresh}

    def _present(self, key: jax.Array) -> dict[str, jax.Array]:
        def draw(party: str) -> jax.Array:
            return jax.random.uniform(rng.stream(rng.stream(key, "missing"), party), (), jnp.float32) >= self.missing

        return {party: draw(party) for party in self.model.passive}

    def _train(self, party: str, own: tuple[Params, optax.OptState], received: Any, batch: VerticalBatch) -> Any:
        optimizer = self.optimizer_of(party)

        def step(_: Any, own: tuple[Params, optax.OptState]) -> tuple[Params, optax.OptState]:
            params, opt_state = own
            updates, opt_state = optimizer.update(self.local_gradient(party, params, received, batch), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return jax.lax.fori_loop(0, self.local_steps, step, own)
