"""Guarantees of every partitioner of examples: no example is lost or assigned twice, and the result is a pure function."""

import hashlib
import inspect

import numpy as np
import pytest

from fedsim import partitioners

N, CLIENTS = 1000, 12
LABELS = np.random.default_rng(0).integers(10, size=N)
COARSE = LABELS // 3
TIMES = np.random.default_rng(1).integers(0, 300, size=N)

# Partitions by name. GOLDEN has the first 16 hexadecimal digits of each one's sha256, which must never change for a seed.
MAKERS = {
    "iid": lambda seed: partitioners.iid(LABELS, clients=CLIENTS, seed=seed),
    "dirichlet": lambda seed: partitioners.dirichlet(LABELS, clients=CLIENTS, alpha=0.3, seed=seed),
    "dirichlet, capped": lambda seed: partitioners.dirichlet(LABELS, clients=CLIENTS, alpha=0.3, seed=seed, capped=True),
    "dirichlet_balanced": lambda seed: partitioners.dirichlet_balanced(LABELS, clients=CLIENTS, alpha=0.3, seed=seed),
    "shards": lambda seed: partitioners.shards(LABELS, clients=CLIENTS, seed=seed),
    "classes_per_client": lambda seed: partitioners.classes_per_client(LABELS, clients=CLIENTS, classes=3, seed=seed),
    "quantity_skew, log-normal": lambda seed: partitioners.quantity_skew(LABELS, clients=CLIENTS, sigma=1.0, seed=seed),
    "quantity_skew, power law": lambda seed: partitioners.quantity_skew(N, clients=CLIENTS, exponent=1.2, seed=seed),
    "by_column": lambda seed: partitioners.by_column(TIMES % CLIENTS),
    "pachinko": lambda seed: partitioners.pachinko(LABELS, COARSE, clients=CLIENTS, seed=seed),
    "temporal": lambda seed: partitioners.temporal(TIMES, clients=CLIENTS),
    "temporal, equal time": lambda seed: partitioners.temporal(TIMES, clients=CLIENTS, equal="time"),
}
UNSEEDED = {"by_column", "temporal", "temporal, equal time"}
GOLDEN = {
    "iid": "e5d571f4029d264e",
    "dirichlet": "03427f18e9a0218c",
    "dirichlet, capped": "2fa04d5e17efd191",
    "dirichlet_balanced": "c63537b198cf9b6c",
    "shards": "41e9d7b66ec1437a",
    "classes_per_client": "09f70a3597a93482",
    "quantity_skew, log-normal": "c66827301940787d",
    "quantity_skew, power law": "21c64cdfddca861b",
    "by_column": "d1d78cf12b735176",
    "pachinko": "917fbb937b465c73",
    "temporal": "8fe6e596c11b5799",
    "temporal, equal time": "884278512d19f41f",
}


@pytest.fixture(params=MAKERS)
def name(request):
    return request.param


def digest(parts):
    result = hashlib.sha256()
    for rows in parts:
        result.update(np.int64(len(rows)).tobytes() + rows.tobytes())
    return result.hexdigest()[:16]


def test_every_partitioner_is_in_the_table():
    there = {name for name, thing in vars(partitioners).items() if inspect.isfunction(thing)}
    # Partitioners of populations, features and further splits have their own tests.
    others = {"held_out_clients", "rotation", "noise", "vertical", "same_shares", "split_within_clients"}
    others |= {"hide_labels", "only_labelled"}
    assert there == {name.partition(",")[0] for name in MAKERS} | others


def test_every_example_goes_to_exactly_one_client(name):
    parts = MAKERS[name](0)
    assert len(parts) == CLIENTS
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(N))
    assert all(rows.dtype == np.int64 and rows.ndim == 1 and np.all(np.diff(rows) > 0) for rows in parts)


def test_equal_seeds_give_equal_partitions_and_other_seeds_others(name):
    first, again, other = MAKERS[name](5), MAKERS[name](5), MAKERS[name](6)
    assert digest(first) == digest(again)
    assert (digest(first) == digest(other)) is (name in UNSEEDED)


def test_partitions_never_change(name):
    assert digest(MAKERS[name](0)) == GOLDEN[name]


