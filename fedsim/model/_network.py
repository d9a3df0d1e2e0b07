"""What the constructors of `Model` have in common: a network of any library as three functions, its inputs, and its errors."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = Any
Examples = Mapping[str, jax.Array]
Feature = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]

_CONSTRUCTORS = {
    "haiku": "from_haiku(hk.transform(function))",
    "flax.linen": "from_flax(module)",
    "flax.nnx": "from_nnx(lambda rngs: ...)",
    "equinox": "from_equinox(lambda key: ...)",
    "keras": "from_keras(lambda: ...)",
}

_INSTEAD_OF_COUNTS = {
    "haiku": "use fedsim.models.BatchNorm in place of hk.BatchNorm, or ",
    "equinox": "use eqx.nn.BatchNorm(mode='batch') or eqx.nn.GroupNorm, or ",
}


class Network(NamedTuple):
    """A network as pure functions.

    Attributes:
      init: ``key -> params``.
      train: ``(params, examples, key) -> outputs``.
      evaluate: ``(params, examples) -> outputs``.
      is_statistic: for a network with running statistics, which ``init`` returns, too, a pytree of that structure: whether a
        leaf is one of them. ``train`` then returns the outputs and the new statistics, with None in place of other leaves.
    """

    init: Callable[[jax.Array], Params]
    train: Callable[[Params, Examples, jax.Array], Any]
    evaluate: Callable[[Params, Examples], Any]
    is_statistic: Any = None


class Call(NamedTuple):
    """How a network is called.

    Attributes:
      read: the function from examples to the positional arguments.
      features: those of the model.
      train_kwargs: keyword arguments in training, and when parameters are drawn.
      eval_kwargs: keyword arguments in evaluation.
    """

    read: Callable[[Examples], tuple[Any, ...]]
    features: Mapping[str, Feature]
    train_kwargs: dict[str, Any]
    eval_kwargs: dict[str, Any]

    @classmethod
    def of(
        cls,
        features: Mapping[str, Feature],
        inputs: str | tuple[str, ...] | None,
        train_kwargs: Mapping[str, Any] | None = None,
        eval_kwargs: Mapping[str, Any] | None = None,
    ) -> Call:
        """Returns the call with these inputs: the name of a feature, or several; None for the dict of all features.

        Raises:
          ValueError: ``inputs`` names something else.

        >>> spec = jax.ShapeDtypeStruct((), jnp.float32)
        >>> Call.of({"x": spec, "z": spec}, ("x", "z")).read({"x": 1.0, "y": 2.0, "z": 3.0})
        (1.0, 3.0)
        """
        names = (inputs,) if isinstance(inputs, str) else inputs
        if names is not None and (not isinstance(names, tuple) or not names or any(name not in features for name in names)):
            raise ValueError(
                f"Expected inputs to be the name of a feature or a tuple of names, of {sorted(features)}, got "
                f"inputs={inputs!r}: name the features that the network gets, in the order of its arguments."
            )

        def read(examples: Examples) -> tuple[Any, ...]:
            return (examples,) if names is None else tuple(examples[name] for name in names)

        return cls(read, features, dict(train_kwargs or {}), dict(eval_kwargs or {}))

    def example(self) -> tuple[Any, ...]:
        """Returns the positional arguments for one example of zeros."""
        return jax.tree.map(jnp.asarray, self.read(zeros(self.features, 1)))


def zeros(features: Mapping[str, Feature], count: int) -> dict[str, Any]:
    """Returns ``count`` examples of zeros. Of a feature with several dtypes, it takes the first.

    >>> zeros({"x": jax.ShapeDtypeStruct((2,), jnp.int8)}, 3)["x"].shape
    (3, 2)
    """
    first = {name: accepted(feature)[0] for name, feature in features.items()}
    return {name: np.zeros((count, *spec.shape), spec.dtype) for name, spec in first.items()}


def accepted(feature: Feature) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes and dtypes that a feature may have."""
    return feature if isinstance(feature, tuple) else (feature,)


