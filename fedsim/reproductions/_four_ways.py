"""Four ways of learning together, compared: offloading, distributed, federated and collaborative learning.

- Offloading: every device sends its examples to a server once, and the server trains. `FedAvg` of one client that has all data.
- Distributed: data-parallel SGD. The examples are dealt out to the devices as IID shards once, and in every step the devices
  average their gradients by a ring all-reduce. `FedSGD` of all shards.
- Federated: `FedAvg`. Devices take local steps from the server's model, and the server averages their models. (B. McMahan et
  al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.)
- Collaborative: `DFedAvg`. Every device keeps a model, and averages it with a neighbour's after its local steps. The neighbours
  are those of a one-peer exponential graph: one message per device and round.

All ways compute the same number of gradients of batches of the same size: devices x local steps x rounds. Offloading takes them
one after another, distributed learning as many at a time as there are devices. The links and the energy are those of `PLACES`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedsim import datasets, models, partitioners, rng, tree
from fedsim.algorithm import Algorithm
from fedsim.algorithms import FedAvg, FedProx, FedSGD
from fedsim.data import Batches, FederatedData
from fedsim.decentralized import DFedAvg
from fedsim.evaluation import Evaluation, evaluate, evaluate_personalized
from fedsim.execution import share_programs
from fedsim.model import Model
from fedsim.reproductions import _femnist as femnist
from fedsim.reproductions._clock import needs_data
from fedsim.reproductions._curve import train
from fedsim.reproductions._four_ways_costs import PLACES, Scenario, costs, sampler_of, topology
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty, mean_and_std

_MU, _POINTS, _LAST = 0.1, 10, 4


class Way(NamedTuple):
    """What a way is, in words.

    Attributes:
      data: where the examples are.
      model: where the model is.
      leaks: what others than the owner of the examples get to see.
    """

    data: str
    model: str
    leaks: str


WAYS = {
    "offloading": Way(
        "all on the server",
        "on the server; devices receive the result",
        "everything: the server has the raw examples",
    ),
    "distributed": Way(
        "dealt out: every device has a random shard of everyone's",
        "a copy on every device, equal after every step",
        "raw examples to the server and to the devices that get them; sums of gradients to neighbours in the ring",
    ),
    "federated": Way(
        "where they arose",
        "on the server; devices receive it in every round",
        "each device's model update to the server, from which examples may be inferred or reconstructed",
    ),
    "collaborative": Way(
        "where they arose",
        "a model of its own on every device",
        "each device's model to its neighbours, from which examples may be inferred or reconstructed; no server sees any",
    ),
}


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes the algorithm of a way from its learning rate.

    >>> from fedsim.reproductions import _four_ways as four
    >>> make = Maker("federated", four.SCENARIOS["iid"], models.digits_logistic(), devices=20)
    >>> make(0.1).batches.steps, dataclasses.replace(make, way="offloading")(0.1).batches.steps
    (5, 100)
    """

    way: str
    scenario: Scenario
    model: Model
    devices: int

    def __call__(self, rate: Any) -> Any:
        size, steps, optimizer = self.scenario.batch, self.scenario.local_steps, optax.sgd(rate)
        local: dict[str, Any] = {
            "model": self.model,
            "client_optimizer": optimizer,
            "batches": Batches(size=size, steps=steps),
        }
        if self.way == "offloading":
            central = self.scenario.central
            batches = Batches(size=size * central, steps=self.devices * steps // central)
            return FedAvg(model=self.model, client_optimizer=optimizer, batches=batches)
        if self.way == "distributed":
            one = Batches(size=size, steps=1)
            return FedSGD(model=self.model, server_optimizer=optimizer, weighting="uniform", batches=one)
        if self.way == "federated":
            return FedProx(**local, mu=_MU) if self.scenario.stragglers == "partial" else FedAvg(**local)
        return DFedAvg(**local, topology=topology(self.devices))


def population(way: str, data: FederatedData, seed: int) -> FederatedData:
    """Returns the training examples where a way has them: on one server, in random shards, or where they arose."""
    if way not in ("offloading", "distributed"):
        return data
    columns = {name: data.gather(name, np.arange(data.num_clients)) for name in data.columns}
    if way == "offloading":
        return FederatedData.from_arrays(columns, sizes=[data.num_examples])
    return FederatedData.from_partition(columns, partitioners.iid(data.num_examples, clients=data.num_clients, seed=seed))


class Run(NamedTuple):
    """The result of a way with one seed.

    Attributes:
      rounds: the rounds at each evaluation; a round has ``local_steps`` gradients of every device.
      evaluations: of all test examples, each with the model that its device has.
      seconds: the wall time.
      mean_model: the accuracy of the mean of the devices' models at the end, %, if they have different ones.
    """

    rounds: list[float]
    evaluations: list[Evaluation]
    seconds: float
    mean_model: float | None = None

    @property
    def accuracies(self) -> list[float]:
        """The accuracy over all test examples at each evaluation, %."""
        return [100 * each.overall["accuracy"] for each in self.evaluations]

    @property
    def worst(self) -> list[float]:
        """The mean accuracy of the worst tenth of the devices at each evaluation, %."""
        return [100 * each.over_clients("accuracy")["worst 10%"] for each in self.evaluations]


def run(
    way: str, scenario: Scenario, model: Model, splits: tuple[FederatedData, FederatedData], rate: float, rounds: int, seed: int
) -> Run:
    """Trains by a way, and evaluates about ten times."""
    data = population(way, splits[0], seed)
    make = Maker(way, scenario, model, splits[0].num_clients)
    algorithm: Algorithm = make(rate)
    share_programs([algorithm], make, [{"rate": rate}])
    found: list[Evaluation] = []

    def score(state: Any) -> float:
        if way == "collaborative":
            found.append(evaluate_personalized(algorithm, state, *splits))
        else:
            found.append(evaluate(model, state.params, splits[1]))
        return found[-1].overall["accuracy"]

    per_round = scenario.local_steps if way == "distributed" else 1
    every = max(1, rounds // _POINTS)
    sampler = sampler_of(way, scenario, data, seed)
    curve = train(algorithm, sampler, rounds=rounds * per_round, every=every * per_round, score=score)
    mean_model = 100 * evaluate(model, curve.state.params, splits[1]).overall["accuracy"] if way == "collaborative" else None
    return Run([round / per_round for round in curve.rounds], found, curve.seconds, mean_model)


def _compare(request: Request, scenario: Scenario) -> Iterator[Row]:
    extent, model = request.extent(seeds=3, rounds=scenario.rounds), scenario.model()
    populations = [scenario.load(request, seed) for seed in extent.seeds]
    data = populations[0][0]
    values = tree.num_bits(jax.eval_shape(model.init, rng.root(0))) // 32
    rows: dict[str, list[Row]] = {}
    for way in WAYS:
        of_rate = {rate: run(way, scenario, model, populations[0], rate, extent.rounds, 0) for rate in scenario.rates}
        rate = max(of_rate, key=lambda each: float(np.nan_to_num(np.mean(of_rate[each].accuracies[-_LAST:]))))
        runs = [
            of_rate[rate],
            *(run(way, scenario, model, populations[seed], rate, extent.rounds, seed) for seed in extent.seeds[1:]),
        ]
        parts = {name: costs(way, scenario, data, values, place) for name, place in PLACES.items()}
        ends = {name: once.until(extent.rounds, each) for name, (once, each) in parts.items()}
        accuracies, worst = [each.accuracies[-1] for each in runs], [each.worst[-1] for each in runs]
        request.log(f"{scenario.title}, {way}: rate {rate}, accuracies {np.round(accuracies, 1).tolist()}")
        shared: dict[str, Any] = {
            "case": f"{scenario.title}: {way}",
            "seeds": len(runs),
            "reduced": join_nonempty(extent.reduced()),
        }
        curve = {name: [once.until(at, each)._asdict() for at in runs[0].rounds] for name, (once, each) in parts.items()}
        end = ends["phone"]
        for row in (
            Row.of_seeds(
                accuracies,
                digits=1,
                measure="test accuracy, %",
                seconds=sum(each.seconds for each in [*of_rate.values(), *runs[1:]]),
                settings={"rate": rate, "rates": scenario.rates, "devices": data.num_clients, "batch": scenario.batch}
                | {"local steps": scenario.local_steps, "rounds": extent.rounds, "parameters": values},
                details={
                    "rounds": runs[0].rounds,
                    "accuracy": [each.accuracies for each in runs],
                    "worst": [each.worst for each in runs],
                    "costs": curve,
                },
                note=_note(rate, runs, data.sizes),
                **shared,
            ),
            Row.of_seeds(
                worst,
                digits=1,
                measure="worst tenth of the devices, %",
                **shared,
            ),
            Row(
                measure="bytes up and down per device; through servers",
                ours=f"{in_bytes(end.up)}, {in_bytes(end.down)}; {in_bytes(end.through_server)}",
                **shared,
            ),
            *(
                Row(
                    measure=f"simulated time; energy ({name})",
                    ours=f"{figure(each.seconds)} s; {figure(each.joules)} J",
                    **shared,
                )
                for name, each in ends.items()
            ),
        ):
            rows.setdefault(row.measure, []).append(row)
    for of_measure in rows.values():
        yield from of_measure


def _note(rate: float, runs: list[Run], sizes: np.ndarray) -> str:
    """Returns the learning rate, the accuracy of the mean model, and the largest device's, if it has half of the examples."""
    parts = [f"learning rate {rate:g}"]
    means = [each.mean_model for each in runs if each.mean_model is not None]
    parts += [f"the mean of the devices' models has {mean_and_std(means, 1)}"] if means else []
    largest = int(np.argmax(sizes))
    if 2 * sizes[largest] >= sizes.sum():
        results = [np.asarray(each.evaluations[-1].clients["accuracy"].result()) for each in runs]
        of_largest = 100 * np.mean([each[largest] for each in results])
        others = 100 * np.mean([np.delete(each, largest).mean() for each in results])
        parts.append(f"{of_largest:.1f} on the largest device, {others:.1f} on the others")
    return "; ".join(parts)


def in_bytes(number: float) -> str:
    """Returns a number of bytes as text.

    >>> in_bytes(0), in_bytes(68_000), in_bytes(1.5e9)
    ('0 B', '68 kB', '1.5 GB')
    """
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
    unit = next((name for name, size in units.items() if number >= size), "B")
    return f"{figure(number / units.get(unit, 1.0))} {unit}"


def figure(number: float) -> str:
    """Returns a number with three digits.

    >>> figure(0.20512), figure(12_345.6)
    ('0.205', '12,346')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _digits(partition: str, request: Request, seed: int, **options: Any) -> tuple[FederatedData, FederatedData]:
    del request
    splits = datasets.load("digits", clients=20, partition=partition, seed=seed, test_fraction=0.3, **options)
    return splits.train, splits.test


_iid = functools.partial(_digits, "iid")
_skewed = functools.partial(_digits, "dirichlet_balanced", alpha=0.1)


def _imbalanced(request: Request, seed: int, small: int = 10_000) -> tuple[FederatedData, FederatedData]:
    """Returns one device with as many examples as all others, which have one each; drawn from the digits with replacement."""
    generator, sizes = np.random.default_rng(seed), [small] + [1] * small

    def drawn(data: FederatedData) -> FederatedData:
        rows = generator.integers(data.num_examples, size=2 * small)
        return FederatedData.from_arrays({name: np.asarray(column)[rows] for name, column in data.columns.items()}, sizes=sizes)

    train_data, test_data = _iid(request, seed)
    return drawn(train_data), drawn(test_data)


def _writers(request: Request, seed: int, most: int = 50) -> tuple[FederatedData, FederatedData]:
    del seed
    splits = femnist.load(request)
    ids = splits[0].client_ids[:most]
    return splits[0].select(ids), splits[1].select(ids)


# One model for all seeds and scenarios, so that they share compiled programs.
_digits_model = functools.cache(functools.partial(models.digits_dense, hidden=(32,)))
_logistic_model = functools.cache(models.digits_logistic)
_femnist_model = functools.cache(functools.partial(models.emnist_dense, hidden=(64,)))

SCENARIOS = {
    "iid": Scenario(title="digits, IID", load=_iid, model=_digits_model),
    "skewed": Scenario(title="digits, skewed labels", load=_skewed, model=_digits_model),
    "stragglers-dropped": Scenario(title="skewed, stragglers dropped", load=_skewed, model=_digits_model, stragglers="dropped"),
    "stragglers-partial": Scenario(title="skewed, partial work", load=_skewed, model=_digits_model, stragglers="partial"),
    "imbalance": Scenario(
        title="one device with 10,000, 10,000 with 1",
        load=_imbalanced,
        model=_logistic_model,
        rounds=10,
        central=137,
        rates=(0.3,),
    ),
    "femnist": Scenario(title="FEMNIST, 50 writers", load=_writers, model=_femnist_model, batch=20, local_steps=10),
}


def _cases(request: Request) -> Mapping[str, Case]:
    return needs_data(request, {name: functools.partial(_compare, request, each) for name, each in SCENARIOS.items()})


def _described() -> str:
    return " ".join(
        f"{name.capitalize()}: examples {way.data}; model {way.model}; leaks {way.leaks}." for name, way in WAYS.items()
    )


FOUR_WAYS = Reproduction(
    name="four_ways",
    title="Four ways of learning together: offloading, distributed, federated and collaborative, with costs and what leaks",
    paper="H. B. McMahan et al. Communication-efficient learning of deep networks from decentralized data. AISTATS, 2017. "
    "https://arxiv.org/abs/1602.05629 (federated); T. Sun, D. Li, B. Wang. Decentralized federated averaging. TPAMI, 2022. "
    "https://arxiv.org/abs/2104.11375 (collaborative). No published figures are compared",
    duration="half a minute per case of 3 seeds, 6 cases; imbalance and femnist 3 to 4 min",
    required_data=f"digits: none; {femnist.NEEDS}",
    cases=_cases,
    notes="All ways compute the same number of gradients of batches of the same size, devices × local steps × rounds. Each has "
    "the learning rate with which seed 0 has the best mean of the last four evaluations, which are on the test examples: no "
    "validation examples are set apart, so the accuracies are slightly optimistic, for all ways alike. The accuracy is that "
    "of all devices' test examples, each with the model that its device has. "
    + _described()
    + " Bytes are those until every device has the final model. What the links and the energy are, and pictures: "
    "docs/four_ways.md.",
)
