"""`LocalTraining`: how a client trains, as a value that algorithms make, change and run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import metrics, tree
from fedsim.aggregators import accumulation_dtype
from fedsim.algorithms._descent import check_descent, check_draws_no_noise, needs_loss, warn_of_lost_gradients
from fedsim.data import Batch, Batches, FederatedData
from fedsim.model import Model, ModelParts, Params, current_scope, scope_of
from fedsim.rounds import Client

Schedule = Callable[[jax.Array], optax.GradientTransformation]
Loss = Callable[[Params, Batch], jax.Array]
Gradient = Callable[[Params, Batch], tuple[jax.Array, Params]]


class Local(NamedTuple):
    """A client's local parameters, the state of its optimizer, its training loss so far, and the other parts of the model.

    >>> import fedsim
    >>> training = LocalTraining(loss=lambda params, batch: params["w"], batches=fedsim.Batches(size=1))
    >>> training.start({"w": jnp.float32(2)}).params["w"].item()
    2.0
    """

    params: Params
    opt_state: optax.OptState
    loss: metrics.MeanLoss
    parts: ModelParts | tuple[()] = ()


class Term(NamedTuple):
    """A term of the parameters that steps minimize besides the loss; ``value`` is None if it is linear in the parameters."""

    value: Callable[[Params], jax.Array] | None
    gradient: Callable[[Params], Params]


@dataclasses.dataclass(frozen=True, eq=False)
class LocalTraining:
    """How one client trains: a loss, an optimizer and batches. Use `dataclasses.replace` to change a part of it.

    Attributes:
      loss: a function from parameters and a batch to the loss, ``float32 []``, the mean over the examples where ``batch.mask``
        is True. It is reported, and steps minimize it unless ``gradient`` is given.
      batches: how the client cuts its examples into batches, and how many steps it takes.
      optimizer: the optax transformation of this round. The default leaves the parameters as they are.
      gradient: a function from parameters and a batch to the loss that is reported, and the gradient of a step without
        ``terms``. None takes `loss_and_gradient`.
      objective: a function from parameters and a batch to the value whose gradient this is, for optimizers that need it, as
        Polyak steps and line searches do. Parts that are linear in the parameters may be left out, because they follow from the
        gradient. None takes ``loss``.
      terms: what `with_term` has added.
      is_private: whether ``gradient`` makes single examples private, see `with_private_examples`. Then `loss_and_gradient`,
        `mean_loss`, `full_gradient` and `gradient_and_parts`, which would add no noise, raise ``ValueError``.

    >>> import fedsim
    >>> def loss(params, batch):
    ...     return fedsim.metrics.masked_mean(jnp.square(batch.examples["x"] - params["w"]), batch.mask)
    >>> training = LocalTraining(loss, fedsim.Batches(size=2), optax.sgd(0.25))
    >>> batch = fedsim.Batch({"x": jnp.array([1.0, 3.0])}, jnp.array([True, True]), jax.random.key(0), 0)
    >>> local = training.step(training.start({"w": jnp.float32(0)}), batch)
    >>> local.params["w"].item(), local.loss.result().item()
    (1.0, 5.0)
    """

    loss: Loss
    batches: Batches
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=optax.set_to_zero)
    gradient: Gradient | None = None
    objective: Loss | None = None
    terms: tuple[Term, ...] = ()
    is_private: bool = False

    @classmethod
    def of(cls, algorithm: Any, shared: Any) -> LocalTraining:
        """Returns training with the ``client_loss``, the ``batches`` and the ``client_optimizer`` of an algorithm.

        Args:
          algorithm: `FedAvg`, or another algorithm with these.
          shared: what its clients receive, which has the number of the ``round``.
        """
        optimizer = optimizer_of_round(algorithm.client_optimizer, shared.round)
        return cls(functools.partial(algorithm.client_loss, shared), algorithm.batches, optimizer)

    def with_term(
        self, value: Callable[[Params], jax.Array] | None, gradient: Callable[[Params], Params] | None = None
    ) -> LocalTraining:
        """Returns training that also minimizes a term of the parameters, which is not reported.

        Args:
          value: the term. None if it is linear in the parameters; then ``gradient`` is required.
          gradient: the gradient of the term; default: that of ``value``.

        Raises:
          ValueError: both are None.

        >>> import fedsim
        >>> training = LocalTraining(lambda params, batch: params["w"], fedsim.Batches(size=1), optax.sgd(1.0))
        >>> pulled = training.with_term(lambda params: 0.5 * tree.squared_norm(params))
        >>> loss, gradient = pulled.step_gradient({"w": jnp.float32(3)}, None)
        >>> loss.item(), gradient["w"].item()
        (3.0, 4.0)
        """
        if gradient is None:
            if value is None:
                raise ValueError("Expected a value or a gradient of the term, got value=None and gradient=None: give one.")
            gradient = jax.grad(value)
        term = Term(value, gradient)
        return dataclasses.replace(self, terms=(*self.terms, term))

    def with_proximal_term(self, strength: jax.Array | float, center: Params) -> LocalTraining:
        """Returns training with the term ``strength / 2 * ||params - center||²``.

        >>> import fedsim
        >>> training = LocalTraining(lambda params, batch: params["w"], fedsim.Batches(size=1), optax.sgd(1.0))
        >>> _, gradient = training.with_proximal_term(0.5, {"w": jnp.float32(2)}).step_gradient({"w": jnp.float32(6)}, None)
        >>> gradient["w"].item()
        3.0
        """
        return self.with_term(
            lambda params: strength / 2 * tree.squared_norm(tree.subtract(params, center)),
            lambda params: tree.scale(tree.subtract(params, center), strength),  # one pass over the parameters
        )

    def check_not_private(self, what: str, reason: str) -> None:
        """Raises ``ValueError`` if single examples are private: for methods that use them in other ways than by one gradient in
        each step.

        Args:
          what: the method.
          reason: why the method would reveal examples.

        >>> import fedsim
        >>> training = LocalTraining(lambda params, batch: params["w"], fedsim.Batches(size=1), optax.sgd(1.0))
        >>> dataclasses.replace(training, is_private=True).check_not_private(  # doctest: +ELLIPSIS
        ...     "FedProto", "there is a reason")
        Traceback (most recent call last):
        ...
        ValueError: Expected training without private examples for FedProto, got that of with_private_examples: there is ...
        """
        if self.is_private:
            raise ValueError(
                f"Expected training without private examples for {what}, got that of with_private_examples: {reason}. Use "
                "FedAvg."
            )

    def loss_and_gradient(self, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        """Returns ``loss`` and its gradient with respect to ``params``, without any other term.

        With ``batches.microbatch``, both are the means of those of the microbatches, which are computed one after another.

        Raises:
          ValueError: ``loss`` does not return a scalar, or single examples are private.
        """
        self.check_not_private("LocalTraining.loss_and_gradient", "this gradient has no noise")
        mask = getattr(batch, "mask", None)
        if mask is not None and (parts := self.batches.num_microbatches(len(mask))) > 1:
            return self._over_microbatches(params, divided(batch, parts))
        outer = current_scope()

        def loss(params: Params) -> tuple[jax.Array, Any]:
            with scope_of(outer.parts, getattr(batch, "mask", None), params) as scope:
                value = self.loss(params, batch)
            if jnp.shape(value):
                function = getattr(self.loss, "func", self.loss)
                raise ValueError(
                    f"Expected {getattr(function, '__qualname__', function)} to return a scalar, the mean loss of a batch, got "
                    f"shape {list(jnp.shape(value))}. Average over the examples where batch.mask is True, as model.train_loss "
                    "does."
                )
            return value, scope.new

        (value, new), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        outer.record(params, new)
        return value, gradient

    def _over_microbatches(self, params: Params, parts: Batch) -> tuple[jax.Array, Params]:
        def add(sums: _Sums, part: Batch) -> tuple[_Sums, None]:
            with current_scope().inner():
                return sums.add(*self.loss_and_gradient(params, part), part.mask), None

        return jax.lax.scan(add, _Sums.zero(params), parts)[0].means(params)

    def step_gradient(self, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        """Returns the loss of a batch, which is reported, and the gradient of a step, which has all terms."""
        loss, gradient = (self.gradient or self.loss_and_gradient)(params, batch)
        for term in self.terms:
            gradient = tree.add_where(gradient, term.gradient(_sent(params)))
        return loss, gradient

    def step_value(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the value that steps minimize, without terms that are linear in the parameters."""
        value = (self.objective or self.loss)(params, batch)
        for term in self.terms:
            value = value + term.value(_sent(params)) if term.value else value
        return value

    def start(self, params: Params, parts: ModelParts | tuple[()] = ()) -> Local:
        """Returns the state before the first local step from these parameters, with a new state of the optimizer.

        Args:
          params: the parameters, which the server sends.
          parts: the other parts of the model, see `Client.parts`. Those that the client keeps are trained with the parameters:
            ``loss``, ``gradient``, ``objective`` and ``optimizer`` get both in one pytree, and ``terms`` the parameters alone.
        """
        return Local(params, self.optimizer.init(with_kept(params, parts)), metrics.MeanLoss.zero(), parts)

    def step(self, local: Local, batch: Batch) -> Local:
        """Takes one step of the optimizer on a batch."""
        params = with_kept(local.params, local.parts)
        # Steps from parameters that the client keeps may have no parts of their own: then these are frozen ones.
        with scope_of(local.parts or current_scope().parts, batch.mask, params) as scope:
            (loss, gradient), extra = self.step_gradient(params, batch), {}
            statistics = scope.new
            if needs_loss(self.optimizer, params):  # as Polyak steps and line searches do
                if self.batches.microbatch is not None:
                    raise ValueError(
                        "Expected an optimizer that needs gradients alone, because the loss of a batch is computed at once, "
                        f"got one that needs the loss and microbatch={self.batches.microbatch}: leave microbatch out."
                    )
                descended = _with_gradient(lambda params: self.step_value(params, batch), gradient, params)
                extra = {"value": descended(params), "grad": gradient, "value_fn": descended}
            updates, opt_state = self.optimizer.update(gradient, local.opt_state, params, **extra)
        params, count = optax.apply_updates(params, updates), jnp.sum(batch.mask, dtype=jnp.float32)
        losses, parts = local.loss.add(loss, count), local.parts
        if isinstance(parts, ModelParts):
            params, parts = tree.masked(params, like=local.params), parts.after_step(params, statistics)
        return Local(params, opt_state, losses, parts)

    def run(self, client: Client, params: Params) -> Local:
        """Runs a client's local steps from these parameters."""
        return client.for_each_batch(self.batches, self.step, self.start(params, client.parts))

    def mean_loss(self, client: Client, params: Params) -> jax.Array:
        """Returns a client's mean loss over all its examples at these parameters, ``float32 []``. With dropout it is random.

        Other parts of the model are those with which the client started.

        Raises:
          ValueError: single examples are private.
        """
        self.check_not_private("LocalTraining.mean_loss", "the mean loss of a client has no noise")

        def add(losses: metrics.MeanLoss, batch: Batch) -> metrics.MeanLoss:
            count = jnp.sum(batch.mask, dtype=jnp.float32)
            with scope_of(client.parts, batch.mask):
                return losses.add(self.loss(params, batch), count)

        return client.for_each_batch(self.batches.one_pass(), add, metrics.MeanLoss.zero(), "preview").result()

    def full_gradient(self, client: Client, params: Params) -> tuple[jax.Array, Params]:
        """Returns a client's mean loss over its examples at these parameters, and the gradient of this loss, without terms.

        Other parts of the model are those with which the client started.

        Raises:
          ValueError: single examples are private.
        """
        loss, gradient, _ = self._full_pass(client, params, "preview")
        return loss, gradient

    def gradient_and_parts(self, client: Client, params: Params) -> tuple[jax.Array, Params, ModelParts | tuple[()]]:
        """Returns what `full_gradient` returns, over the batches of the client's training in this round, and the parts of the
        model after it, with new running statistics.

        Raises:
          ValueError: single examples are private.
        """
        return self._full_pass(client, params, None)

    def _full_pass(
        self, client: Client, params: Params, purpose: str | None
    ) -> tuple[jax.Array, Params, ModelParts | tuple[()]]:
        method = "gradient_and_parts" if purpose is None else "full_gradient"
        self.check_not_private(f"LocalTraining.{method}", "the gradient of all examples of a client has no noise")
        changes = purpose is None and isinstance(client.parts, ModelParts)

        def add(before: tuple[_Sums, Any], batch: Batch) -> tuple[_Sums, Any]:
            sums, parts = before
            with scope_of(parts if changes else client.parts, batch.mask) as scope:
                sums = sums.add(*self.loss_and_gradient(params, batch), batch.mask)
            return sums, parts.after_step(params, scope.new) if changes else parts

        batches = self.batches if purpose is None else self.batches.one_pass()
        sums, parts = client.for_each_batch(batches, add, (_Sums.zero(params), client.parts if changes else ()), purpose)
        return *sums.means(params), parts


