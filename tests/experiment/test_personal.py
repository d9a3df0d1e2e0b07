"""Runs of algorithms with personal models: these are evaluated, and so is the server's model if there is one."""

import federation
import haiku as hk
import jax.numpy as jnp
import optax
import pytest

import fedsim
from fedsim import algorithms, experiment


def two_layers() -> fedsim.Model:
    def logits(examples):
        hidden = jnp.tanh(hk.Linear(5)(examples["x"]))
        return hk.Linear(federation.NUM_CLASSES)(hidden)

    return fedsim.Model.from_haiku(hk.transform(logits), features=federation.FEATURES, num_classes=federation.NUM_CLASSES)


def run(cls, **fields):
    data = federation.data()
    settings = {"model": two_layers(), "client_optimizer": optax.sgd(0.3), "batches": fedsim.Batches(size=4)}
    algorithm = cls(**(settings | {"execution": fedsim.Pmap(devices=2)} | fields))
    sampler = fedsim.UniformSampler(data, clients=4, seed=0)
    return (
        algorithm,
        data,
        experiment.run(
            algorithm, sampler, rounds=4, evaluate_every=2, test_data=federation.data(seed=7), rounds_per_dispatch=1
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("cls", [algorithms.Ditto, algorithms.PerFedAvg])
def test_the_server_s_model_and_the_personal_models_are_evaluated(cls, capsys):
    algorithm, data, result = run(cls)
    test = federation.data(seed=7)
    names = {"loss", "accuracy", "personal_loss", "personal_accuracy"}
    assert set(result.evaluation.overall) == set(result.evaluation.clients) == names
    own = fedsim.evaluate_personalized(algorithm, result.state, data, test)
    whole = fedsim.evaluate(algorithm.model, result.state.params, test)
    assert result.evaluation.overall["personal_loss"] == pytest.approx(own.overall["loss"], rel=1e-5)
    assert result.evaluation.overall["loss"] == pytest.approx(whole.overall["loss"], rel=1e-5)
    assert result.evaluation.overall["loss"] != result.evaluation.overall["personal_loss"]
    tested = [line for line in result.history if "test_personal_accuracy" in line]
    assert [line["round"] for line in tested] == [2, 4]
    assert tested[-1]["test_personal_accuracy_clients_worst10"] == own.over_clients("accuracy")["worst 10%"]
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["personal_accuracy"][0] == f"{own.overall['accuracy']:.4f}"
    assert rows["accuracy"][0] == f"{whole.overall['accuracy']:.4f}"


@pytest.mark.slow
@pytest.mark.parametrize("cls", [algorithms.FedPer, algorithms.IFCA])
def test_without_a_model_of_the_server_only_personal_models_are_evaluated(cls):
    _, _, result = run(cls)
    assert set(result.evaluation.overall) == {"personal_loss", "personal_accuracy"}


def test_parameters_of_another_model_cannot_be_evaluated():
    class Half(algorithms.FedAvg):
        def init(self, key):
            state = super().init(key)
            return state._replace(params={"linear": state.params["linear"]})

    with pytest.raises(ValueError, match="state.params of Half has other shapes than the parameters of its model"):
        run(Half)


def test_the_best_round_is_that_of_the_personal_models():
    lines = [{"round": r, "test_accuracy": 0.1 * r, "test_personal_accuracy": 1 - 0.1 * r} for r in (1, 2)]
    assert experiment._lines.best_round(lines) == 1
