"""`differentiable`: an algorithm whose rounds `jax.grad` can differentiate, after a check that the derivatives are right."""

from __future__ import annotations

import copy
from typing import TypeVar

from fedsim import checks
from fedsim.algorithm import Algorithm
from fedsim.differentiation._straight_through import not_differentiable, with_straight_through
from fedsim.execution import Jit

A = TypeVar("A", bound=Algorithm)


def differentiable(algorithm: A, *, straight_through: bool = False) -> A:
    """Returns a copy of an algorithm whose `apply` and `apply_rounds` can be differentiated in reverse, as by `jax.grad`.

    Derivatives are with respect to everything that a round computes with:

    - the algorithm's numbers, such as ``mu``, and numbers in its optimizers and aggregators: ``optax.sgd(rate)``,
      ``Clipped(norm)``. Make the algorithm inside the function that is differentiated.
    - the state before the first round, such as the initial parameters.
    - weights of clients and examples, which are arrays in a method or in the model's loss, as below.

    A round gives the same result as without, up to the order of floating-point sums. It runs on one device. Every client takes
    its own number of steps, also in the backward pass. Up to 32 states of its steps are stored for it, or about the square
    root of the number of steps of the population's largest client, if that is more than 32 steps. Clients whose updates do not
    count, because they took no step or were dropped as not finite, have no part in derivatives.

    Args:
      algorithm: an algorithm that does not override `apply`.
      straight_through: whether parts without a useful derivative (they round, sort, select or send signs) get the
        straight-through derivative: that of an uncompressed update for a compressor, that of the weighted mean for an
        aggregator. The values do not change. What the algorithm itself chooses, such as a cluster, is held fixed.

    These are the parts in the fields `aggregator` and `downlink`. A ``round`` of your own that gives `clients.aggregate` other
    parts has their derivatives as they are.

    Raises:
      ValueError: the algorithm overrides `apply`; or parts have no useful derivative and ``straight_through`` is False. The
        error names all such parts.

    The derivative of a loss after a round with respect to the clients' learning rate:

    >>> import jax, jax.numpy as jnp, numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.arange(384, dtype=np.uint8).reshape(6, 8, 8, 1) % 17, "y": np.arange(6, dtype=np.int32)}, sizes=[4, 2])
    >>> cohort = fedsim.Cohort.of(data, data.client_ids)
    >>> model = fedsim.models.digits_logistic()
    >>> loss = fedsim.differentiation.validation_loss(model, data)
    >>> def make(rate, **options):
    ...     return fedsim.algorithms.FedAvg(
    ...         model=model, client_optimizer=optax.sgd(rate), batches=fedsim.Batches(size=4), **options)
    >>> def loss_after(rate):
    ...     algorithm = differentiable(make(rate))
    ...     return loss(algorithm.apply(algorithm.init(jax.random.key(0)), cohort)[0])
    >>> bool(jax.grad(loss_after)(0.01) < 0)
    True
    >>> differentiable(make(0.01, downlink=fedsim.compressors.QSGD()))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Expected parts with a useful derivative, got downlink=QSGD(per_tensor=True, levels=7), which rounds. Use ...

    With respect to the weight of each example, where the data has a column with the number of the example::

        def loss_after(weights):  # [number of examples]
            def weighted(examples, outputs):
                return weights[examples["number"]] * model.loss(examples, outputs)

            algorithm = differentiable(FedAvg(model=dataclasses.replace(model, loss=weighted), ...))

    With respect to the weight of each client, in an algorithm that has the field ``client_weights``, an array::

        def weight(self, client):
            return self.client_weights[client.position]
    """
    checks.instance(Algorithm, "fedsim.algorithms.FedAvg(...)", algorithm=algorithm)
    checks.truth(straight_through=straight_through)
    name = type(algorithm).__name__
    if type(algorithm).apply is not Algorithm.apply:
        raise ValueError(
            f"Expected an algorithm whose rounds are compiled, got {name}, which overrides apply: define client_update or "
            "round instead, in plain JAX."
        )
    parts = {"aggregator": algorithm.aggregator, "downlink": algorithm.downlink}
    parts = {part: value for part, value in parts.items() if value is not None}
    if straight_through:
        parts = {part: with_straight_through(value) for part, value in parts.items()}
    else:
        problems = [f"{name} itself, which {algorithm.not_differentiable}"] if algorithm.not_differentiable else []
        problems += [text for part, value in parts.items() for text in not_differentiable(value, part)]
        if problems:
            raise ValueError(
                f"Expected parts with a useful derivative, got {'; '.join(problems)}. Use straight_through=True, which "
                "takes the derivative of a part that changes nothing, or execution=fedsim.Jit(differentiable=True) for the "
                "derivative as it is."
            )
    execution = algorithm.execution
    if not (isinstance(execution, Jit) and execution.differentiable):
        own = {name: getattr(execution, name) for name in ("lanes", "deterministic") if hasattr(execution, name)}
        execution = Jit(**own, differentiable=True)
    # Not dataclasses.replace, which would run __post_init__ again, and refuses fields that it sets.
    copied = copy.copy(algorithm)
    for field, value in {**parts, "execution": execution}.items():
        object.__setattr__(copied, field, value)
    return copied
