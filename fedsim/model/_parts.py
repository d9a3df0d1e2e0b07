"""`ModelParts`: what a model has besides the parameters that an algorithm sees, such as running statistics."""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from fedsim import tree
from fedsim.model._network import Network, accepts
from fedsim.names import did_you_mean

# What each part is called in messages.
PARTS_IN_WORDS = {
    "statistics": "running statistics",
    "own_statistics": "running statistics that clients keep",
    "frozen": "frozen parts",
    "kept": "parameters that clients keep",
}


class ModelParts(NamedTuple):
    """The arrays of a model that are not among the parameters of an algorithm, which the server sends and clients train.

    Each field is a pytree with the structure of the whole model, and None in place of the leaves that are not of this part, or
    () if there are none at all.

    Attributes:
      frozen: parameters that never change. They are not sent.
      kept: parameters that each client trains and keeps. The server has those of a client that has not trained.
      statistics: running statistics, such as those of batch normalization, which a client receives and changes in its local
        steps. The server takes the weighted mean of the results.
      own_statistics: running statistics that each client keeps.

    >>> parts = ModelParts(frozen={"w": 1.0, "b": None, "mean": None}, statistics={"w": None, "b": None, "mean": 0.5})
    >>> parts.join({"w": None, "b": 2.0, "mean": None})
    {'b': 2.0, 'mean': 0.5, 'w': 1.0}
    """

    frozen: Any = ()
    kept: Any = ()
    statistics: Any = ()
    own_statistics: Any = ()

    def join(self, params: Any) -> Any:
        """Returns the whole model with these parameters, some of which may be those of a part."""
        return tree.merge(params, *(part for part in self if part != ()))

    def of_model(self, model: Any) -> tuple[Any, ModelParts]:
        """Returns the parameters of a model, and these parts with its values; a model may lack frozen parts.

        >>> parts = ModelParts(statistics={"w": None, "mean": 0.5})
        >>> parts.of_model({"w": 2.0, "mean": 0.25})
        ({'mean': None, 'w': 2.0}, ModelParts(frozen=(), kept=(), statistics={'mean': 0.25, 'w': None}, own_statistics=()))
        """
        params, found = model, self
        for name, part in self._asdict().items():
            if part != ():
                params = tree.masked(params, part, inverted=True)
                found = found if name == "frozen" else found._replace(**{name: tree.masked(model, like=part)})
        return params, found

    def after_step(self, params: Any, statistics: Any) -> ModelParts:
        """Returns the parts after a local step.

        Args:
          params: the parameters after it, with those that the client keeps.
          statistics: what the model computed for all running statistics; None if it was not called.
        """
        after = self if self.kept == () else self._replace(kept=tree.masked(params, like=self.kept))
        if statistics is None:
            return after
        new = {
            name: jax.tree.map(lambda old, x: x.astype(old.dtype), part, tree.masked(statistics, like=part))
            for name in ("statistics", "own_statistics")
            if (part := getattr(self, name)) != ()
        }
        return after._replace(**new)

    @property
    def are_changed(self) -> bool:
        """Whether clients change some of them."""
        return any(part != () for part in self._replace(frozen=()))

    @property
    def of_client(self) -> ModelParts:
        """What a client keeps."""
        return ModelParts(kept=self.kept, own_statistics=self.own_statistics)

    def with_client(self, own: ModelParts) -> ModelParts:
        """Returns the parts with those that a client keeps."""
        return self._replace(kept=own.kept, own_statistics=own.own_statistics)


class Scope:
    """The parts that functions of a model use for what their parameters lack, and the statistics that they compute.

    Args:
      parts: the parts.
      mask: see `mask`.
      trained: the parameters that are trained. A loss may call the model with others, too, whose statistics do not count.

    Attributes:
      parts: the parts.
      new: the running statistics after a call of the model in training with ``trained``, or with other parameters if there was
        none; a pytree of the whole model with None in place of the other leaves. None before.
      reads_mask: whether a network has read the mask.
      frozen_statistics: whether training normalizes by the running statistics, as evaluation does.
    """

    def __init__(self, parts: ModelParts, mask: jax.Array | None = None, trained: Any = None) -> None:
        self.parts, self._mask, self._trained = parts, mask, trained
        self.new: Any = None
        self.reads_mask = False
        self.frozen_statistics = False

    def inner(self) -> contextlib.AbstractContextManager[Scope]:
        """A context like this one, with a scope of its own."""
        return scope_of(self.parts, self._mask, self._trained)

    def record(self, params: Any, new: Any) -> None:
        """Stores the statistics after a call of the model with these parameters."""
        if self.new is None or params is self._trained:
            self.new = new

    @property
    def mask(self) -> jax.Array | None:
        """Which rows of the batch are real, ``bool [n]``; None if all are."""
        self.reads_mask = True
        return self._mask


_SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("scope", default=None)


@contextlib.contextmanager
def scope_of(parts: Any, mask: jax.Array | None = None, trained: Any = None) -> Iterator[Scope]:
    """A context in which functions of a model get these parts, () for a model without parts; see `Scope`.

    >>> with scope_of(ModelParts(frozen={"w": 1.0})):
    ...     current_scope().parts.frozen
    {'w': 1.0}
    """
    scope = Scope(parts or ModelParts(), mask, trained)
    token = _SCOPE.set(scope)
    try:
        yield scope
    finally:
        _SCOPE.reset(token)


def current_scope() -> Scope:
    """Returns the scope of the innermost context; outside of all, one without parts.

    >>> current_scope().parts == ModelParts()
    True
    """
    return _SCOPE.get() or Scope(ModelParts())


