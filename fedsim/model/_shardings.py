"""How the arrays of a model are divided over the devices of a mesh that train one client together."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from fedsim.model._parts import named
from fedsim.names import did_you_mean

# Patterns of `fnmatch` for the names of parameters, such as "*/attention/query/w", with what their axes are divided over.
Shardings = Mapping[str, PartitionSpec]


class Division(NamedTuple):
    """How arrays are divided that have the name or the shape of a parameter.

    Attributes:
      parameters: the name, shape and specification of each parameter of the model.

    >>> P = PartitionSpec
    >>> division = Division((("linear/w", (4, 8), P(None, "model")), ("linear/b", (8,), P("model"))))
    >>> tuple(division.spec_of("opt_state/0/mu/linear/w", (4, 8))), tuple(division.spec_of("clients/linear/w", (100, 4, 8)))
    ((None, 'model'), (None, None, 'model'))
    >>> tuple(division.spec_of("round", ()))
    ()
    """

    parameters: tuple[tuple[str, tuple[int, ...], PartitionSpec], ...] = ()

    def spec_of(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the specification of an array.

        An array whose name ends with that of a parameter, such as a moment of an optimizer, is divided like this parameter.
        Other arrays are divided like the parameters of their shape, if these are all divided alike. In both cases the array may
        have more axes before those of the parameter. All others are whole on every device.

        Args:
          name: its path, such as ``"params/linear/w"``.
          shape: its shape.
        """
        alike = [each for each in self.parameters if each[1] and shape[len(shape) - len(each[1]) :] == each[1]]
        of_name = [each for each in alike if f"/{name}".endswith(f"/{each[0]}")]
        of_shape = [each for each in alike if len(each[1]) > 1]
        if not of_name and len({(known, spec) for _, known, spec in of_shape}) != 1:
            return PartitionSpec()
        _, known, spec = max(of_name, key=lambda each: len(each[0])) if of_name else of_shape[0]
        return PartitionSpec(*[None] * (len(shape) - len(known)), *spec)


# Every array is whole on every device.
WHOLE = Division()


def division_of(whole: Any, shardings: Shardings | None, sizes: Mapping[str, int]) -> Division:
    """Returns how a model is divided over the axes of a mesh.

    Args:
      whole: the parameters, with running statistics and other parts, of arrays or ``jax.ShapeDtypeStruct``.
      shardings: the model's own, see `fedsim.Model.with_shardings`; None divides the largest axis of each array that is a
        multiple of the number of devices, the last one of equals, and leaves whole what has none.
      sizes: the number of devices along each axis that may be named, such as ``{"model": 2}``.

    Raises:
      ValueError: a pattern matches no parameter, or a specification does not fit a parameter or the mesh.

    >>> params = {"linear": {"w": np.zeros((4, 8)), "b": np.zeros(3)}}
    >>> [(name, tuple(spec)) for name, _, spec in division_of(params, None, {"model": 2}).parameters]
    [('linear/b', ()), ('linear/w', (None, 'model'))]
    >>> division_of(params, {"linear/b": PartitionSpec("model")}, {"model": 2})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Expected the axes of a parameter that are divided over 'model' to be multiples of 2, got linear/b of shape ...
    """
    leaves = [(name, tuple(np.shape(x))) for name, x in named(whole)]
    if shardings is None:
        model = sizes.get("model", 1)
        return Division(tuple((name, shape, _largest_axis(shape, model)) for name, shape in leaves))
    specs: dict[str, PartitionSpec] = {}
    names = [name for name, _ in leaves]
    for pattern, spec in shardings.items():
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ValueError(
                f"There is no parameter {pattern!r} to be divided.{did_you_mean(pattern, names)} The parameters are "
                f"{', '.join(names)}."
            )
        specs |= {name: spec for name in matches if name not in specs}
    return Division(
        tuple((name, shape, _fitting(name, shape, specs.get(name, PartitionSpec()), sizes)) for name, shape in leaves)
    )


def _largest_axis(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    divisible = [(size, at) for at, size in enumerate(shape) if devices > 1 and size and size % devices == 0]
    if not divisible:
        return PartitionSpec()
    _, at = max(divisible)
    return PartitionSpec(*[None] * at, "model")


def _fitting(name: str, shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns a specification without axes of one device; raises ``ValueError`` if it does not fit the parameter."""
    if len(spec) > len(shape):
        raise ValueError(
            f"Expected a specification of at most {len(shape)} axes for {name} of shape {list(shape)}, got {spec}: leave the "
            "others out."
        )
    kept = []
    for size, over in zip(shape, spec, strict=False):
        axes = over if isinstance(over, tuple) else (() if over is None else (over,))
        for axis in axes:
            if axis not in sizes:
                raise ValueError(
                    f"Expected the parameter {name} to be divided over {' or '.join(map(repr, sizes))}, got {axis!r} in {spec}:"
                    " use these axes of fedsim.Sharded."
                )
        used = tuple(axis for axis in axes if sizes[axis] > 1)
        devices = int(np.prod([sizes[axis] for axis in used], dtype=int))
        if size % devices:
            raise ValueError(
                f"Expected the axes of a parameter that are divided over {', '.join(map(repr, used))} to be multiples of "
                f"{devices}, got {name} of shape {list(shape)} for {spec}: choose another number of devices, or leave this "
                "axis out of its specification."
            )
        kept.append(used[0] if len(used) == 1 else (used or None))
    return PartitionSpec(*kept)
