"""`SplitModel`: a model in two or three parts, which run at different places."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax

from fedsim import metrics as metrics_lib
from fedsim.model._haiku import check_transformed
from fedsim.model._model import Model
from fedsim.model._network import Call, Examples, Feature, Network, Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SplitModel(Model):
    """A model in two or three parts, which run at different places; see `fedsim.algorithms.SplitFed`.

    The part "device" maps examples to activations ``[n, ...]``. The part "server" maps these to the outputs or, if there is a
    part "head", to further activations, which the head maps to the outputs, on the device again. Parameters are a dict by part.

    Attributes:
      parts: functions ``(params[part], value) -> value`` by name, in this order.

    >>> import jax.numpy as jnp
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

        def apply(params: Params, examples: Examples, key: jax.Array | None = None) -> Any:
            return functools.reduce(lambda value, name: parts[name](params[name], value), parts, examples)

        def network(call: Call) -> Network:
            def init(key: jax.Array) -> Params:
                (value,), params = call.example(), {}
                for number, (name, each) in enumerate(transforms.items()):
                    params[name] = each.init(jax.random.fold_in(key, number), value)
                    value = parts[name](params[name], value)
                return params

            return Network(init, apply, apply)

        return cls._of(
            network, features=features, inputs=None, loss=loss, metrics=metrics, num_classes=num_classes, parts=parts
        )


def _apply(transformed: hk.Transformed, params: Params, value: Any) -> Any:
    return transformed.apply(params, None, value)
