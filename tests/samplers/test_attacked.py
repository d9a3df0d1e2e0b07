"""`Attacked`: the choice of attackers, and that nothing else changes."""

import federation
import numpy as np
import pytest

from fedsim import attacks, samplers
from fedsim.experiment._report import attackers_of, closing_table


def make(every_round=False, fraction=0.2, seed=0, clients=20, **options):
    data = federation.singletons(1000)
    sampler = samplers.UniformSampler(data, clients=clients, seed=3)
    return sampler, samplers.Attacked(
        sampler, attacks.SignFlip(), fraction=fraction, seed=seed, every_round=every_round, **options
    )


@pytest.mark.parametrize(("every_round", "of"), [(False, 1000), (True, 20)])
def test_a_fraction_that_is_nobody_is_said(every_round, of):
    with pytest.warns(UserWarning, match=f"Nobody attacks: fraction=0.0004 of {of} clients.*fraction >= {0.5 / of}"):
        _, attacked = make(every_round, fraction=0.0004)
    assert not attacked.cohort(0).attackers.any()
    make(every_round, fraction=0.0)  # which says so itself
    assert attacked.attacker_ids == (None if every_round else [])


def test_the_attackers_have_names():
    _, attacked = make(fraction=0.01, clients=1000)
    cohort = attacked.cohort(0)
    ids = [cohort.client_ids[place] for place in np.flatnonzero(cohort.attackers)]
    assert sorted(attacked.attacker_ids) == sorted(ids) and len(ids) == 10
    assert attackers_of(samplers.Stragglers(attacked, epochs=2)) == f"10 of 1000 clients: {', '.join(attacked.attacker_ids)}"
    assert attackers_of(make(every_round=True)[1]) == "20% of each cohort, drawn anew in every round"
    assert attackers_of(make(every_round=True, fraction=0.004, clients=500)[1]).startswith("0.4% of each cohort")
    assert attackers_of(make()[0]) is None
    table = closing_table(
        [], round=1, rounds=1, seconds=1.0, rate=None, devices="1 x cpu", written=[], attackers=attackers_of(attacked)
    )
    assert "\nattackers  10 of 1000 clients: " in table


@pytest.mark.parametrize("every_round", [False, True])
def test_the_same_cohorts_with_the_same_keys(every_round):
    sampler, attacked = make(every_round)
    for plain, cohort in zip(sampler.rounds(5), attacked.rounds(5), strict=True):
        assert cohort.clients.tolist() == plain.clients.tolist()
        assert cohort.round == plain.round and cohort.key == plain.key == attacked.key and cohort.slots == attacked.clients
        assert cohort.attack == attacks.SignFlip()


def test_a_fixed_fraction_of_the_population_attacks_in_every_round():
    _, attacked = make(fraction=0.2, clients=500)
    attack, sampled = np.zeros(1000, bool), np.zeros(1000, bool)
    for cohort in attacked.rounds(20):
        again = sampled[cohort.clients]
        np.testing.assert_array_equal(attack[cohort.clients][again], cohort.attackers[again])
        attack[cohort.clients], sampled[cohort.clients] = cohort.attackers, True
    assert sampled.all() and attack.sum() == 200


@pytest.mark.parametrize(("fraction", "number"), [(0.0, 0), (0.2, 4), (0.33, 7), (1.0, 20)])
def test_an_exact_fraction_of_every_cohort_attacks(fraction, number):
    _, attacked = make(True, fraction)
    cohorts = list(attacked.rounds(10))
    assert [cohort.attackers.sum() for cohort in cohorts] == [number] * 10
    if 0 < number < 20:
        assert len({tuple(cohort.attackers) for cohort in cohorts}) > 5


@pytest.mark.parametrize("every_round", [False, True])
def test_attackers_are_a_function_of_the_seed(every_round):
    first, same, other = (make(every_round, seed=seed, clients=300)[1].cohort(4).attackers for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


def test_attackers_by_id():
    _, attacked = make(clients=1000, attackers=["7", "500"])
    cohort = attacked.cohort(0)
    assert sorted(np.array(cohort.client_ids)[cohort.attackers]) == ["500", "7"]
    with pytest.raises(KeyError):
        make(attackers=["unknown"])


def test_an_empty_cohort_has_no_attackers():
    data = federation.singletons(10)
    for every_round in (False, True):
        schedule = samplers.ScheduleSampler(data, [["1"], []], seed=0)
        cohort = samplers.Attacked(schedule, attacks.SignFlip(), fraction=0.5, seed=0, every_round=every_round).cohort(1)
        assert cohort.attackers.shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fraction": 1.2}, "Expected 0 <= fraction <= 1, got fraction=1.2"),
        ({"attackers": ["1"], "every_round": True}, "Expected attackers or every_round, not both"),
    ],
)
def test_invalid_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