def test_neither_arguments_nor_global_randomness_are_changed(name):
    before = [array.copy() for array in (LABELS, COARSE, TIMES)], np.random.get_state()[1].copy()
    MAKERS[name](0)
    after = (LABELS, COARSE, TIMES), np.random.get_state()[1]
    for old, new in zip((*before[0], before[1]), (*after[0], after[1]), strict=True):
        np.testing.assert_array_equal(old, new)


def test_labels_may_be_names():
    """Names in the same order as the numbers they replace give the same partition."""
    names = np.array([f"label {label}" for label in LABELS])
    for make in (
        lambda labels: partitioners.dirichlet(labels, clients=5, alpha=0.3, seed=0),
        lambda labels: partitioners.dirichlet_balanced(labels, clients=5, alpha=0.3, seed=0),
        lambda labels: partitioners.shards(labels, clients=5, seed=0),
        lambda labels: partitioners.classes_per_client(labels, clients=5, classes=4, seed=0),
        lambda labels: partitioners.pachinko(labels, COARSE, clients=5, seed=0),
    ):
        assert digest(make(LABELS)) == digest(make(names))


@pytest.mark.parametrize("labels", [np.zeros([4, 2], int), np.zeros(4), 3, np.zeros(4, complex), np.array(["a", None], object)])
def test_labels_of_a_wrong_dtype_or_shape_are_refused(labels):
    for make in (
        lambda: partitioners.dirichlet(labels, clients=2, alpha=1, seed=0),
        lambda: partitioners.dirichlet_balanced(labels, clients=2, alpha=1, seed=0),
        lambda: partitioners.shards(labels, clients=2, seed=0),
        lambda: partitioners.classes_per_client(labels, clients=2, classes=1, seed=0),
        lambda: partitioners.pachinko(labels, labels, clients=2, seed=0),
        lambda: partitioners.by_column(labels),
    ):
        with pytest.raises(ValueError, match="Expected (one label per example|labels of one type)"):
            make()


def test_hidden_labels_are_no_class_of_a_partitioner():
    labels = np.array([0, 1, -1, 1])
    for make in (
        lambda: partitioners.dirichlet(labels, clients=2, alpha=1, seed=0),
        lambda: partitioners.dirichlet_balanced(labels, clients=2, alpha=1, seed=0),
        lambda: partitioners.shards(labels, clients=2, seed=0),
        lambda: partitioners.classes_per_client(labels, clients=2, classes=1, seed=0),
        lambda: partitioners.pachinko(labels, labels, clients=2, seed=0),
        lambda: partitioners.same_shares([0, 1], [[0], [1]], labels, seed=0),
    ):
        with pytest.raises(ValueError, match="got -1, a hidden label, for 1 of them: divide the examples first"):
            make()
    assert [rows.tolist() for rows in partitioners.by_column(labels)] == [[2], [0], [1, 3]]  # of any column, such as ages


@pytest.mark.parametrize("clients", [0, -3])
def test_numbers_of_clients_below_one_are_refused(clients):
    for make in (
        lambda: partitioners.iid(10, clients=clients, seed=0),
        lambda: partitioners.dirichlet_balanced(LABELS, clients=clients, alpha=1, seed=0),
        lambda: partitioners.shards(LABELS, clients=clients, seed=0),
        lambda: partitioners.classes_per_client(LABELS, clients=clients, classes=1, seed=0),
        lambda: partitioners.quantity_skew(LABELS, clients=clients, sigma=1, seed=0),
        lambda: partitioners.pachinko(LABELS, COARSE, clients=clients, seed=0),
        lambda: partitioners.temporal(TIMES, clients=clients),
    ):
        with pytest.raises(ValueError, match=f"Expected clients >= 1, got clients={clients}"):
            make()


def test_too_few_examples_are_refused():
    for make in (
        lambda: partitioners.iid(3, clients=4, seed=0),
        lambda: partitioners.dirichlet_balanced(LABELS[:3], clients=4, alpha=1, seed=0),
        lambda: partitioners.shards(LABELS[:7], clients=4, seed=0),
        lambda: partitioners.quantity_skew(3, clients=4, sigma=1, seed=0),
        lambda: partitioners.pachinko(LABELS[:3], COARSE[:3], clients=4, seed=0),
        lambda: partitioners.temporal(TIMES[:3], clients=4),
    ):
        with pytest.raises(ValueError, match=r"(3|7) examples are too few for clients=4"):
            make()
