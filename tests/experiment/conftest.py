"""A problem that trains in milliseconds: 12 clients, 5 features and 3 classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim


@pytest.fixture(scope="session")
def data() -> fedsim.FederatedData:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 5)).astype(np.float32)
    y = np.argmax(x @ draw.normal(size=(5, 3)), 1).astype(np.int32)
    return fedsim.FederatedData.from_arrays({"x": x, "y": y}, sizes=[4, 16] * 6)


@pytest.fixture(scope="module")
def model() -> fedsim.Model:
    return fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.Linear(3)(examples["x"])),
        features={"x": jax.ShapeDtypeStruct((5,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)},
        num_classes=3,
    )


@pytest.fixture(scope="module")
def make_algorithm(model: fedsim.Model) -> Callable[..., fedsim.algorithms.FedAvg]:
    """A factory of FedAvg with server momentum, whose state is more than parameters; keywords replace its fields."""

    def make(**fields: Any) -> fedsim.algorithms.FedAvg:
        given = dict(
            model=model,
            client_optimizer=optax.sgd(0.1),
            server_optimizer=optax.sgd(0.5, momentum=0.9),
            batches=fedsim.Batches(size=4),
            execution=fedsim.Pmap(devices=2),
        )
        return fedsim.algorithms.FedAvg(**{**given, **fields})

    return make


@pytest.fixture(scope="module")
def algorithm(make_algorithm: Callable[..., fedsim.algorithms.FedAvg]) -> fedsim.algorithms.FedAvg:
    """One instance per test module, because compiled programs belong to it and modules compile with different options."""
    return make_algorithm()


@pytest.fixture(scope="session")
def sampler(data: fedsim.FederatedData) -> fedsim.UniformSampler:
    return fedsim.UniformSampler(data, clients=3, seed=7)


@pytest.fixture(scope="session")
def bits() -> Callable[[Any], list[bytes]]:
    """A function that returns the bytes of each leaf of a state."""
    return lambda state: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.fixture
def arguments(
    algorithm: fedsim.algorithms.FedAvg, sampler: fedsim.UniformSampler, data: fedsim.FederatedData
) -> dict[str, Any]:
    """Arguments of `fedsim.experiment.run`: 12 rounds with an evaluation after every fourth."""
    return dict(algorithm=algorithm, sampler=sampler, rounds=12, test_data=data, evaluate_every=4, progress=False)


@pytest.fixture
def unbroken(arguments: dict[str, Any], bits: Callable[[Any], list[bytes]]) -> list[bytes]:
    """The bits at the end of an uninterrupted run."""
    return bits(fedsim.experiment.run(**arguments).state)
