"""Drift correction converges to the optimum of all clients' loss, also if updates are clipped or compressed."""

import federation
import jax
import numpy as np
import optax
import pytest
from linear_models import on_quadratics

import fedsim
from fedsim import aggregators, compressors
from fedsim.algorithms import SCAFFOLD, FedAvg, FedDyn

# The curvatures are 1, 3 and 2 and the optima -1, 2 and 4, so the optimum of the mean is (-1 + 6 + 8) / 6.
QUADRATICS = {"curvature": np.array([1, 3, 2], np.float32), "slope": np.array([1, -6, -8], np.float32)}
OPTIMUM = 13 / 6
FOLDS = {
    "mean": aggregators.Mean(),
    "clipped": aggregators.Clipped(0.5),
    "compressed": aggregators.Compressed(compressors.Cast()),
    "both": aggregators.Clipped(1.0, inner=aggregators.Compressed(compressors.UniformQuantizer(levels=16))),
}


def end(algorithm, rounds=300):
    data = fedsim.FederatedData.from_arrays(QUADRATICS, sizes=(1, 1, 1))
    draw = np.random.default_rng(1)  # two of three clients participate
    cohorts = [fedsim.Cohort(data, draw.permutation(3)[:2], r, fedsim.rng.root(0)) for r in range(rounds)]
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohorts)
    return state, float(jax.tree.leaves(state.params)[0][0])


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("cls", "options"), [(SCAFFOLD, {"control_variate": "I"}), (SCAFFOLD, {"control_variate": "II"}), (FedDyn, {"alpha": 1.0})]
)
@pytest.mark.parametrize("fold", ["both", *sorted(FOLDS.keys() - {"both"})])
def test_drift_correction_converges_to_the_optimum_with_clipped_and_compressed_updates(cls, options, fold):
    state, x = end(on_quadratics(cls, 5, aggregator=FOLDS[fold], **options))
    assert x == pytest.approx(OPTIMUM, abs=2e-3)
    rows, seen = jax.device_get(tuple(state.clients))
    kept = float(np.mean(jax.tree.leaves(rows[0])[0]))
    kept_by_server = state.server.control if cls is SCAFFOLD else state.server.h
    assert seen.all() and float(jax.tree.leaves(kept_by_server)[0][0]) == pytest.approx(kept, abs=1e-4)


def test_fedavg_converges_to_another_point():
    assert abs(end(on_quadratics(FedAvg, 5))[1] - OPTIMUM) > 0.05


@pytest.mark.first(1)
@pytest.mark.parametrize("cls", [SCAFFOLD, FedDyn])
def test_a_line_search_receives_the_corrected_loss(cls):
    """The gradient of the value must be the corrected gradient, because a Polyak step uses both."""
    seen = []

    def update(gradient, state, params, *, value_fn, **_):
        slope = jax.grad(value_fn)(params)
        jax.debug.callback(lambda *pair: seen.append(pair), gradient["~"]["x"], slope["~"]["x"])
        return jax.tree.map(lambda g: -0.1 * g, gradient), state

    options = {"control_variate": "I"} if cls is SCAFFOLD else {}
    algorithm = on_quadratics(cls, 3, **options)
    looking = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    algorithm = type(algorithm)(
        model=algorithm.model, batches=algorithm.batches, client_optimizer=looking, execution=fedsim.Jit(), **options
    )
    data = fedsim.FederatedData.from_arrays(QUADRATICS, sizes=(1, 1, 1))
    state = algorithm.init(jax.random.key(0))
    for r in range(3):
        state, _ = algorithm.apply(state, federation.cohort(data, round=r))
    jax.effects_barrier()
    descended, told = np.array(seen).reshape(-1, 2).T
    assert len(descended) >= 27
    np.testing.assert_allclose(told, descended, rtol=1e-5, atol=1e-5)