class _Sums(NamedTuple):
    """Sums over examples of their losses and gradients."""

    losses: metrics.MeanLoss
    gradient: Params

    @classmethod
    def zero(cls, params: Params) -> _Sums:
        # Sums are at least float32. In bfloat16 a sum would stop growing after some hundred terms.
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, accumulation_dtype(p.dtype)), params)
        return cls(metrics.MeanLoss.zero(), zeros)

    def add(self, loss: jax.Array, gradient: Params, mask: jax.Array) -> _Sums:
        """Adds the mean loss of a batch and its gradient."""
        count = jnp.sum(mask, dtype=jnp.float32)
        total = jax.tree.map(lambda sum, g: sum + count.astype(sum.dtype) * g.astype(sum.dtype), self.gradient, gradient)
        return _Sums(self.losses.add(loss, count), total)

    def means(self, params: Params) -> tuple[jax.Array, Params]:
        """Returns the mean loss and its gradient, in the dtypes of the parameters."""
        mean = tree.scale(self.gradient, 1 / jnp.maximum(self.losses.num_examples.value(), 1))
        return self.losses.result(), jax.tree.map(lambda g, p: g.astype(p.dtype), mean, params)


def divided(batch: Batch, parts: int) -> Batch:
    """Distributes a batch's examples over parts in turn, so that the parts of a partial batch have similar sizes.

    Each device of those that a batch is divided over then has rows of every part.

    Returns:
      A batch with leaves ``[parts, rows, ...]``, whose remaining rows are padding. Each part has a key of its own.

    >>> batch = Batch({"x": jnp.arange(5)}, jnp.array([True, True, True, True, False]), jax.random.key(0), 0)
    >>> part = divided(batch, 2)
    >>> part.examples["x"].tolist(), part.mask.tolist()
    ([[0, 2, 4], [1, 3, 4]], [[True, True, False], [True, True, False]])
    """
    rows = len(batch.mask)
    size = -(-rows // parts)

    def cut(x: jax.Array, **padding: Any) -> jax.Array:
        x = jnp.pad(x, [(0, size * parts - rows)] + [(0, 0)] * (x.ndim - 1), **padding)
        return jnp.swapaxes(x.reshape(size, parts, *x.shape[1:]), 0, 1)

    examples = jax.tree.map(lambda x: cut(x, mode="edge"), batch.examples)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(batch.key, jnp.arange(parts))
    return Batch(examples, cut(batch.mask), keys, jnp.broadcast_to(batch.step, (parts,)))


def parts_of(holder: Local | Client) -> ModelParts:
    """Returns the parts of the model that it has, in one form also if there are none.

    >>> parts_of(Local(params={"w": 1.0}, opt_state=(), loss=metrics.MeanLoss.zero())) == ModelParts()
    True
    """
    return holder.parts or ModelParts()


def with_kept(params: Params, parts: ModelParts | tuple[()]) -> Params:
    """Returns all parameters that a client trains: those that are sent, and those that it keeps.

    >>> with_kept({"w": 1.0, "b": None}, ModelParts(kept={"w": None, "b": 2.0}))
    {'b': 2.0, 'w': 1.0}
    """
    return tree.merge(params, parts.kept) if isinstance(parts, ModelParts) and parts.kept != () else params


def _sent(params: Params) -> Params:
    """Returns those of the parameters that the server sends."""
    kept = current_scope().parts.kept
    return params if kept == () else tree.masked(params, kept, inverted=True)


def optimizer_of_round(
    optimizer: optax.GradientTransformation | Schedule, round_number: jax.Array
) -> optax.GradientTransformation:
    """Returns an optimizer, or what a schedule of optimizers returns for a round.

    >>> optimizer = optimizer_of_round(lambda round: optax.scale(-0.5 * round.astype(jnp.float32)), jnp.int32(2))
    >>> optimizer.update(jnp.float32(4), optimizer.init(None))[0].item()
    -4.0
    """
    return optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(round_number)


def check_client_optimizer(
    model: Model,
    client_optimizer: optax.GradientTransformation | Schedule,
    batches: Batches | None = None,
    data: FederatedData | None = None,
) -> None:
    """Raises ``ValueError`` if a client optimizer cannot train the model, and warns of gradients that it would lose.

    Clients that keep the state of their optimizer lose none: then ``batches`` and ``data`` are left out.

    >>> import fedsim
    >>> data = fedsim.datasets.load("digits").train
    >>> check_client_optimizer(fedsim.models.digits_logistic(), optax.sgd(0.1), fedsim.Batches(size=20), data)
    """
    # A schedule over rounds may start with learning rate 0. The optimizer of the first round alone then never moves.
    scheduled = not isinstance(client_optimizer, optax.GradientTransformation)
    optimizer = optimizer_of_round(client_optimizer, jnp.int32(0))
    check_draws_no_noise(model, client_optimizer=optimizer)
    check_descent(model, client_optimizer=optimizer, may_be_zero=scheduled, at_clients=True)
    if batches is not None and data is not None:
        warn_of_lost_gradients(model, batches.num_steps(data.sizes[data.sizes > 0]), client_optimizer=optimizer)


def _with_gradient(objective: Callable[[Params], jax.Array], gradient: Params, at: Params) -> Callable[[Params], jax.Array]:
    """Returns ``objective`` plus the linear function with which its gradient at the parameters ``at`` is ``gradient``."""
    missing = tree.subtract(gradient, jax.grad(objective)(at))

    def descended(params: Params) -> jax.Array:
        return objective(params).astype(jnp.float32) + tree.dot(missing, tree.subtract(params, at))

    return descended
