"""Stragglers: their number, their work, and that nothing else changes."""

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim.decentralized import FinishingNodes
from fedsim.samplers import Attacked, PoissonSampler, Stragglers, UniformSampler

EPOCHS = 5


def stragglers(clients=10, seed=0, **options):
    uniform = UniformSampler(federation.singletons(60), clients=clients, seed=seed)
    return Stragglers(uniform, **({"fraction": 0.3, "epochs": EPOCHS} | options)), uniform


def test_a_fraction_of_each_cohort_does_a_uniform_number_of_epochs_and_the_others_all():
    sampler, uniform = stragglers()
    done, positions = [], []
    for late, full in zip(sampler.rounds(1000), uniform.rounds(1000), strict=True):
        np.testing.assert_array_equal(late.clients, full.clients)
        epochs = np.rint(late.work * EPOCHS)
        np.testing.assert_allclose(late.work * EPOCHS, epochs, rtol=1e-6)
        assert np.count_nonzero(epochs < EPOCHS) == 3
        done.append(epochs[epochs < EPOCHS])
        positions.append(np.flatnonzero(epochs < EPOCHS))
    counts = np.bincount(np.concatenate(done).astype(int), minlength=EPOCHS)[1:]
    assert abs(counts / 3000 - 1 / (EPOCHS - 1)).max() < 0.04  # five standard deviations of 3000 draws
    assert abs(np.bincount(np.concatenate(positions)) / 3000 - 1 / 10).max() < 0.03


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_drop_removes_the_stragglers_and_keeps_the_slots(fraction):
    sampler, _ = stragglers(fraction=fraction)
    without, _ = stragglers(fraction=fraction, drop=True)
    for late, left in zip(sampler.rounds(20), without.rounds(20), strict=True):
        assert late.clients[late.work == 1].tolist() == left.clients.tolist()
        assert left.slots == late.slots == sampler.clients == without.clients
        assert len(left) == 10 - round(10 * fraction)


def test_attackers_and_earlier_stragglers_are_kept():
    population = federation.data(sizes=(4,) * 8)
    uniform = UniformSampler(population, clients=6, seed=0)
    attacked = Attacked(uniform, fedsim.attacks.SignFlip(), fraction=0.5, seed=0)
    twice = Stragglers(Stragglers(attacked, fraction=1.0, epochs=2), fraction=0.5, epochs=2)
    for r in range(5):
        plain, late = attacked.cohort(r), twice.cohort(r)
        assert late.attack is plain.attack and late.attackers.tolist() == plain.attackers.tolist()
        assert sorted(late.work.tolist()) == [0.25] * 3 + [0.5] * 3
        left = Stragglers(attacked, fraction=0.5, epochs=2, drop=True).cohort(r)
        of = dict(zip(plain.clients.tolist(), plain.attackers.tolist(), strict=True))
        assert left.attackers.tolist() == [of[client] for client in left.clients.tolist()] and len(left) == 3


def test_cohorts_of_any_size():
    uniform = PoissonSampler(federation.singletons(60), probability=0.05, seed=0)
    for late, full in zip(Stragglers(uniform, fraction=0.5, epochs=2).rounds(50), uniform.rounds(50), strict=True):
        assert np.count_nonzero(late.work == 0.5) == np.rint(len(full) / 2)


def test_the_algorithm_uses_the_work_and_one_program_runs_all_cohorts():
    population = federation.data(sizes=(6, 6, 6, 6, 6, 6))
    algorithm = fedsim.algorithms.FedAvg(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=3, epochs=4),
        execution=fedsim.Jit(),
    )
    state = algorithm.init(jax.random.key(0))
    uniform = UniformSampler(population, clients=4, seed=0)
    for drop in (False, True):
        for cohort in Stragglers(uniform, fraction=0.5, epochs=4, drop=drop).rounds(3):
            state, info = algorithm.apply(state, cohort)
            steps = info.clients["num_steps"].tolist()
            assert steps == np.rint(8 * cohort.work).astype(int).tolist() + [0] * (4 - len(cohort))
            assert sorted(steps)[2:] == [8, 8] and set(sorted(steps)[:2]) <= ({0} if drop else {2, 4, 6})
    (programs,) = federation.compiled_rounds(algorithm)
    assert programs.rounds.num_executables == 1


def test_two_seeds_differ_and_the_same_repeats():
    work = [[c.work.tolist() for c in stragglers(seed=seed)[0].rounds(10)] for seed in (0, 0, 1)]
    assert work[0] == work[1] != work[2]


@pytest.mark.parametrize(("name", "value"), [("fraction", -0.1), ("fraction", 1.1), ("epochs", 1)])
def test_invalid_arguments_are_refused(name, value):
    with pytest.raises(ValueError, match=f"Expected .*{name}.*, got {name}={value}"):
        stragglers(**{name: value})


def test_a_clock_that_would_not_see_the_stragglers_is_refused():
    data = federation.data(sizes=(4,) * 6)
    nodes = FinishingNodes(data, fedsim.Batches(size=2, epochs=4), per_round=3)
    with pytest.raises(ValueError, match=r"without a clock in Stragglers, got FinishingNodes.*\(--step-seconds\)"):
        Stragglers(nodes, epochs=4).cohort(0)


def test_a_fraction_that_is_nobody_is_said():
    uniform = fedsim.UniformSampler(federation.singletons(20), clients=4, seed=0)
    with pytest.warns(UserWarning, match="Nobody straggles: fraction=0.1 of a cohort of 4 clients is rounded to 0"):
        assert Stragglers(uniform, fraction=0.1, epochs=2).cohort(0).work.min() == 1
    Stragglers(uniform, fraction=0.0, epochs=2)
    assert (Stragglers(uniform, fraction=0.2, epochs=2).cohort(0).work < 1).sum() == 1
