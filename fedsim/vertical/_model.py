"""`VerticalModel`: a network that is divided among parties, a bottom model each and a top model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from fedsim import metrics as metrics_lib
from fedsim import rng
from fedsim.data import FederatedData
from fedsim.model import Examples, Model, Params, check_transformed, default_metrics
from fedsim.vertical._data import PooledData, VerticalData


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class JointModel(Model):
    """The whole network as a `fedsim.Model`, which refuses `VerticalData.pooled` with other columns than its own.

    Attributes:
      columns: the names of each party's columns, where they are known.
    """

    columns: Mapping[str, tuple[str, ...]]

    def check(self, data: FederatedData, *, unlabelled: bool = False) -> None:
        given = data.names if isinstance(data, PooledData) else {}
        for party in self.features.keys() & given.keys() & self.columns.keys():
            expected, got = self.columns[party], given[party]
            if expected != got:
                wrong = next((ours, theirs) for ours, theirs in itertools.zip_longest(expected, got) if ours != theirs)
                raise ValueError(
                    f"Expected the columns of party {party!r} with which the model was made, got {wrong[1]!r} in place of "
                    f"{wrong[0]!r}: give the party the same columns, under the same names; vertical.align brings them into one "
                    "order."
                )
        super().check(data, unlabelled=unlabelled)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class VerticalModel:
    """A bottom model for each party with features, and a top model at the party with the labels.

    A bottom model maps a party's features ``float32 [n, width]`` to an embedding ``float32 [n, ...]``. The top model maps the
    embeddings, a dict by party in the order of the names, to outputs. Both are Haiku transforms without random draws.

    Parameters are a dict by party: ``params[party]["bottom"]``, and ``params[labels_at]["top"]``. Each party has only its own.

    Attributes:
      bottoms: a transform for each party with features.
      top: the transform of the embeddings.
      labels_at: the party with the labels and the top model.
      widths: the number of features of each party with features.
      columns: the names of each party's columns, which `joint` compares with those of the data; empty where they are unknown.
      label_dtype: ``int32`` or ``float32``.
      num_classes, loss, metrics: see `fedsim.Model`.

    >>> data = VerticalData(features={"bank": jnp.ones([4, 3]), "shop": jnp.ones([4, 2])}, labels=jnp.zeros(4, jnp.int32),
    ...     labels_at="bank", columns={"bank": tuple("abc"), "shop": tuple("de")}, ids=tuple("1234"))
    >>> model = VerticalModel.of(data, bottoms=dense(8), top=concatenate(2), num_classes=2)
    >>> params = model.init(jax.random.key(0))
    >>> {party: sorted(own) for party, own in params.items()}
    {'bank': ['bottom', 'top'], 'shop': ['bottom']}
    >>> model.outputs(params, data.features).shape
    (4, 2)
    """

    bottoms: Mapping[str, hk.Transformed]
    top: hk.Transformed
    labels_at: str
    widths: Mapping[str, int]
    label_dtype: Any = np.int32
    num_classes: int | None = None
    loss: Callable[[Examples, Any], jax.Array] = metrics_lib.cross_entropy
    metrics: Mapping[str, metrics_lib.Metric] | None = None
    columns: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # The top model gets the embeddings in this order, so its parameters mean the same for all data of these parties.
        object.__setattr__(self, "bottoms", {party: self.bottoms[party] for party in sorted(self.bottoms)})

    @classmethod
    def of(
        cls, data: VerticalData, *, bottoms: hk.Transformed | Mapping[str, hk.Transformed], top: hk.Transformed, **options: Any
    ) -> VerticalModel:
        """Returns a model for the parties of ``data``.

        Args:
          data: the aligned data; only its parties, the names and shapes of their columns and the labels matter.
          bottoms: a transform for every party with features, or one for all of them, of which each has its own parameters.
          top: the transform of the embeddings.
          **options: ``num_classes``, ``loss`` and ``metrics``.

        Raises:
          ValueError: a party with features has no transform, or a transform has no party; a transform is not the result of
            ``hk.transform``; labels are not in [0, num_classes); or the loss is the cross-entropy and they are no whole numbers
            or have no output of the model.
        """
        if not isinstance(bottoms, Mapping):
            check_transformed(bottoms=bottoms)
            bottoms = dict.fromkeys(data.features, bottoms)
        if set(bottoms) != set(data.features):
            raise ValueError(
                f"Expected bottoms for the parties with features, {', '.join(data.features)}, got those of "
                f"{', '.join(bottoms) or 'none'}: give one transform for each, or one for all."
            )
        check_transformed(**{f"bottoms[{party!r}]": each for party, each in bottoms.items()}, top=top)
        widths = {party: values.shape[1] for party, values in data.features.items()}
        dtype = np.float32 if np.asarray(data.labels).dtype.kind == "f" else np.int32
        given: dict[str, Any] = {"labels_at": data.labels_at, "widths": widths, "label_dtype": dtype, "columns": data.columns}
        model = cls(bottoms=bottoms, top=top, **given, **options)
        model.check_labels(data.labels, data.ids)
        return model

    def check_labels(self, labels: Any, ids: Sequence[str] | None = None) -> None:
        """Raises ``ValueError`` unless these labels ``[n]`` are of classes of the model, if its loss or metrics are of classes.

        ``ids`` name the people in the error; without them, it names the position.
        """
        labels, where, classes = np.asarray(labels), f"labels at party {self.labels_at!r}", self._classes
        if classes is None:
            return
        if labels.dtype.kind == "f":
            raise ValueError(
                f"Expected {where} to be whole numbers, got {labels.dtype}: convert labels of classes with astype(np.int32), "
                "and for other targets give a loss such as fedsim.metrics.squared_error, without num_classes."
            )
        outside = np.flatnonzero((labels < 0) | (labels >= classes))
        if len(outside):
            person = f"at position {outside[0]}" if ids is None else f"for id {ids[outside[0]]!r}"
            raise ValueError(
                f"Expected {where} in [0, {classes}), got {labels[outside[0]]} {person}: number them from 0, and give as many "
                "outputs and num_classes as there are classes."
            )

    @functools.cached_property
    def _classes(self) -> int | None:
        """The number of classes that labels may have; None if any labels are possible."""
        limits = [] if self.num_classes is None else [self.num_classes]
        if self.loss is metrics_lib.cross_entropy:
            features = {party: jax.ShapeDtypeStruct((1, width), jnp.float32) for party, width in self.widths.items()}
            params = jax.eval_shape(self.init, jax.random.key(0))
            limits.append(jax.eval_shape(self.outputs, params, features).shape[-1])
        return min(limits, default=None)

    @property
    def parties(self) -> tuple[str, ...]:
        """The names of all parties, the one with the labels included."""
        return tuple(dict.fromkeys([*self.bottoms, self.labels_at]))

    @property
    def passive(self) -> tuple[str, ...]:
        """The names of the parties that have features and no labels."""
        return tuple(party for party in self.bottoms if party != self.labels_at)

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, key: jax.Array) -> dict[str, Params]:
        """Returns the parameters of all parties, each drawn with a key of its own."""
        params: dict[str, Params] = {party: {} for party in self.parties}
        embeddings = {}
        for party, bottom in self.bottoms.items():
            features = jnp.zeros([1, self.widths[party]], jnp.float32)
            params[party]["bottom"] = bottom.init(rng.stream(key, party), features)
            embeddings[party] = bottom.apply(params[party]["bottom"], None, features)
        params[self.labels_at]["top"] = self.top.init(rng.stream(key, "top of all parties"), embeddings)
        return params

    def embed(self, party: str, own: Params, features: Any) -> jax.Array:
        """Returns a party's embedding of its features, computed with ``params[party]``."""
        return self.bottoms[party].apply(own["bottom"], None, jnp.asarray(features, jnp.float32))

    def losses(self, own: Params, embeddings: Mapping[str, jax.Array], labels: Any) -> jax.Array:
        """Returns the loss of each person, ``float32 [n]``, computed with ``params[labels_at]`` from embeddings and labels."""
        return self.joint.losses({"y": jnp.asarray(labels)}, self._top_outputs(own, embeddings)).astype(jnp.float32)

    def outputs(self, params: Mapping[str, Params], features: Mapping[str, Any]) -> Any:
        """Returns the outputs of the top model. The embeddings of parties whose features are missing are zeros."""
        count = len(next(iter(features.values())))
        embeddings = {}
        for party, width in self.widths.items():
            own = params[party]
            if party in features:
                embeddings[party] = self.embed(party, own, features[party])
            else:
                absent = jax.ShapeDtypeStruct((count, width), jnp.float32)
                shape = jax.eval_shape(functools.partial(self.embed, party), own, absent)
                embeddings[party] = jnp.zeros(shape.shape, shape.dtype)
        return self._top_outputs(params[self.labels_at], embeddings)

    def _top_outputs(self, own: Params, embeddings: Mapping[str, jax.Array]) -> Any:
        # In one order: JAX sorts the keys of dicts that pass through its functions.
        return self.top.apply(own["top"], None, {party: embeddings[party] for party in self.bottoms})

    @functools.cached_property
    def joint(self) -> Model:
        """The whole network as a `fedsim.Model` of the data of `VerticalData.pooled`, for evaluation and central training.

        `VerticalModel.init` and ``joint.init`` give the same parameters.
        """
        return self.without()

    def without(self, *parties: str) -> Model:
        """Returns `joint` without the features of these parties, whose embeddings are zeros; the parameters are the same.

        Raises:
          ValueError: a party has no features, or no party is left.
        """
        for party in parties:
            if party not in self.widths:
                raise ValueError(f"Expected a party with features, got {party!r}: they are at {', '.join(self.widths)}.")
        widths = {party: width for party, width in self.widths.items() if party not in parties}
        if not widths:
            raise ValueError(f"Expected a party with features to be left, got all of {', '.join(self.widths)}: keep one.")

        def apply(params: Params, examples: Examples, key: jax.Array | None = None) -> Any:
            return self.outputs(params, {party: examples[party] for party in widths})

        features = {party: jax.ShapeDtypeStruct((width,), jnp.float32) for party, width in widths.items()}
        return JointModel(
            init=self.init,
            apply_for_train=apply,
            apply_for_eval=apply,
            loss=self.loss,
            metrics=default_metrics(self.loss) if self.metrics is None else self.metrics,
            features={**features, "y": jax.ShapeDtypeStruct((), self.label_dtype)},
            num_classes=self._classes,
            columns=self.columns,
        )


