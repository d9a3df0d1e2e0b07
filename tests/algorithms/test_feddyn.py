"""FedDyn: agreement with rounds in float64, written from the paper, and its fixed point."""

import federation
import jax
import numpy as np
import pytest
from linear_models import RATE, assert_close, assert_differ, clients, cohorts, gradient, on_quadratics, run, settings

import fedsim
from fedsim.algorithms import FedAvg, FedDyn


def numpy_feddyn(x, rounds, alpha, weight_of, population_weight):
    """Computes Algorithm 1 of Acar et al. 2021, with SGD for the argmin."""
    h, kept = np.zeros_like(x), {}
    for cohort in rounds:
        moves, weights = [], []
        for k, everything, batches in clients(cohort):
            h_k, theta_k = kept.get(k, np.zeros_like(x)), x
            for batch in batches:
                theta_k = theta_k - RATE * (gradient(theta_k, *batch) - h_k + alpha * (theta_k - x))
            kept[k] = h_k - alpha * (theta_k - x)
            moves.append(theta_k - x)
            weights.append(weight_of(everything))
        h = h - alpha * np.tensordot(weights, moves, 1) / population_weight
        x = x + np.average(moves, axis=0, weights=weights) - h / alpha
    return x


@pytest.mark.first(1)
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_feddyn_follows_algorithm_1(weighting):
    start, end, _ = run(FedDyn(alpha=0.2, weighting=weighting, **settings()), cohorts())
    sizes = federation.data().sizes
    weight_of, whole = (lambda _: 1, np.count_nonzero(sizes)) if weighting == "uniform" else (lambda e: len(e[1]), sizes.sum())
    assert_close(end, numpy_feddyn(start, cohorts(), 0.2, weight_of, whole))
    assert_differ(end, numpy_feddyn(start, cohorts(), 0.2, weight_of, 2 * whole))


def test_the_first_feddyn_round_with_small_alpha_is_a_scaled_fedavg_round():
    """As alpha goes to 0, clients train as in FedAvg, and h / alpha adds |P| / m times FedAvg's update."""
    first = [next(cohorts())]
    fedavg = FedAvg(weighting="uniform", **settings())
    start, plain, _ = run(fedavg, first)
    part = np.count_nonzero(first[0].sizes) / np.count_nonzero(first[0].data.sizes)
    assert 0 < part < 1
    assert_close(run(FedDyn(alpha=1e-6, **settings()), first)[1], start + (1 + part) * (plain - start))


def test_feddyn_converges_to_the_optimum_for_any_number_of_local_steps():
    """The optimum of the mean of two quadratics with curvatures 1 and 3 and optima -1 and 2 is 5 / 4."""
    columns = {"curvature": np.array([1, 3], np.float32), "slope": np.array([1, -6], np.float32)}
    both = fedsim.FederatedData.from_arrays(columns, sizes=(1, 1))
    ends = {}
    for cls, options in ((FedDyn, {"alpha": 1.0}), (FedAvg, {})):
        algorithm = on_quadratics(cls, 40, **options)
        rounds = [federation.cohort(both, round=r) for r in range(60)]
        state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), rounds)
        ends[cls] = float(jax.tree.leaves(state.params)[0][0])
    assert ends[FedDyn] == pytest.approx(1.25, abs=1e-3)
    assert abs(ends[FedAvg] - 1.25) > 0.5
