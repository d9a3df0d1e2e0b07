"""Derivatives that are known in closed form: FedAvg and FedProx on quadratics, also at convergence."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim

CURVATURE, OPTIMUM = np.array([1.0, 2.0, 0.5]), np.array([1.0, -1.0, 3.0])
STEPS, START = 3, 4.0
RATE, SERVER_RATE, MU = 0.3, 0.8, 0.4
WEIGHTS = np.array([1.0, 2.0, 4.0])


def population():
    columns = {"curvature": CURVATURE, "optimum": OPTIMUM, "number": np.arange(3)}
    columns = {name: column.astype(np.int32 if name == "number" else np.float32) for name, column in columns.items()}
    return fedsim.FederatedData.from_arrays(columns, sizes=(1, 1, 1))


POPULATION = population()


def model(example_weights):
    """Client i has the loss e_i c_i / 2 (x - o_i)², with e_i the weight of its example."""
    return fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("x", [1], init=lambda *_: jnp.full([1], START))),
        features={name: jax.ShapeDtypeStruct((), jnp.float32) for name in ("curvature", "optimum")},
        loss=lambda examples, x: (
            example_weights[examples["number"]] * examples["curvature"] / 2 * jnp.square(x - examples["optimum"])
        ),
        metrics={},
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Weighted(fedsim.algorithms.FedProx):
    """FedProx with a weight for each client."""

    client_weights: jax.Array

    def weight(self, client):
        return self.client_weights[client.position]


NUMBERS = {
    "rate": RATE,
    "server_rate": SERVER_RATE,
    "mu": MU,
    "client_weights": WEIGHTS,
    "example_weights": np.ones(3),
    "start": START,
}


def make(numbers):
    return fedsim.differentiable(
        Weighted(
            model=model(numbers["example_weights"]), client_weights=numbers["client_weights"], mu=numbers["mu"],
            client_optimizer=optax.sgd(numbers["rate"]), server_optimizer=optax.sgd(numbers["server_rate"]),
            batches=fedsim.Batches(size=1, steps=STEPS),
        )
    )  # fmt: skip


def after(numbers, rounds):
    """Returns x after some rounds."""
    algorithm = make(numbers)
    state = algorithm.init(jax.random.key(0))
    state = state._replace(params=jax.tree.map(lambda x: jnp.full_like(x, numbers["start"]), state.params))
    cohorts = [fedsim.Cohort.of(POPULATION, POPULATION.client_ids, round=round) for round in range(rounds)]
    return jax.tree.leaves(algorithm.apply_rounds(state, cohorts)[0].params)[0][0]


def closed_form(numbers, rounds):
    """Computes the same in float64: a round maps x to x - s Σ p_i (1 - ρ_i^K) (x - m_i), with m_i the client's fixed point."""
    curvature = numbers["example_weights"] * CURVATURE + numbers["mu"]
    share = numbers["client_weights"] / numbers["client_weights"].sum()
    moved = share * (1 - (1 - numbers["rate"] * curvature) ** STEPS)
    x = numbers["start"]
    for _ in range(rounds):
        minimum = (numbers["example_weights"] * CURVATURE * OPTIMUM + numbers["mu"] * x) / curvature
        x = x - numbers["server_rate"] * np.sum(moved * (x - minimum))
    return x


def derivatives(function, at, step=1e-5):
    """Returns central differences of a function of float64 numbers."""

    def by(name, index):
        def moved(sign):
            value = np.array(at[name], np.float64)
            value[index] += sign * step
            return function(at | {name: value})

        return (moved(1) - moved(-1)) / (2 * step)

    return {name: np.array([by(name, i) for i in np.ndindex(np.shape(at[name]))]) for name in at}


def in_float32(numbers):
    return {name: jnp.asarray(value, jnp.float32) for name, value in numbers.items()}


def test_fedprox_on_quadratics_has_the_derivatives_of_its_closed_form():
    """By the rates, mu, the weights of clients and of examples and the initial parameter, over three rounds."""
    value, slopes = jax.jit(jax.value_and_grad(lambda numbers: after(numbers, 3)))(in_float32(NUMBERS))
    assert float(value) == pytest.approx(closed_form(NUMBERS, 3), rel=1e-5)
    expected = derivatives(lambda numbers: closed_form(numbers, 3), NUMBERS)
    assert min(np.abs(slope).max() for slope in expected.values()) > 0.02
    for name, slope in expected.items():
        np.testing.assert_allclose(np.ravel(slopes[name]), slope, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_straight_through_median_has_the_derivative_of_the_mean():
    """After one step of every client, which moves it by rate c_i (x - o_i)."""

    def after_a_round(rate):
        algorithm = fedsim.differentiable(
            fedsim.algorithms.FedAvg(
                model=model(jnp.ones(3)), client_optimizer=optax.sgd(rate), batches=fedsim.Batches(size=1, steps=1),
                weighting="uniform", aggregator=fedsim.aggregators.CoordinateMedian(),
            ),
            straight_through=True,
        )  # fmt: skip
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(POPULATION, POPULATION.client_ids))
        return jax.tree.leaves(state.params)[0][0]

    value, slope = jax.jit(jax.value_and_grad(after_a_round))(RATE)
    moves = CURVATURE * (START - OPTIMUM)
    assert float(value) == pytest.approx(START - RATE * np.median(moves), rel=1e-6)
    assert float(slope) == pytest.approx(-np.mean(moves), rel=1e-6)
    assert abs(np.mean(moves) - np.median(moves)) > 1


@pytest.mark.slow
def test_a_converged_run_has_its_implicit_derivative():
    """With T a round and x* = T(x*): dx*/dη = (1 - ∂T/∂x)⁻¹ ∂T/∂η, unrolled, and from the closed form of x*."""
    rounds, fixed = 60, NUMBERS | {"mu": 0.0}

    def at_rate(rate, start=fixed["start"], rounds=rounds):
        return after(in_float32(fixed) | {"rate": rate, "start": start}, rounds)

    optimum, unrolled = jax.jit(jax.value_and_grad(at_rate))(RATE)
    by_rate, by_start = jax.jit(jax.grad(lambda rate, start: at_rate(rate, start, 1), (0, 1)))(RATE, optimum)
    implicit = by_rate / (1 - by_start)

    def converged(rate):
        moved = WEIGHTS * (1 - (1 - rate * CURVATURE) ** STEPS)
        return np.sum(moved * OPTIMUM) / np.sum(moved)

    expected = (converged(RATE + 1e-5) - converged(RATE - 1e-5)) / 2e-5
    assert float(optimum) == pytest.approx(converged(RATE), rel=1e-5)
    assert abs(expected) > 0.1
    assert float(unrolled) == pytest.approx(expected, rel=1e-4)
    assert float(implicit) == pytest.approx(expected, rel=1e-4)