def dense(width: int, *, hidden: Sequence[int] = ()) -> hk.Transformed:
    """Returns a bottom model: a multilayer perceptron with ReLU between its layers and an embedding ``float32 [n, width]``.

    Without hidden layers it is linear.

    >>> bottom = dense(3, hidden=(8,))
    >>> bottom.apply(bottom.init(jax.random.key(0), jnp.ones([5, 2])), None, jnp.ones([5, 2])).shape
    (5, 3)
    """

    def embedding(features: jax.Array) -> jax.Array:
        return hk.nets.MLP([*hidden, width])(features)

    return hk.transform(embedding)


def concatenate(width: int, *, hidden: Sequence[int] = ()) -> hk.Transformed:
    """Returns a top model: ReLU of all embeddings side by side, then a multilayer perceptron; outputs ``float32 [n, width]``.

    >>> top = concatenate(2)
    >>> embeddings = {"bank": jnp.ones([5, 3]), "shop": jnp.ones([5, 1])}
    >>> top.apply(top.init(jax.random.key(0), embeddings), None, embeddings).shape
    (5, 2)
    """

    def outputs(embeddings: dict[str, jax.Array]) -> jax.Array:
        flat = [embedding.reshape(len(embedding), -1) for embedding in embeddings.values()]
        return hk.nets.MLP([*hidden, width])(jax.nn.relu(jnp.concatenate(flat, axis=1)))

    return hk.transform(outputs)


def sum_embeddings() -> hk.Transformed:
    """Returns a top model without parameters: the sum of the embeddings.

    With `dense` as bottoms, the joint model is linear: logistic regression, if the loss is the cross-entropy.

    Raises:
      ValueError: when it is applied, the embeddings have different shapes.

    >>> sum_embeddings().apply({}, None, {"bank": jnp.array([[1.0]]), "shop": jnp.array([[2.0]])}).tolist()
    [[3.0]]
    """

    def outputs(embeddings: dict[str, jax.Array]) -> jax.Array:
        if len({each.shape for each in embeddings.values()}) > 1:
            shapes = ", ".join(f"{list(each.shape)} of {party!r}" for party, each in embeddings.items())
            raise ValueError(
                f"Expected embeddings of equal shapes to sum, got {shapes}: give all bottom models the same width."
            )
        return functools.reduce(jnp.add, embeddings.values())

    return hk.transform(outputs)
