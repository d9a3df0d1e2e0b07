"""What FedAvg and FedSGD share: a server that takes the clients' aggregate for a gradient (FedOpt, Reddi et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedsim import checks
from fedsim.algorithm import Algorithm
from fedsim.data import FederatedData
from fedsim.execution import Client, Turnout
from fedsim.model import Model, Params

# Steps of a rate of 0 that pass for the start of a warm-up.
_WARM_UP = 100


class ServerState(NamedTuple):
    """Parameters, the server optimizer's state, how often the server has updated, ``int32 []``, and what a subclass adds."""

    params: Params
    opt_state: optax.OptState
    round: jax.Array
    more: Any = ()


class Shared(NamedTuple):
    """What clients get: parameters, how often the server has updated, ``int32 []``, and what a subclass adds."""

    params: Params
    round: jax.Array
    more: Any = ()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GradientServer(Algorithm):
    """An algorithm whose clients send something like a gradient, and whose server descends along the aggregate.

    Attributes:
      model: the model.
      server_optimizer: an optax transformation; default SGD of rate 1.
      weighting: ``"examples"`` weights a client by its number of examples, ``"uniform"`` by 1.

    >>> GradientServer(model=None, batches=None, weighting="size")
    Traceback (most recent call last):
    ...
    ValueError: Expected weighting to be 'examples' or 'uniform', got weighting='size'.
    """

    model: Model
    server_optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.sgd(1.0))
    weighting: Literal["examples", "uniform"] = "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("examples", "uniform", weighting=self.weighting)

    def init(self, key: jax.Array) -> ServerState:
        params = self.model.init(key)
        return ServerState(params, self.server_optimizer.init(params), jnp.zeros((), jnp.int32))

    def broadcast(self, state: ServerState) -> Any:
        return Shared(state.params, state.round)

    def server_update(self, state: ServerState, update: Any) -> ServerState:
        updates, opt_state = self.server_optimizer.update(update, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state, round=state.round + 1)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        self.must_descend(server_optimizer=self.server_optimizer)

    def must_descend(self, *, may_rest: bool = False, **optimizers: optax.GradientTransformation) -> None:
        """Raises ``ValueError`` naming the first optimizer that goes up, nowhere finite, or not at all.

        A learning rate cannot be read off an optax transformation. But from zero, where every slope is 1, its first step that
        is not zero must not climb, and there must be one among the first hundred (a warm-up may start with a rate of 0) unless
        it ``may_rest``. Half the way between its steps where slopes are 1 and -1 is taken, in which noise cancels.
        Parameters keep their names here and shrink to one number each.
        """
        params = jax.eval_shape(self.model.init, jax.random.key(0))
        zeros, up, down = (jax.tree.map(lambda x, v=v: jnp.full((1,) * x.ndim, v, x.dtype), params) for v in (0, 1, -1))

        def step(optimizer: optax.GradientTransformationExtraArgs, slope: Params, state: Any) -> tuple[Params, Any]:
            def loss(params: Params) -> jax.Array:  # for those that ask for it: Polyak steps, line searches
                return 1 + jnp.sum(jnp.stack([jnp.sum(x) for x in jax.tree.leaves(jax.tree.map(jnp.multiply, slope, params))]))

            return optimizer.update(slope, state, zeros, value=jnp.float32(1), grad=slope, value_fn=loss)

        for name, optimizer in optimizers.items():
            optimizer = optax.with_extra_args_support(optimizer)
            uphill = downhill = optimizer.init(zeros)
            for _ in range(1 if may_rest else _WARM_UP):
                along, uphill = step(optimizer, up, uphill)
                against, downhill = step(optimizer, down, downhill)
                change = jax.tree.map(lambda a, b: float(jnp.mean(a - b)) / 2, along, against)
                climbs = np.array(jax.tree.leaves(change))
                if np.any(climbs) or may_rest:
                    break
            rests = not np.any(climbs)
            if not np.all(climbs <= 0) or (rests and not may_rest):
                steps = f"{_WARM_UP} steps" if rests else "step"
                raise ValueError(
                    f"Expected {name} to descend, and its first {steps} along a gradient of ones: {climbs.max() + 0.0:+.3g} in "
                    "the mean. Give it a positive learning rate."
                )

    def weight(self, client: Client) -> jax.Array:
        """A client's share in the aggregate, ``float32 []``, by ``weighting``."""
        return client.num_examples.astype(jnp.float32) if self.weighting == "examples" else jnp.float32(1)

    def share(self, turnout: Turnout) -> jax.Array:
        """The part of the population's weight that came, ``float32 []``: |S| / N, where all weigh the same."""
        whole = turnout.examples if self.weighting == "examples" else turnout.population
        return turnout.weight / jnp.maximum(whole, 1).astype(jnp.float32)
