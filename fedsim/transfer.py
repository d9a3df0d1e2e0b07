"""Transfer: a federation that starts from the model of another one, with a new head, which is trained first.

The head of a network is its last part, by default the output layer, and the body is the rest. `transfer_body` copies the body.
`with_rates` gives parts rates of their own. `probe_then_tune` trains the head alone (linear probing) and then everything
(fine-tuning), the order that A. Kumar, A.
Raghunathan, R. Jones, T. Ma, P. Liang, "Fine-tuning can distort pretrained features and underperform out-of-distribution", ICLR
2022, https://arxiv.org/abs/2202.10054, recommend. For heads that clients keep for themselves, see `fedsim.algorithms.FedPer`,
which chooses the head in the same way.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from fedsim import checks
from fedsim.model import Model, Params
from fedsim.names import did_you_mean

Head = Callable[[str, str], bool]


def head_of(model: Model, head: Head | None = None) -> Head:
    """Returns the function from a Haiku module's name and a parameter's name to whether the parameter belongs to the head.

    Args:
      model: a model of Haiku modules.
      head: such a function; None for the module that the model creates last, usually the output layer.

    Raises:
      ValueError: ``head`` is neither a function nor None.

    >>> import fedsim
    >>> is_head = head_of(fedsim.models.digits_dense())
    >>> is_head("linear", "w"), is_head("linear_2", "w")
    (False, True)
    """
    if head is None:
        last = module_names(model)[-1]
        return lambda module, name: module == last
    if not callable(head):
        raise ValueError(f"Expected head to be a function of a module's and a parameter's name, or None, got head={head!r}.")
    return head


def module_names(model: Model) -> list[str]:
    """Returns the names of the modules in the order in which the model creates their parameters, which these do not keep.

    >>> import fedsim
    >>> module_names(fedsim.models.digits_dense())
    ['linear', 'linear_1', 'linear_2']
    """
    names: list[str] = []
    init = (model.network or model).init  # that of a model in parts is sorted
    with jax.disable_jit():  # The results of a compiled function are sorted.
        jax.eval_shape(lambda key: names.extend(init(key)), jax.random.key(0))
    return names


def in_head(model: Model, params: Params, head: Head | None = None) -> Params:
    """Returns for each of the parameters whether it belongs to the head, a pytree of bools.

    Args:
      model: a model of Haiku modules.
      params: its parameters, or those of a part of it.
      head: see `head_of`.

    >>> import fedsim
    >>> model = fedsim.models.digits_dense()
    >>> in_head(model, model.init(jax.random.key(0)))["linear_2"]
    {'b': True, 'w': True}
    """
    is_head = head_of(model, head)

    def of_leaf(path: Any, value: Any) -> bool:
        module, _, name = _names(path, params)[0].rpartition("/")
        return is_head(module, name)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def _names(path: Any, params: Any) -> list[str]:
    """Returns the names of a leaf, such as "linear/w": the last is its path, and the first its name in the model.

    They differ if algorithms train a named tuple of parameters, such as σ and ψ in FedMatch, or a model and a number in APFL.
    """
    in_field = isinstance(params, tuple) and hasattr(params, "_fields") and len(path) > 1
    return [jax.tree_util.keystr(path[first:], simple=True, separator="/") for first in ((1, 0) if in_field else (0,))]


def transfer_body(model: Model, new: Params, old: Params, *, head: Head | None = None) -> Params:
    """Returns the parameters ``new`` in which all but the head are replaced by those of another model.

    Args:
      model: the model of ``new``.
      new: its parameters, or only those of its body, as in the state of `fedsim.algorithms.FedPer`.
      old: the parameters of the other model, which has the same body. Modules that the new model does not have are ignored.
      head: see `head_of`. ``lambda module, name: False`` replaces everything.

    Raises:
      ValueError: the other model has no parameter of that name and shape for a part of the body. The message lists all.

    >>> import fedsim
    >>> old, new = fedsim.models.dense([8, 8, 1], 5), fedsim.models.dense([8, 8, 1], 10)
    >>> before = old.init(jax.random.key(0))
    >>> params = transfer_body(new, new.init(jax.random.key(1)), before)
    >>> params["linear"]["w"] is before["linear"]["w"], params["linear_2"]["w"].shape
    (True, (200, 10))

    A federation starts from these parameters if they replace those of its first state:

    >>> algorithm = fedsim.algorithms.FedAvg(model=new, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20))
    >>> state = algorithm.init(jax.random.key(1))._replace(params=params)
    """
    is_head, wrong = head_of(model, head), []

    def chosen(module: str, name: str, value: Any) -> Any:
        if value is None or is_head(module, name):  # None: of another part of the model, such as the frozen one
            return value
        found = old.get(module, {}).get(name)
        if found is None or jnp.shape(found) != jnp.shape(value):
            there = "there is none" if found is None else f"there it has {list(jnp.shape(found))}"
            wrong.append(f"{module}/{name} {list(jnp.shape(value))} ({there})")
        return found

    params = hk.data_structures.map(chosen, new)
    if wrong:
        raise ValueError(
            f"Expected old to have the parameters of the body of the new model, got others for {', '.join(wrong)}: use a model "
            "with the same body, or set head to what is not transferred."
        )
    return params


def probe_then_tune(
    model: Model, optimizer: optax.GradientTransformation, *, rounds: int, head: Head | None = None
) -> Callable[[jax.Array], optax.GradientTransformation]:
    """Returns a ``client_optimizer`` that trains the head alone in the first ``rounds`` rounds, and then everything.

    While the head is probed, the body does not change by a bit, and the optimizer gets gradients of 0 for it.

    Args:
      model: the model.
      optimizer: the optimizer of all rounds.
      rounds: the number of rounds in which only the head is trained, at least 0. For linear probing alone, give all rounds.
      head: see `head_of`.

    Returns:
      A function from the number of server updates so far, ``int32 []``, to a transformation.

    Raises:
      ValueError: ``rounds`` is negative, or ``optimizer`` is not an optax transformation.

    >>> import fedsim
    >>> model = fedsim.models.digits_dense()
    >>> client_optimizer = probe_then_tune(model, optax.sgd(0.1), rounds=5)
    >>> params = model.init(jax.random.key(0))
    >>> for round in (4, 5):
    ...     optimizer = client_optimizer(jnp.int32(round))
    ...     step, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params))
    ...     print(*(f"{float(step[module]['b'][0]):.1f}" for module in sorted(step)))
    0.0 0.0 -0.1
    -0.1 -0.1 -0.1
    """
    checks.optimizer(optimizer=optimizer)
    checks.whole(0, rounds=rounds)
    head_of(model, head)  # raises ValueError

    def client_optimizer(round: jax.Array) -> optax.GradientTransformation:
        def of_head(updates: Params, params: Params | None) -> Params:
            def step(is_head: bool, value: jax.Array) -> jax.Array:
                return value if is_head else jnp.where(round < rounds, jnp.zeros_like(value), value)

            return jax.tree.map(step, in_head(model, updates, head), updates)

        # Before the optimizer, so that it does not clip by gradients of the body, and after it, for weight decay.
        probe = optax.stateless(of_head)
        return optax.chain(probe, optimizer, probe)

    return client_optimizer


def with_rates(optimizer: optax.GradientTransformation, rates: Mapping[str, float]) -> optax.GradientTransformation:
    """Returns an optimizer whose steps are multiplied by a number for some parameters, so that these have rates of their own.

    It is a ``client_optimizer`` of any algorithm that does not need the same rate for all parameters (as SCAFFOLD, FedNova and
    FedCM do, which refuse it), and a ``server_optimizer``.

    Args:
      optimizer: the optimizer of all parameters.
      rates: positive factors by patterns of `fnmatch` for names of parameters, such as ``{"linear_2/*": 0.1}``. The first
        pattern that matches counts; parameters that none matches have the factor 1.

    Raises:
      ValueError: a factor is not positive; or, when the first round is traced, a pattern matches no parameter.

    >>> import fedsim
    >>> params = fedsim.models.digits_dense().init(jax.random.key(0))
    >>> optimizer = with_rates(optax.sgd(0.1), {"linear_2/*": 10.0, "*/b": 0.5})
    >>> step, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params))
    >>> [round(float(step[module]["b"][0]), 3) for module in ("linear", "linear_2")]
    [-0.05, -1.0]
    """
    checks.optimizer(optimizer=optimizer)
    for pattern, rate in rates.items():
        given: dict[str, Any] = {f"rates[{pattern!r}]": rate}
        checks.number(above=0, **given)

    def scaled(updates: Params, params: Params | None) -> Params:
        names = [name for path, _ in jax.tree_util.tree_leaves_with_path(updates) for name in _names(path, updates)]
        for pattern in rates:
            if not fnmatch.filter(names, pattern):
                raise ValueError(
                    f"There is no parameter {pattern!r} to have a rate of its own.{did_you_mean(pattern, names)} The "
                    f"parameters are {', '.join(names)}."
                )

        def step(path: Any, update: jax.Array) -> jax.Array:
            found = (rate for pattern, rate in rates.items() if fnmatch.filter(_names(path, updates), pattern))
            return update * next(found, 1.0)

        return jax.tree_util.tree_map_with_path(step, updates)

    return optax.chain(optimizer, optax.stateless(scaled))
