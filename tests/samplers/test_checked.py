"""Mistakes in a user's sampler are reported with the sampler's class, the round, what it returned, and a remedy."""

import dataclasses
import re

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim import attacks, samplers

DATA = federation.data()
OTHER = federation.data(sizes=(1, 2))


def cohort(round, data=DATA, ids=("client0",), seed=0):
    return fedsim.Cohort.of(data, ids, round=round, seed=seed)


def sampler(returns):
    class Mine:
        data = DATA

        def cohort(self, round):
            return returns(round)

    return Mine()


def algorithm():
    return fedsim.algorithms.FedAvg(
        model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=3), execution=fedsim.Jit()
    )


def run(mine, rounds=4):
    return fedsim.experiment.run(algorithm(), mine, rounds=rounds, progress=False)


WRONG = {
    "list of ids": (lambda r: ["client0"], "Mine.cohort(0) returned the list ['client0']: expected a fedsim.Cohort"),
    "tuple": (lambda r: (DATA, [0]), "Mine.cohort(0) returned the tuple (FederatedData"),
    "positions": (lambda r: np.array([1]), "Mine.cohort(0) returned the ndarray array([1]): expected a fedsim.Cohort"),
    "nothing": (lambda r: None, "Mine.cohort(0) returned None: expected a fedsim.Cohort, as from fedsim.Cohort.of(data,"),
    "nothing later": (lambda r: cohort(r) if r < 3 else None, "Mine.cohort(3) returned None"),
    "nothing in between": (lambda r: None if r == 2 else cohort(r), "Mine.cohort(2) returned None"),
    "empty": (
        lambda r: cohort(r, ids=[]),
        "Mine.cohort(0) failed: The cohort is empty: expected at least one client, or slots=",
    ),
    "duplicates": (lambda r: cohort(r, ids=["client0"] * 2), "Mine.cohort(0) failed: A client occurs more than once"),
    "another round": (lambda r: cohort(0), "Mine.cohort(3) returned a cohort of round 0"),
    "another population": (
        lambda r: cohort(r, OTHER if r else DATA),
        "Mine.cohort(3) returned a cohort of another population (2 clients) than that of round 0 (8 clients)",
    ),
    "another key": (lambda r: cohort(r, seed=r), "Mine.cohort(3) returned a cohort with another root key than that of round 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_run_names_the_sampler_and_the_round(case):
    returns, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        run(sampler(returns))


def test_an_object_that_is_no_sampler_is_named():
    with pytest.raises(ValueError, match=r"Expected a sampler, an object with a method cohort\(round\).*, got the list \[\]"):
        run([])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda mine: samplers.Stragglers(mine, epochs=2),
        lambda mine: samplers.Attacked(mine, attacks.SignFlip(), seed=0),
    ],
)
def test_a_sampler_inside_another_one_is_checked(wrap):
    with pytest.raises(ValueError, match=r"Mine.cohort\(0\) returned the list"):
        wrap(sampler(lambda round: ["client0"])).cohort(0)


@pytest.mark.parametrize("execution", [fedsim.Jit(), fedsim.Debug()])
def test_apply_names_what_is_no_cohort(execution):
    mine = dataclasses.replace(algorithm(), execution=execution)
    state = mine.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"FedAvg got the list \['client0'\]: expected a fedsim.Cohort"):
        mine.apply(state, ["client0"])
    with pytest.raises(ValueError, match="FedAvg got None: expected a fedsim.Cohort"):
        mine.apply_rounds(state, [cohort(0), None])


def test_cohorts_of_several_sizes_and_empty_ones_with_slots_are_allowed():
    def returns(round):
        return fedsim.Cohort(DATA, np.arange(round % 3), round, fedsim.rng.root(0), slots=2)

    assert run(sampler(returns)).round == 4
