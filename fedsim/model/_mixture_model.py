"""`MixtureModel`: several networks of one form, and the weights with which their predictions are mixed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.model._model import Model
from fedsim.model._network import Examples, Network, Params
from fedsim.model._parts import current_scope, divide


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MixtureModel(Model):
    """A classifier that mixes the predictions of several components of one form; see `fedsim.algorithms.FedEM`.

    Its parameters are ``{"components": leaves [num_components, ...], "log_weights": float32 [num_components]}``. The weights of
    the mixture are ``softmax(log_weights)``, which are equal at first. They are a part that clients keep, see
    `Model.with_parts`. Outputs are the logarithms of the mixed probabilities of the classes.

    Attributes:
      component: the model of one component.
      num_components: the number of components.

    >>> import fedsim
    >>> model = MixtureModel.of(fedsim.models.digits_logistic(), 3)
    >>> params = model.init_whole(jax.random.key(0))
    >>> params["components"]["linear"]["b"].shape, params["log_weights"].shape
    ((3, 10), (3,))
    >>> outputs = model.apply_for_eval(params, {"x": jnp.zeros([2, 8, 8, 1], jnp.uint8)})
    >>> outputs.shape, jnp.exp(outputs).sum(axis=1).round(3).tolist()
    ((2, 10), [1.0, 1.0])
    """

    component: Model
    num_components: int

    @classmethod
    def of(cls, component: Model, num_components: int) -> MixtureModel:
        """Returns the mixture of ``num_components`` components, each of which is initialized with a key of its own.

        Frozen parts of a component are those of each component.

        Args:
          component: the model of one component, whose outputs are logits; their last axis is that of the classes.
          num_components: the number of components, at least 1.

        Raises:
          ValueError: ``num_components`` is not positive, ``component`` has no ``num_classes``, it has running statistics, or
            its loss is no function of the probabilities ``softmax(outputs)``, such as that of a label for each class: their
            mixture has no such outputs.

        >>> import fedsim
        >>> MixtureModel.of(fedsim.models.digits_logistic(), 0)
        Traceback (most recent call last):
        ...
        ValueError: Expected num_components >= 1, got num_components=0: give a positive whole number.
        """
        checks.whole(1, num_components=num_components)
        if component.num_classes is None:
            raise ValueError(
                "Expected a classifier as the component of a mixture, got a model with num_classes=None: give its number of "
                "classes."
            )
        if {"statistics", "own_statistics"} & component.part_names:
            raise ValueError(
                "Expected a component without running statistics, which a mixture would not update, got a model with "
                f"{component.parts_in_words}: make it with statistics='frozen', or use one with GroupNorm."
            )
        _check_loss(component)

        def init(key: jax.Array) -> Params:
            components = jax.vmap(component.init_whole)(jax.random.split(key, num_components))
            return {"components": components, "log_weights": jnp.zeros(num_components, jnp.float32)}

        def mixed(params: Params, examples: Examples, key: jax.Array | None = None) -> jax.Array:
            of_components = jax.nn.log_softmax(_outputs(component, params, examples, key))
            weights = jax.nn.log_softmax(params["log_weights"]).reshape(-1, *[1] * (of_components.ndim - 1))
            return jax.nn.logsumexp(of_components + weights, axis=0)

        network = Network(init, mixed, mixed)
        form = jax.eval_shape(component.init_whole, jax.random.key(0))
        roles = jax.tree.map(lambda _: "params", form) if component.roles is None else component.roles
        roles = {"components": roles, "log_weights": "kept"}
        common = ("loss", "metrics", "features", "num_classes")
        return cls(
            **divide(network, roles)._asdict(),
            **{name: getattr(component, name) for name in common},
            network=network,
            roles=roles,
            component=component,
            num_components=num_components,
        )

    def component_losses(self, params: Params, examples: Examples, key: jax.Array | None = None) -> jax.Array:
        """Returns the loss of each component for each example, ``float32 [num_components, n]``.

        Args:
          params: the parameters, or what algorithms see of them.
          examples: a dict of arrays whose first axis is the example.
          key: for dropout and other random draws; None evaluates without.
        """
        outputs = _outputs(self.component, current_scope().parts.join(params), examples, key)
        return jax.vmap(lambda of_one: self.component.losses(examples, of_one))(outputs)


def _check_loss(component: Model) -> None:
    """Raises ``ValueError`` unless the loss of a component is the same for its outputs and for their log-softmax."""
    form, examples = jax.eval_shape(component.init_whole, jax.random.key(0)), component.dummy_examples(2)
    like = jax.eval_shape(component.apply_for_eval, form, examples)
    with jax.ensure_compile_time_eval():
        examples = jax.tree.map(jnp.asarray, examples)
        outputs = jax.random.normal(rng.root(0), like.shape, like.dtype)
        before, after = (component.losses(examples, each) for each in (outputs, jax.nn.log_softmax(outputs)))
        are_equal = bool(jnp.allclose(before, after, rtol=1e-2, atol=1e-3))  # the precision of bfloat16
    if not are_equal:
        raise ValueError(
            "Expected a component whose loss is a function of softmax(outputs), such as the cross-entropy, got a model whose "
            f"loss changes from {before} to {after} if its outputs are replaced by their log-softmax: a mixture has "
            "probabilities only. Use the cross-entropy of classes that exclude each other, or FedAvg."
        )


def _outputs(component: Model, params: Params, examples: Examples, key: jax.Array | None) -> Any:
    """Returns the outputs of each component, ``[num_components, n, ...]``."""
    # One after another: on a CPU, convolutions of several networks at once are slower.
    if key is None:
        return jax.lax.map(lambda own: component.apply_for_eval(own, examples), params["components"])
    keys = jax.random.split(key, len(params["log_weights"]))
    return jax.lax.map(lambda own: component.apply_for_train(own[0], examples, own[1]), (params["components"], keys))
