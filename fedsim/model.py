"""`Model`: the functions of a neural network that algorithms call. It can be made from any Haiku transform, or from several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from fedsim import metrics as metrics_lib

if TYPE_CHECKING:
    from fedsim.data import Batch, FederatedData

Params = Any
Examples = Mapping[str, jax.Array]
Feature = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A neural network as pure functions of parameters and examples. Models are compared by identity.

    ``examples`` is a dict of arrays whose first axis is the example, for instance
    ``{"x": uint8 [n, 28, 28, 1], "y": int32 [n]}``.

    Attributes:
      init: ``key -> params``.
      apply_for_train: ``(params, examples, key) -> outputs``; the key is for dropout and other random draws.
      apply_for_eval: ``(params, examples) -> outputs``; deterministic.
      loss: ``(examples, outputs) -> float32 [n]``, one loss per example.
      metrics: the metrics of an evaluation by name: functions ``(examples, outputs)`` that return one number per example,
        ``[n]``, or another statistic of `fedsim.metrics`.
      features: the features that the model reads, by name: the ``jax.ShapeDtypeStruct`` of one example, or a tuple of them if
        the model accepts several dtypes.
      num_classes: labels ``examples["y"]`` must be in ``[0, num_classes)``. None checks them only if the loss is the
        cross-entropy, by the number of logits.

    >>> model = Model.from_haiku(
    ...     hk.transform(lambda examples: hk.Linear(3)(examples["x"])),
    ...     features={"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)},
    ...     num_classes=3)
    >>> params = model.init(jax.random.key(0))
    >>> model.apply_for_eval(params, {"x": jnp.ones([5, 2])}).shape
    (5, 3)
    """

    init: Callable[[jax.Array], Params]
    apply_for_train: Callable[[Params, Examples, jax.Array], Any]
    apply_for_eval: Callable[[Params, Examples], Any]
    loss: Callable[[Examples, Any], jax.Array]
    metrics: Mapping[str, metrics_lib.Metric]
    features: Mapping[str, Feature]
    num_classes: int | None = None

    @classmethod
    def from_haiku(
        cls,
        transformed: hk.Transformed,
        *,
        features: Mapping[str, Feature],
        loss: Callable[[Examples, Any], jax.Array] = metrics_lib.cross_entropy,
        metrics: Mapping[str, metrics_lib.Metric] | None = None,
        num_classes: int | None = None,
        train_kwargs: Mapping[str, Any] | None = None,
        eval_kwargs: Mapping[str, Any] | None = None,
    ) -> Model:
        """Returns a model from a Haiku transform.

        Parameters are drawn by one compiled program, so initializers must draw with JAX. An initializer that draws with NumPy
        draws once, and gives the same parameters for every key.

        Args:
          transformed: the result of ``hk.transform`` for a function of ``examples`` and of keyword arguments.
          features: see the attributes.
          loss: see the attributes. The default is the cross-entropy of logits ``[n, num_classes]``.
          metrics: see the attributes. The default is "loss", and with the default loss also "accuracy".
          num_classes: see the attributes.
          train_kwargs: keyword arguments of the function in training, and when parameters are drawn.
          eval_kwargs: keyword arguments of the function in evaluation.

        Raises:
          ValueError: ``transformed`` is not the result of ``hk.transform``: it has state (``hk.transform_with_state``), which
            algorithms do not support, or it is a module of another library, for which a `Model` can be made from functions.
        """
        check_transformed(transformed=transformed)
        train_kwargs, eval_kwargs = dict(train_kwargs or {}), dict(eval_kwargs or {})

        @jax.jit  # Compiled one by one, the operations take twice as long, and those of the forward pass are not needed.
        def init(key: jax.Array) -> Params:
            return transformed.init(key, jax.tree.map(jnp.asarray, _zeros(features, 1)), **train_kwargs)

        return cls(
            init=init,
            apply_for_train=lambda params, examples, key: transformed.apply(params, key, examples, **train_kwargs),
            apply_for_eval=lambda params, examples: transformed.apply(params, None, examples, **eval_kwargs),
            loss=loss,
            metrics=default_metrics(loss) if metrics is None else dict(metrics),
            features=dict(features),
            num_classes=num_classes,
        )

    def train_loss(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the mean training loss over the examples of ``batch``, a scalar ``float32``; 0 if all rows are padding."""
        outputs = self.apply_for_train(params, batch.examples, batch.key)
        return metrics_lib.masked_mean(self.losses(batch.examples, outputs), batch.mask)

    def losses(self, examples: Examples, outputs: Any) -> jax.Array:
        """Returns the loss of each example, ``float32 [n]``.

        Raises:
          ValueError: ``loss`` returns an array of another shape, such as ``[n, 1]`` or a mean over the batch, with which the
            mean over the real examples of a padded batch would be wrong.
        """
        losses, n = self.loss(examples, outputs), len(next(iter(examples.values())))
        if jnp.shape(losses) != (n,):
            raise ValueError(
                f"Expected the model's loss to return one number per example, shape [{n}] for a batch of {n}, got shape "
                f"{list(jnp.shape(losses))}. Return losses that are not yet averaged over the batch, with a single axis."
            )
        return losses

    def check_trainable(self) -> None:
        """Raises ``ValueError`` unless the model has parameters and all of them are floats, as `jax.grad` needs them."""
        leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(self.init, jax.random.key(0)))
        if not leaves:
            raise ValueError("The model has no parameters, so there is nothing to train. Check what its init returns.")
        for path, leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"Expected all parameters of the model to be floats, got params{jax.tree_util.keystr(path)} of dtype "
                    f"{leaf.dtype}, which has no gradient. Make it a constant of the model instead of a parameter."
                )

    def dummy_examples(self, count: int) -> dict[str, np.ndarray]:
        """Returns ``count`` examples of zeros, in the shapes and dtypes that the model reads."""
        return _zeros(self.features, count)

    def check(self, data: FederatedData, *, unlabelled: bool = False) -> None:
        """Checks that ``data`` fits the model.

        Args:
          data: the population.
          unlabelled: whether labels may be hidden, which is -1, see `fedsim.partitioners.hide_labels`.

        Raises:
          ValueError: a feature is missing, has another shape or dtype, or has values that are not finite or that a device
            changes (`FederatedData.check_range`); or a label is not of a class.
        """
        for name, feature in self.features.items():
            accepted = _accepted(feature)
            if name not in data.columns:
                raise ValueError(
                    f"The model reads feature {name!r}, which the data does not have; it has {sorted(data.columns)}. "
                    "Rename a column, or choose a model for this dataset."
                )
            column = data.columns[name]
            if tuple(column.shape[1:]) not in {tuple(spec.shape) for spec in accepted}:
                raise ValueError(
                    f"Feature {name!r} has shape {list(column.shape[1:])} per example, and the model expects "
                    f"{list(accepted[0].shape)}. Reshape the column, or choose a model for this dataset."
                )
            if _kind(column.dtype) not in {_kind(spec.dtype) for spec in accepted}:
                raise ValueError(
                    f"Feature {name!r} has dtype {column.dtype}, and the model expects "
                    f"{' or '.join(str(np.dtype(spec.dtype)) for spec in accepted)}. Convert the column before packing it."
                )
        data.check_finite()
        if self._classes is not None and "y" in self.features:
            data.check_labels("y", self._classes, unlabelled=unlabelled)
        data.check_range(self.features)

    @functools.cached_property
    def _classes(self) -> int | None:
        """The number of classes that labels may have; None if any labels are possible."""
        if self.num_classes is not None or self.loss is not metrics_lib.cross_entropy:
            return self.num_classes
        params = jax.eval_shape(self.init, jax.random.key(0))
        logits = jax.eval_shape(self.apply_for_eval, params, self.dummy_examples(1))
        return logits.shape[1] if getattr(logits, "ndim", 0) == 2 else None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SplitModel(Model):
    """A model in two or three parts, which run at different places; see `fedsim.algorithms.SplitFed`.

    The part "device" maps examples to activations ``[n, ...]``. The part "server" maps these to the outputs or, if there is a
    part "head", to further activations, which the head maps to the outputs, on the device again. Parameters are a dict by part.

    Attributes:
      parts: functions ``(params[part], value) -> value`` by name, in this order.

    >>> model = SplitModel.from_parts(
    ...     device=hk.transform(lambda examples: jax.nn.relu(hk.Linear(4)(examples["x"]))),
    ...     server=hk.transform(lambda activations: hk.Linear(3)(activations)),
    ...     features={"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)},
    ...     num_classes=3)
    >>> params = model.init(jax.random.key(0))
    >>> sorted(params), model.apply_for_eval(params, {"x": jnp.ones([5, 2])}).shape
    (['device', 'server'], (5, 3))
    """

    parts: Mapping[str, Callable[[Params, Any], Any]]

    @classmethod
    def from_parts(
        cls,
        *,
        device: hk.Transformed,
        server: hk.Transformed,
        head: hk.Transformed | None = None,
        features: Mapping[str, Feature],
        loss: Callable[[Examples, Any], jax.Array] = metrics_lib.cross_entropy,
        metrics: Mapping[str, metrics_lib.Metric] | None = None,
        num_classes: int | None = None,
    ) -> SplitModel:
        """Returns a model from Haiku transforms without random draws: ``device`` of examples, the others of activations.

        Args:
          device, server, head: the parts.
          features, loss, metrics, num_classes: see `Model.from_haiku`.

        Raises:
          ValueError: a part is not the result of ``hk.transform``.
        """
        transforms = {"device": device, "server": server} | ({} if head is None else {"head": head})
        check_transformed(**transforms)
        parts = {name: functools.partial(_apply, each) for name, each in transforms.items()}

        @jax.jit
        def init(key: jax.Array) -> Params:
            value, params = jax.tree.map(jnp.asarray, _zeros(features, 1)), {}
            for number, (name, each) in enumerate(transforms.items()):
                params[name] = each.init(jax.random.fold_in(key, number), value)
                value = parts[name](params[name], value)
            return params

        def apply(params: Params, examples: Examples, key: jax.Array | None = None) -> Any:
            return functools.reduce(lambda value, name: parts[name](params[name], value), parts, examples)

        return cls(
            init=init,
            apply_for_train=apply,
            apply_for_eval=apply,
            loss=loss,
            metrics=default_metrics(loss) if metrics is None else dict(metrics),
            features=dict(features),
            num_classes=num_classes,
            parts=parts,
        )


def check_transformed(**values: Any) -> None:
    """Raises ``ValueError`` unless the values, given by name, are results of ``hk.transform``.

    >>> check_transformed(top="linear")
    Traceback (most recent call last):
    ...
    ValueError: Expected top to be the result of hk.transform, got a str: give hk.transform(function), where the function \
calls the Haiku modules.
    """
    for name, value in values.items():
        if isinstance(value, hk.Transformed):
            continue
        if isinstance(value, hk.TransformedWithState | hk.MultiTransformedWithState):
            remedy = (
                "models with state are not supported, so replace batch normalization and its running averages by hk.GroupNorm "
                "or hk.LayerNorm, and give hk.transform(function)"
            )
        elif callable(getattr(value, "init", None)) and callable(getattr(value, "apply", None)):
            remedy = (
                "for a network of another library, such as Flax, give fedsim.Model(init=..., apply_for_train=..., "
                "apply_for_eval=..., ...), functions that call its init and apply"
            )
        else:
            remedy = "give hk.transform(function), where the function calls the Haiku modules"
        raise ValueError(f"Expected {name} to be the result of hk.transform, got a {type(value).__name__}: {remedy}.")


def _apply(transformed: hk.Transformed, params: Params, value: Any) -> Any:
    return transformed.apply(params, None, value)


def default_metrics(loss: Callable[[Examples, Any], jax.Array]) -> dict[str, metrics_lib.Metric]:
    """Returns the metric "loss", and with the cross-entropy of labels also "accuracy".

    >>> list(default_metrics(metrics_lib.cross_entropy))
    ['loss', 'accuracy']
    """
    metrics: dict[str, metrics_lib.Metric] = {
        "loss": lambda examples, outputs: metrics_lib.per_example(loss(examples, outputs))
    }
    return metrics | ({"accuracy": metrics_lib.accuracy} if loss is metrics_lib.cross_entropy else {})


def _accepted(feature: Feature) -> tuple[jax.ShapeDtypeStruct, ...]:
    return feature if isinstance(feature, tuple) else (feature,)


def _zeros(features: Mapping[str, Feature], count: int) -> dict[str, np.ndarray]:
    first = {name: _accepted(feature)[0] for name, feature in features.items()}
    return {name: np.zeros((count, *spec.shape), spec.dtype) for name, spec in first.items()}


def _kind(dtype: Any) -> str:
    """Returns the kind of a dtype: "f" for floats, "i" for signed and unsigned integers."""
    return np.dtype(dtype).kind.replace("u", "i")
