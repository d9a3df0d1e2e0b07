"""`fedsim.tune` finds the best rates of problems where these are known, and says when a run diverges."""

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.differentiation import Tuned, TunedRun, validation_loss

CURVATURE = 4.0
POPULATION = fedsim.FederatedData.from_arrays({"optimum": np.float32([1.0, 3.0])}, sizes=(1, 1))
MODEL = fedsim.Model.from_haiku(
    hk.transform(lambda examples: hk.get_parameter("x", [1], init=jnp.zeros)),
    features={"optimum": jax.ShapeDtypeStruct((), jnp.float32)},
    loss=lambda examples, x: CURVATURE / 2 * jnp.square(x - examples["optimum"]),
    metrics={},
)


class Everybody:
    """Every round has both clients."""

    data = POPULATION

    def cohort(self, round):
        return fedsim.Cohort.of(self.data, self.data.client_ids, round=round)


def tuned(start, made=None, **options):
    def make(rate, **others):
        if made is not None:
            made.append(rate)
        return fedsim.algorithms.FedAvg(
            model=MODEL, client_optimizer=optax.sgd(rate), server_optimizer=optax.sgd(others.get("server_rate", 1.0)),
            batches=fedsim.Batches(size=1, steps=1),
        )  # fmt: skip

    settings = {"sampler": Everybody(), "rounds": 2, "objective": validation_loss(MODEL, POPULATION)}
    return fedsim.tune(make, start, **(settings | options))


@pytest.mark.slow
def test_the_rate_becomes_the_inverse_of_the_curvature_in_one_compilation():
    """Two rounds of one step multiply the distance to the optimum 2 by (1 - rate c)², so the best rate is 1 / c = 0.25."""
    made = []
    found = tuned({"rate": 0.05}, made, steps=25, optimizer=optax.adam(0.2))
    assert sum(isinstance(rate, jax.core.Tracer) for rate in made) == 1 and len(found.path) == 25
    assert found.numbers["rate"] == pytest.approx(0.25, rel=0.05)
    assert found.objective == pytest.approx(CURVATURE / 2, rel=1e-3)  # the loss at the optimum

    def objective(log_rate):
        return CURVATURE / 2 * np.mean((2 * (1 - (1 - np.exp(log_rate) * CURVATURE) ** 2) - np.array([1, 3])) ** 2)

    first = found.path[0]
    assert first.numbers == {"rate": pytest.approx(0.05)} and first.objective == pytest.approx(
        objective(np.log(0.05)), rel=1e-5
    )
    slope = (objective(np.log(0.05) + 1e-5) - objective(np.log(0.05) - 1e-5)) / 2e-5
    assert first.hypergradient["rate"] == pytest.approx(slope, rel=1e-4)


@pytest.mark.slow
def test_a_step_into_divergence_is_halved_with_a_warning():
    with pytest.warns(UserWarning, match=r"The run with rate=.* diverged: .*\. The next run takes half of the step\."):
        found = tuned({"rate": 0.05}, rounds=12, steps=6, optimizer=optax.sgd(200.0))
    diverged = [run for run in found.path if not np.isfinite(run.objective)]
    assert diverged and all(run.hypergradient == {} for run in diverged)
    assert np.isfinite(found.objective) and found.objective <= found.path[0].objective
    first, second = (np.log(run.numbers["rate"] / 0.05) for run in diverged[:2])
    assert second == pytest.approx(first / 2, rel=1e-3)
    assert found.plot().axes


@pytest.mark.slow
def test_a_diverging_start_is_an_error():
    with pytest.raises(ValueError, match=r"The run with rate=1e\+08 diverged: .*\. Start with smaller rates\."):
        tuned({"rate": 1e8}, rounds=12)


def test_arguments_are_checked_before_anything_runs():
    with pytest.raises(ValueError, match="Expected steps >= 1, got steps=0"):
        tuned({"rate": 0.1}, steps=0)
    with pytest.raises(ValueError, match="Expected start to map names to numbers, got start={}"):
        tuned({})
    with pytest.raises(ValueError, match="Expected rate to be finite, got rate=nan"):
        tuned({"rate": float("nan")})
    with pytest.raises(ValueError, match="Expected rate to be finite, got rate='big': give a number"):
        tuned({"rate": "big"})


@pytest.mark.slow
def test_the_initial_state_depends_on_all_bits_of_the_seed():
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("x", [1], init=hk.initializers.RandomNormal())),
        features={"optimum": jax.ShapeDtypeStruct((), jnp.float32)},
        loss=lambda examples, x: jnp.square(x - examples["optimum"]), metrics={},
    )  # fmt: skip

    def make(rate):
        batches = fedsim.Batches(size=1, steps=1)
        return fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(rate), batches=batches)

    settings = {"sampler": Everybody(), "rounds": 1, "steps": 1, "objective": lambda state: jnp.sum(state.params["~"]["x"])}
    first, second = (fedsim.tune(make, {"rate": 1e-6}, seed=seed, **settings).objective for seed in (0, 2**40))
    assert first != second


def test_the_best_run_is_not_always_the_last():
    path = (
        TunedRun({"rate": 0.1}, 2.0, {"rate": 1.0}),
        TunedRun({"rate": 0.2}, 1.0, {"rate": 0.1}),
        TunedRun({"rate": 1.0}, np.inf, {}),
    )
    assert Tuned(path).numbers == {"rate": 0.2} and Tuned(path).objective == 1.0


@pytest.mark.first(2)
@pytest.mark.parametrize("worst", [None, 1e-6, 0.3, 1.0])
def test_validation_loss_equals_numpy(worst, monkeypatch):
    monkeypatch.setattr("fedsim.differentiation._objective._ROWS", 10)  # so that there are several chunks
    data, model = federation.data(), federation.model()
    algorithm = fedsim.algorithms.FedSGD(model=model)
    state = algorithm.init(jax.random.key(0))
    x, y = data.columns["x"], data.columns["y"]
    logits = x @ np.asarray(state.params["linear"]["w"]) + np.asarray(state.params["linear"]["b"])
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    of_clients = [losses[a:b].mean() for a, b in zip(data.offsets[:-1], data.offsets[1:], strict=True) if b > a]
    count = {None: 0, 1e-6: 1, 0.3: 3, 1.0: 7}[worst]  # of the 7 clients with examples
    expected = np.sort(of_clients)[-count:].mean() if count else losses.mean()
    assert float(validation_loss(model, data, worst=worst)(state)) == pytest.approx(expected, rel=1e-5)


def test_the_worst_clients_are_as_many_as_the_decimal_fraction_says():
    """In floating point, 0.07 * 100 is slightly above 7."""
    data, model = federation.data(sizes=(1,) * 100), federation.model()
    state = fedsim.algorithms.FedSGD(model=model).init(jax.random.key(0))
    losses = fedsim.evaluate(model, state.params, data).clients["loss"].result()
    expected = np.sort(losses)[-7:].mean()
    assert float(validation_loss(model, data, worst=0.07)(state)) == pytest.approx(expected, rel=1e-5)


def test_validation_loss_refuses_data_without_examples():
    with pytest.raises(ValueError, match="Expected data with examples"):
        validation_loss(federation.model(), federation.data(sizes=(0, 0)))
    with pytest.raises(ValueError, match="Expected 0 < worst <= 1, or None, got worst=2"):
        validation_loss(federation.model(), federation.data(), worst=2)