def accepts(function: Callable, name: str) -> bool:
    """Returns whether a function has an argument that can be given by this name.

    >>> accepts(lambda params, x, key=None: x, "key"), accepts(lambda params, x: x, "key")
    (True, False)
    """
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def imported(module: str, *, extra: str, constructor: str) -> Any:
    """Imports a library that is optional.

    Raises:
      ImportError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"Model.{constructor} needs {module}: pip install 'fedsim-jax[{extra}]'.") from error


def library_of(value: Any) -> str | None:
    """Returns the library of a network or of its class, such as "flax.linen"; None if it is of none that is known.

    >>> import haiku as hk
    >>> library_of(hk.transform(lambda x: x)), library_of(hk.Linear), library_of(print)
    ('haiku', 'haiku', None)
    """
    for base in (value if isinstance(value, type) else type(value)).__mro__:
        for library in _CONSTRUCTORS:
            if f"{base.__module__}.".startswith(f"{library}."):
                return library
    return None


def unexpected(argument: str, value: Any, expected: str, library: str, remedy: str) -> ValueError:
    """Returns the error for a network that a constructor does not take; of another library, it names the right constructor."""
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    other = library_of(value)
    if other not in (None, library):
        remedy = f"it is of {other}, so use fedsim.Model.{_CONSTRUCTORS[other]}"
    return ValueError(f"Expected {argument} to be {expected}, got a {name}: {remedy}.")


def check_maker(make: Any, library: str, remedy: str) -> None:
    """Raises ``ValueError`` unless ``make`` is a function, or a class of the library, that makes networks.

    A network that was made before is refused, because its parameters would be the same for every seed.
    """
    other = library_of(make)
    is_network = other is not None and not isinstance(make, type)
    if not callable(make) or is_network or other not in (None, library):
        raise unexpected("make", make, f"a function that makes a network of {library}", library, remedy)


def made_by(make: Callable[..., Any], *arguments: Any, constructor: str, given: str) -> Any:
    """Returns what a user's ``make`` returns. An error of it gets a note about how it was called.

    >>> try:
    ...     made_by(lambda rngs: rngs.params(), jax.random.key(0), constructor="from_equinox", given="a key")
    ... except Exception as error:
    ...     print(error.__notes__[0][:59])
    Model.from_equinox calls make with a key. Networks of other
    """
    try:
        return make(*arguments)
    except Exception as error:
        others = ", ".join(f"Model.{each}" for each in _CONSTRUCTORS.values() if not each.startswith(constructor))
        error.add_note(f"Model.{constructor} calls make with {given}. Networks of other libraries have {others}.")
        raise


def check_statistics(library: str, state: Any) -> None:
    """Raises ``ValueError`` unless all variables of a network's state are floats, which can be averaged.

    >>> check_statistics("haiku", {"ema": {"counter": jnp.int32(0)}})
    Traceback (most recent call last):
    ...
    ValueError: Expected the state of a network of haiku to be floats, which can be averaged over clients, got \
ema/counter of dtype int32: use fedsim.models.BatchNorm in place of hk.BatchNorm, or keep counts out of the state.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            remedy = _INSTEAD_OF_COUNTS.get(library, "")
            raise ValueError(
                f"Expected the state of a network of {library} to be floats, which can be averaged over clients, got "
                f"{name} of dtype {leaf.dtype}: {remedy}keep counts out of the state."
            )


def check_same_form(before: Any, after: Any) -> None:
    """Raises ``ValueError`` if a network's state after a step has other variables, shapes or dtypes than before.

    >>> check_same_form({"seen": jnp.zeros(2)}, {"seen": jnp.zeros(3)})
    Traceback (most recent call last):
    ...
    ValueError: Expected the state of a network to have the same shapes after a step, got seen of float32[3] after \
float32[2]: keep a state of fixed shapes.
    """
    forms = [
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): f"{jnp.result_type(x)}{list(jnp.shape(x))}"
            for path, x in jax.tree_util.tree_leaves_with_path(state)
        }
        for state in (before, after)
    ]
    for name in [*forms[0], *forms[1]]:
        old, new = (form.get(name, "nothing") for form in forms)
        if old != new:
            raise ValueError(
                f"Expected the state of a network to have the same shapes after a step, got {name} of {new} after {old}: keep "
                "a state of fixed shapes."
            )


def joined(*collections: Mapping[Any, Any], module: str = "") -> dict[Any, Any]:
    """Returns nested dicts as one, which has the leaves of all of them.

    Args:
      *collections: parameters, and variables of the state.
      module: where they are, for the message.

    Raises:
      ValueError: two leaves have one name.

    >>> joined({"norm": {"scale": 1.0}}, {"norm": {"mean": 0.5}})
    {'norm': {'scale': 1.0, 'mean': 0.5}}
    """
    whole: dict[Any, Any] = {}
    for collection in collections:
        for name, value in collection.items():
            before = whole.get(name, {})
            if isinstance(value, Mapping) and isinstance(before, Mapping):
                whole[name] = joined(before, value, module=f"{module}{name}/")
            elif name not in whole:
                whole[name] = value
            else:
                raise ValueError(
                    "Expected the parameters and the state of a network to have different names, got two variables "
                    f"{module}{name}: rename one of them."
                )
    return whole
