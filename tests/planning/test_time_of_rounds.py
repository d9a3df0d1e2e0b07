"""The estimated time of a round, compared with the time that rounds take."""

import time

import jax
import optax
import pytest

import fedsim
from fedsim.execution import traced_rounds
from fedsim.planning._timing import seconds_of_round


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emnist_logistic", "emnist_dense", "emnist_cnn"])
def test_the_estimated_time_is_within_a_factor_of_two_of_a_round(name):
    """Estimates and rounds are measured in turns, and the shortest of each are compared, because other work takes time, too.
    More are measured only while these differ.
    """
    data = fedsim.datasets.load("emnist62_like(clients=100)").train
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.get(name),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=20),
        execution=fedsim.Pmap(devices=2),
    )
    cohort = fedsim.UniformSampler(data, clients=10, seed=0).cohort(0)
    state = algorithm.init(jax.random.key(0))
    calls = traced_rounds(algorithm, state, data)[0].trace().calls
    jax.block_until_ready(algorithm.apply(state, cohort))  # compiles
    estimated, real = [], []
    for _ in range(6):
        estimated.append(seconds_of_round(algorithm, calls, (), cohort, devices=2))
        for _ in range(3):
            began = time.perf_counter()
            jax.block_until_ready(algorithm.apply(state, cohort))
            real.append(time.perf_counter() - began)
        if 0.5 < min(estimated) / min(real) < 2:
            break
    print(f"{name}: estimated {min(estimated):.4f} s, real {min(real):.4f} s")
    assert 0.5 < min(estimated) / min(real) < 2