def mask_for(call: Callable) -> dict[str, Any]:
    """Returns the mask of the batch as a keyword argument of a network, {} if the network has no argument ``mask``.

    >>> mask_for(lambda x, mask=None: x), mask_for(lambda x: x)
    ({'mask': None}, {})
    """
    return {"mask": current_scope().mask} if accepts(call, "mask") else {}


# The parts that the leaves of a model belong to: "params" are the parameters of the algorithm.
Role = Literal["params", "frozen", "kept", "statistics", "own_statistics"]


# Patterns of `fnmatch` for the names of leaves, such as "linear/*", or a function of a name.
Names = str | Sequence[str] | Callable[[str], bool]


class Divided(NamedTuple):
    """The functions of a `fedsim.Model` whose leaves are divided into parts, see there."""

    init: Callable[[jax.Array], Any]
    init_parts: Callable[[jax.Array], ModelParts]
    apply_for_train: Callable[[Any, Any, jax.Array], Any]
    apply_for_eval: Callable[[Any, Any], Any]


def divide(network: Network, roles: Any) -> Divided:
    """Divides a network's leaves into parts.

    Args:
      network: the functions of the whole network.
      roles: a pytree of the structure of the leaves, with a `Role` for each.
    """
    structure, present = jax.tree.structure(roles), set(jax.tree.leaves(roles))
    frozen_statistics = not present & {"statistics", "own_statistics"}

    def part(whole: Any, name: str) -> Any:
        return jax.tree.map(lambda role, x: x if role == name else None, roles, whole)

    def init_parts(key: jax.Array) -> ModelParts:
        drawn = network.init(key)
        return ModelParts(**{name: part(drawn, name) for name in ModelParts._fields if name in present})

    def is_whole(params: Any) -> bool:
        return jax.tree.structure(params) == structure  # type: ignore[operator]

    def whole(params: Any, scope: Scope) -> Any:
        if is_whole(params):
            return params
        joined = scope.parts.join(params)
        if not is_whole(joined):
            given = dict(named(joined))
            missing = ", ".join(name for name, _ in named(roles) if name not in given) or "one of another structure"
            raise ValueError(
                f"Expected all parameters of the model, got none for {missing}: give state.params, which has all parts of it."
            )
        return joined

    def train(params: Any, examples: Any, key: jax.Array) -> Any:
        scope = current_scope()
        if network.is_statistic is None:
            return network.train(whole(params, scope), examples, key)
        with scope.inner() as inner:
            inner.frozen_statistics = frozen_statistics
            outputs, new = network.train(whole(params, scope), examples, key)
        scope.reads_mask |= inner.reads_mask
        if not is_whole(params):  # Otherwise it is another model, such as a teacher, which is not trained.
            scope.record(params, new)
        return outputs

    return Divided(
        init=lambda key: part(network.init(key), "params"),
        init_parts=init_parts,
        apply_for_train=train,
        apply_for_eval=lambda params, examples: network.evaluate(whole(params, current_scope()), examples),
    )


def keeps_parts(model: Any) -> bool:
    """Returns whether clients keep parts of a model, so that each has a model of its own.

    >>> import fedsim
    >>> keeps_parts(fedsim.models.digits_dense().with_parts(kept="linear_2/*")), keeps_parts(fedsim.models.digits_dense())
    (True, False)
    """
    return bool({"kept", "own_statistics"} & set(jax.tree.leaves(getattr(model, "roles", None))))


def named(a: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a pytree with their names.

    >>> named({"linear": {"w": 1.0}})
    [('linear/w', 1.0)]
    """
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in jax.tree_util.tree_leaves_with_path(a)]


def assigned(roles: Any, names: Mapping[str, Names]) -> Any:
    """Returns roles in which the parameters with some names have others.

    Args:
      roles: a pytree with a `Role` for each leaf.
      names: which parameters have a role, see `fedsim.Model.with_parts`.

    Raises:
      ValueError: see `fedsim.Model.with_parts`.

    >>> assigned({"body": {"w": "params"}, "head": {"w": "params"}}, {"kept": "head/*"})
    {'body': {'w': 'params'}, 'head': {'w': 'kept'}}
    >>> assigned({"body": {"w": "params"}}, {"kept": "bodi/*"})
    Traceback (most recent call last):
    ...
    ValueError: There is no parameter 'bodi/*' to be kept. Did you mean 'body/w'? The parameters are body/w.
    """
    known, structure = dict(named(roles)), jax.tree.structure(roles)
    free = [name for name, role in known.items() if role in ("params", "frozen", "kept")]
    new = dict(known)
    for role, meant in names.items():
        if callable(meant):
            found = [name for name in free if meant(name)]
            if not found:
                raise ValueError(f"The function for {role} is False for all parameters, which are {', '.join(free)}.")
        else:
            found = []
            for pattern in (meant,) if isinstance(meant, str) else meant:
                matches = fnmatch.filter(free, pattern)
                if not matches:
                    raise ValueError(
                        f"There is no parameter {pattern!r} to be {role}.{did_you_mean(pattern, free)} The parameters are "
                        f"{', '.join(free)}."
                    )
                found += matches
        for name in found:
            if new[name] not in ("params", role):
                raise ValueError(f"Expected each parameter to have one role, got {name} as {new[name]} and {role}.")
            new[name] = role
    if "params" not in new.values():
        raise ValueError(
            f"Expected some parameters to be trained and sent, got {len(new)} frozen or kept ones: leave some out."
        )
    return jax.tree.unflatten(structure, new.values())
