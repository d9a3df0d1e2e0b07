"""`tune`: hypergradient descent on learning rates and other numbers of an algorithm.

D. Maclaurin, D. Duvenaud, R. P. Adams, "Gradient-based hyperparameter optimization through reversible learning", ICML 2015:
https://arxiv.org/abs/1502.03492. Deviations: the steps of a run are not reversed but recomputed from stored states
(rematerialization), and positive numbers are tuned by their logarithms, with any optax optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import checks, rng
from fedsim.algorithm import Algorithm
from fedsim.differentiation._differentiable import differentiable
from fedsim.plots import plot_tuning
from fedsim.rounds import RoundInfo
from fedsim.samplers import Sampler, check_fits


class TunedRun(NamedTuple):
    """One run of `tune`.

    Attributes:
      numbers: the numbers of the run.
      objective: the objective after its last round; infinity if the run diverged.
      hypergradient: the derivative of the objective with respect to the logarithm of each positive number, and to each other
        number itself; empty if the run diverged.

    >>> TunedRun({"rate": 0.1}, objective=2.0, hypergradient={"rate": -0.5}).numbers["rate"]
    0.1
    """

    numbers: dict[str, float]
    objective: float
    hypergradient: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`.

    Attributes:
      path: all runs, in order.

    >>> tuned = Tuned((TunedRun({"mu": 0.1}, 2.0, {"mu": 1.0}), TunedRun({"mu": 0.05}, 1.5, {"mu": 0.1})))
    >>> tuned.numbers, tuned.objective
    ({'mu': 0.05}, 1.5)
    """

    path: tuple[TunedRun, ...]

    @property
    def best(self) -> TunedRun:
        """The run with the smallest objective."""
        return min(self.path, key=lambda run: run.objective)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the best run."""
        return self.best.numbers

    @property
    def objective(self) -> float:
        """The objective of the best run."""
        return self.best.objective

    def plot(self) -> Any:
        """Returns a matplotlib figure of the path, see `fedsim.plots.plot_tuning`."""
        return plot_tuning([run.numbers for run in self.path], [run.objective for run in self.path])


def tune(
    make_algorithm: Callable[..., Algorithm],
    start: Mapping[str, float],
    *,
    sampler: Sampler,
    rounds: int,
    objective: Callable[[Any], jax.Array],
    steps: int = 10,
    optimizer: optax.GradientTransformation | None = None,
    seed: int = 0,
    straight_through: bool = False,
) -> Tuned:
    """Tunes numbers of an algorithm by gradient descent on the result of whole runs (hypergradient descent).

    Every step is one run: ``rounds`` rounds from the same initial state with the same cohorts, and the derivative of the
    objective through all of them, which takes several times as long as the rounds alone. All runs share one compiled program.

    A positive number, such as a learning rate, stays positive, because its logarithm is tuned. Other numbers have no bounds.

    If a run diverges (the objective or a derivative is not finite, or updates of clients were not finite and were left out), a
    warning says so, and the next run takes half of the step.

    Args:
      make_algorithm: takes the numbers by name and returns the algorithm. It is called once with those of ``start``, to check
        the sampler, and then with JAX tracers, which optax and fedsim accept in the place of floats.
      start: the numbers of the first run.
      sampler: the cohorts of rounds 0, 1, 2, …
      rounds: number of rounds of a run.
      objective: function from the state after the last round to the number to minimize, ``float []``, such as
        `fedsim.differentiation.validation_loss`.
      steps: number of runs.
      optimizer: an optax transformation; default ``optax.adam(0.3)``, which changes each positive number by a factor of at most
        about 1.35 per step.
      seed: of the initial state, which is ``init`` of the root key of this seed.
      straight_through: see `fedsim.differentiable`.

    Raises:
      ValueError: an argument is out of its range, the first run diverges, or the algorithm is not differentiable or does
        not fit the sampler.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.arange(384, dtype=np.uint8).reshape(6, 8, 8, 1) % 17, "y": np.arange(6, dtype=np.int32)}, sizes=[4, 2])
    >>> model = fedsim.models.digits_logistic()
    >>> def make_algorithm(client_rate, server_rate):
    ...     return fedsim.algorithms.FedAvg(
    ...         model=model, client_optimizer=optax.sgd(client_rate), server_optimizer=optax.sgd(server_rate),
    ...         batches=fedsim.Batches(size=4))
    >>> tuned = tune(
    ...     make_algorithm, {"client_rate": 0.01, "server_rate": 1.0}, rounds=1, steps=2,
    ...     sampler=fedsim.UniformSampler(data, clients=2, seed=0),
    ...     objective=fedsim.differentiation.validation_loss(model, data))
    >>> tuned.objective < tuned.path[0].objective, sorted(tuned.numbers)
    (True, ['client_rate', 'server_rate'])
    """
    checks.whole(1, rounds=rounds, steps=steps)
    if not isinstance(start, Mapping) or not start:
        raise ValueError(
            f"Expected start to map names to numbers, got start={start!r}: give {{'client_rate': 0.1}}, for example."
        )
    for name, value in start.items():
        checks.number(**{name: value})  # type: ignore[arg-type]
    optimizer = optax.adam(0.3) if optimizer is None else optimizer
    checks.optimizer(optimizer=optimizer)
    positive = {name for name, value in start.items() if value > 0}
    check_fits(sampler, make_algorithm(**start))
    cohorts = [sampler.cohort(round) for round in range(rounds)]

    def numbers_at(at: Any) -> dict[str, Any]:
        return {name: jnp.exp(x) if name in positive else x for name, x in at.items()}

    def run(at: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the objective, and how many updates were not finite."""
        algorithm = differentiable(make_algorithm(**numbers_at(at)), straight_through=straight_through)
        state, info = algorithm.apply_rounds(algorithm.init(rng.root(seed)), cohorts)
        return objective(state), jnp.sum(info.num_dropped) if isinstance(info, RoundInfo) else jnp.int32(0)

    at = {name: jnp.float32(math.log(value) if name in positive else value) for name, value in start.items()}
    evaluate = _compiled(jax.value_and_grad(run, has_aux=True), at)
    optimizer_state, path, before = optimizer.init(at), [], at
    for _ in range(steps):
        numbers = {name: float(x) for name, x in numbers_at(at).items()}
        (value, dropped), slope = evaluate(at)
        hypergradient = {name: float(x) for name, x in slope.items()}
        if not dropped and all(map(math.isfinite, (float(value), *hypergradient.values()))):
            path.append(TunedRun(numbers, float(value), hypergradient))
            with jax.numpy_dtype_promotion("standard"):  # which optax.adam requires
                updates, optimizer_state = optimizer.update(slope, optimizer_state, at)
            before, at = at, optax.apply_updates(at, updates)
            continue
        problem = f"The run with {_shown(numbers)} diverged: {_reason(float(value), int(dropped))}"
        if not path:
            raise ValueError(f"{problem}. Start with smaller rates.")
        path.append(TunedRun(numbers, math.inf, {}))
        at = jax.tree.map(lambda a, b: (a + b) / 2, before, at)
        warnings.warn(f"{problem}. The next run takes half of the step.", stacklevel=2)
    return Tuned(tuple(path))


def _compiled(function: Callable[..., Any], argument: Any) -> Callable[..., Any]:
    """Compiles a function of one argument like this one. Arrays that it closes over are arguments of the program.

    As constants, the examples of a population would be part of the program's text.
    """
    traced, result = jax.make_jaxpr(function, return_shape=True)(argument)
    structure = jax.tree.structure(result)

    @jax.jit
    def program(constants: Any, argument: Any) -> Any:
        return jax.tree.unflatten(structure, jax.core.eval_jaxpr(traced.jaxpr, constants, *jax.tree.leaves(argument)))

    return functools.partial(program, traced.consts)


def _shown(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:.4g}" for name, value in numbers.items())


def _reason(value: float, dropped: int) -> str:
    if dropped:
        return f"{dropped} update(s) of clients held a NaN or an infinity"
    return "its derivatives are not finite" if math.isfinite(value) else f"its objective is {value}"
