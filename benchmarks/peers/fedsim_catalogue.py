"""fedsim's registries: every algorithm that trains a model, every aggregator and compressor, and those that FedJAX also has.

One process has all of them compiled, so turns can be short. All entries run the same cohorts in every turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedsim
from benchmarks import workload
from benchmarks.peers.fedsim import MODELS, federated, without_dropout
from fedsim import aggregators, compressors
from fedsim.algorithms import FedAvg, FedSGD

FORWARD = 1 / 3  # the cost of a forward pass without a backward pass, in gradients
CLUSTERS = 2
LEVELS = 16  # of quantizers


class Entry(NamedTuple):
    """An algorithm, and the number of gradients of a batch of the task's size that it needs by definition.

    Attributes:
      algorithm: the algorithm.
      step: gradients per step of the algorithm's own ``batches``.
      preview: gradients per batch of the pass before training; 0 if measured is none.
    """

    algorithm: fedsim.Algorithm
    step: float = 1
    preview: float = 0


def algorithms(model: fedsim.Model, task: workload.Task) -> dict[str, Entry]:
    """Returns every registered algorithm that trains a model; the server averages unless the algorithm differs."""
    of, batches = fedsim.algorithms, fedsim.Batches(size=task.batch)
    sgd = optax.sgd(task.client_lr)
    common: dict[str, Any] = {"model": model, "batches": batches, "client_optimizer": sgd}
    mimicked = common | {"client_optimizer": optax.sgd(task.client_lr, momentum=0.9)}

    def split(parts: int) -> dict[str, Any]:  # each part of a batch is as large as a batch of the other algorithms
        return common | {"batches": fedsim.Batches(size=parts * task.batch)}

    server_sgd = {"model": model, "batches": batches.one_pass()}
    entries = {
        "FedAvg": Entry(of.FedAvg(**common)),
        "FedSGD": Entry(of.FedSGD(**server_sgd, server_optimizer=sgd)),
        "FedAvgM": Entry(of.FedAvgM(**common)),
        "FedAdam": Entry(of.FedAdam(**common)),
        "FedYogi": Entry(of.FedYogi(**common)),
        "FedAdagrad": Entry(of.FedAdagrad(**common)),
        "DiLoCo": Entry(of.DiLoCo(**common)),
        "StreamingDiLoCo": Entry(of.StreamingDiLoCo(**common)),
        "FedNova": Entry(of.FedNova(**common)),
        "FedExP": Entry(of.FedExP(**common)),
        "FedProx": Entry(of.FedProx(**common)),
        "AdaptiveFedProx": Entry(of.AdaptiveFedProx(**common), preview=FORWARD),
        "SCAFFOLD": Entry(of.SCAFFOLD(**common)),
        "SCAFFOLD, option I": Entry(of.SCAFFOLD(**common, control_variate="I"), preview=1),
        "Mime": Entry(of.Mime(**mimicked), step=2, preview=1),  # gradients of a batch at y and at x; the cohort's gradient
        "MimeLite": Entry(of.MimeLite(**mimicked), preview=1),
        "FedDyn": Entry(of.FedDyn(**common)),
        "FedDC": Entry(of.FedDC(**common)),
        "FedCM": Entry(of.FedCM(**common)),
        "Scaffnew": Entry(of.Scaffnew(**common)),
        "FedSAM": Entry(of.FedSAM(**common), step=2),
        "MOON": Entry(of.MOON(**common), step=1 + 2 * FORWARD),  # representations by two more models
        "QFedAvg": Entry(of.QFedAvg(**common), preview=FORWARD),
        "QFedSGD": Entry(of.QFedSGD(**server_sgd)),
        "AgnosticFedAvg": Entry(of.AgnosticFedAvg(**common, num_domains=2), preview=FORWARD),
        "FedMGDA": Entry(of.FedMGDA(**common)),
        "APFL": Entry(of.APFL(**common), step=2),
        "APFL, adaptive": Entry(of.APFL(**common, adaptive=True), step=2),
        "Ditto": Entry(of.Ditto(**common), step=2),
        "FedPer": Entry(of.FedPer(**common)),
        "FedRep": Entry(of.FedRep(**common)),  # body and head from one pass
        "LGFedAvg": Entry(of.LGFedAvg(**common)),
        "FedBABU": Entry(of.FedBABU(**common)),
        "FedBN": Entry(of.FedBN(**common, norm="*/b")),  # biases stand for normalizations, which the models do not have
        "FedALA": Entry(of.FedALA(**common), preview=1),
        "FedProto": Entry(of.FedProto(**common), preview=FORWARD),
        "FedDistill": Entry(of.FedDistill(**common), preview=FORWARD),
        "HeteroFL": Entry(of.HeteroFL(**common)),  # simulates sub-networks as whole ones
        "FixMatch": Entry(of.FixMatch(**common), step=2, preview=FORWARD),  # weakly and strongly augmented examples
        "FedMatch": Entry(of.FedMatch(**common), step=3, preview=FORWARD),  # one for sigma, two for psi
        "FedDF": Entry(of.FedDF(**common)),  # without examples at the server, whose cost is no client's
        "SplitFed": Entry(of.SplitFed(**common)),
        "HypCluster": Entry(of.HypCluster(**common, num_clusters=CLUSTERS), preview=CLUSTERS * FORWARD),
        "IFCA": Entry(of.IFCA(**common, num_clusters=CLUSTERS), preview=CLUSTERS * FORWARD),
        # The gradients of all components, how likely each is for an example, and that once more for the mixture.
        "FedEM": Entry(of.FedEM(**common, num_components=CLUSTERS), step=CLUSTERS * (1 + FORWARD), preview=CLUSTERS * FORWARD),
        "PerFedAvg": Entry(of.PerFedAvg(**split(2)), step=2),
        "PerFedAvg, Hessian-free": Entry(of.PerFedAvg(**split(3), variant="hessian_free"), step=4),
        "PFedMe": Entry(of.PFedMe(**common), step=5 + FORWARD),  # five for theta, and the loss at theta
        "Reptile": Entry(of.Reptile(**common)),
        "DSSGD": Entry(of.DSSGD(**common)),
        "DSSGD, random, half downloaded": Entry(of.DSSGD(**common, selection="random", theta_d=0.5)),
    }
    trained = {cls for cls in of.ALGORITHMS.values() if issubclass(cls, FedAvg | FedSGD)}
    _check_complete(trained, {type(entry.algorithm) for entry in entries.values()})
    return entries


def aggregators_and_compressors(model: fedsim.Model, task: workload.Task) -> dict[str, Entry]:
    """Returns FedAvg with every aggregator, and with the mean of what every compressor sends."""
    examples = task.clients * 198  # approximate number of examples of a cohort

    def fedavg(aggregator: fedsim.aggregators.Aggregator, **options: Any) -> Entry:
        sgd = optax.sgd(task.client_lr)
        batches = fedsim.Batches(size=task.batch)
        algorithm = fedsim.algorithms.FedAvg(
            model=model, batches=batches, client_optimizer=sgd, aggregator=aggregator, **options
        )
        return Entry(algorithm)

    clipped = aggregators.Clipped(1.0)
    kinds: dict[str, aggregators.Aggregator] = {
        "Clipped": clipped,
        "GaussianMechanism": aggregators.GaussianMechanism(1e-3, clip=1.0, denominator=task.clients, largest_weight=examples),
        "MatrixMechanism": aggregators.MatrixMechanism(
            1e-3, clip=1.0, denominator=task.clients, largest_weight=examples, matrix=aggregators.BinaryTree(rounds=10_000)
        ),
        "PartlyUniform": aggregators.PartlyUniform("linear/*"),
        "CentredClipping": aggregators.CentredClipping(1.0),
        "CoordinateMedian": aggregators.CoordinateMedian(),
        "TrimmedMean": aggregators.TrimmedMean(0.2),
        "GeometricMedian": aggregators.GeometricMedian(),
        "Krum": aggregators.Krum(attackers=1),
        "Bulyan": aggregators.Bulyan(attackers=1),
        "DivideAndConquer": aggregators.DivideAndConquer(attackers=1),
        "FLAME": aggregators.FLAME(),
        "FoolsGold": aggregators.FoolsGold(),
        "Bucketing(CoordinateMedian)": aggregators.Bucketing(2, inner=aggregators.CoordinateMedian()),
        "MinNorm": aggregators.MinNorm(),
    }
    equal: dict[str, aggregators.Aggregator] = {
        "LocallyNoised": aggregators.LocallyNoised(1e-3, clip=1.0),
        "SecureMean": aggregators.SecureMean(max_weight=1.0),
        "DistributedMechanism": aggregators.DistributedMechanism(1e-3, clip=1.0, clients=task.clients),
    }
    senders: dict[str, compressors.Compressor] = {cls.__name__: cls() for cls in compressors.COMPRESSORS.values()}
    senders["Eden, 4 bits"] = compressors.Eden(bits=4)
    for inner in (compressors.TopK(), compressors.ScaledSign(), compressors.PowerSGD()):
        senders[f"ErrorFeedback({type(inner).__name__})"] = compressors.ErrorFeedback(inner)
    scaled = optax.sgd(1 / examples)  # the sum is about this many times the mean
    entries = {"Mean": fedavg(aggregators.Mean()), "Sum": fedavg(aggregators.Sum(), server_optimizer=scaled)}
    entries["Mean, averaging=0.9"] = fedavg(aggregators.Mean(), averaging=0.9)
    entries |= {name: fedavg(aggregator) for name, aggregator in kinds.items()}
    entries |= {name: fedavg(aggregator, weighting="uniform") for name, aggregator in equal.items()}
    entries |= {f"Compressed({name})": fedavg(aggregators.Compressed(sender)) for name, sender in senders.items()}
    both = aggregators.Clipped(1.0, inner=aggregators.Compressed(compressors.Eden(bits=1)))
    entries["Clipped(Compressed(Eden))"] = fedavg(both)
    measured = {type(entry.algorithm.aggregator) for entry in entries.values()}
    _check_complete(set(aggregators.AGGREGATORS.values()), measured)
    return entries


def of_fedjax(model: fedsim.Model, task: workload.Task) -> dict[str, Entry]:
    """Returns what FedJAX also has, with the hyperparameters of `benchmarks.peers.fedjax_catalogue`."""
    of, adam = fedsim.algorithms, optax.adam(task.server_lr, b2=task.b2, eps=task.eps)
    server = adam if task.server == "adam" else optax.sgd(1.0)
    common: dict[str, Any] = {"model": model, "batches": fedsim.Batches(size=task.batch)}
    momentum = optax.sgd(task.client_lr, momentum=0.9)
    fedavg = common | {"client_optimizer": optax.sgd(task.client_lr), "server_optimizer": server}
    # FedJAX divides the sum over a batch by the client's weight, so its steps shrink as clients grow. In the check all clients
    # have one size, so a different learning rate compensates for this.
    shrunk = task.client_lr * task.batch / workload.EVEN if task.data == "even" else task.client_lr
    senders = {
        "UniformQuantizer": compressors.UniformQuantizer(levels=LEVELS),
        "UniformQuantizer, entropy": compressors.UniformQuantizer(levels=LEVELS),
        "RotatedUniformQuantizer": compressors.RotatedUniformQuantizer(levels=LEVELS),
        "Drive": compressors.Drive(unbiased=True),
        "TernGrad": compressors.TernGrad(clip=2.5),
    }
    return {
        "FedAvg": Entry(of.FedAvg(**fedavg)),
        "FedProx": Entry(of.FedProx(**fedavg, mu=0.1)),
        "Mime": Entry(of.Mime(**common, client_optimizer=momentum)),
        "MimeLite": Entry(of.MimeLite(**common, client_optimizer=momentum)),
        "AgnosticFedAvg": Entry(of.AgnosticFedAvg(**fedavg | {"client_optimizer": optax.sgd(shrunk)}, num_domains=2)),
        "HypCluster": Entry(of.HypCluster(**fedavg, num_clusters=CLUSTERS)),
        "APFL": Entry(of.APFL(**fedavg, adaptive=True)),
        **{name: Entry(of.FedAvg(**fedavg, aggregator=aggregators.Compressed(sender))) for name, sender in senders.items()},
    }


CATALOGUES = {"algorithms": algorithms, "aggregators": aggregators_and_compressors, "fedjax": of_fedjax}


class Contender:
    packages = ("jax", "dm-haiku", "optax", "numpy")

    def __init__(self, task: workload.Task) -> None:
        fedsim.use_all_cores()
        self.task, self.data = task, workload.population(task)
        self.clients = federated(self.data, domain=workload.domains(self.data))
        self.sampler = fedsim.UniformSampler(self.clients, clients=task.clients, seed=task.seed)
        model = MODELS[task.model]()
        assert task.catalogue is not None
        self.entries = CATALOGUES[task.catalogue](model if task.dropout else without_dropout(model), task)
        self.states: dict[str, Any] = {}
        self.about = {
            "devices": str(jax.devices()),
            "fedsim": fedsim.__version__,
            "names": list(self.entries),
            "side_by_side": [name for name, entry in self.entries.items() if _side_by_side(entry.algorithm.aggregator)],
        }

    def run(self, name: str, rounds: int) -> dict[str, float]:
        """Runs the sampler's first cohorts from the entry's last state; returns the client steps and the gradients."""
        algorithm, step, preview = self.entries[name]
        state = self.states[name] if name in self.states else self._start(algorithm)
        sizes: list[int] = []
        numbers = iter(range(rounds))
        while cohorts := [self.sampler.cohort(n) for n in itertools.islice(numbers, self.task.per_dispatch)]:
            if self.task.per_dispatch == 1:
                state, _ = algorithm.apply(state, cohorts[0])
            else:
                state, _ = algorithm.apply_rounds(state, cohorts)
            sizes += [int(size) for cohort in cohorts for size in cohort.sizes]
        self.states[name] = jax.block_until_ready(state)
        steps = sum(map(self.task.steps, sizes))
        return {"steps": steps, "gradients": step * sum(map(algorithm.batches.num_steps, sizes)) + preview * steps}

    def save(self, name: str, path: str) -> None:
        np.savez(path, *jax.tree.leaves(self.states[name].params))

    def _start(self, algorithm: fedsim.Algorithm) -> Any:
        """Returns the state before the first round; for the comparison with FedJAX, with the common initial parameters."""
        state = algorithm.init(jax.random.key(self.task.seed))
        if self.task.catalogue != "fedjax":
            return state
        leaves = workload.initial_leaves(self.task.model, self.task.seed)
        if isinstance(algorithm, fedsim.algorithms.HypCluster):
            each = [workload.initial_leaves(self.task.model, self.task.seed + i) for i in range(algorithm.num_clusters)]
            leaves = [np.stack(of_each) for of_each in zip(*each, strict=True)]
        return state._replace(params=jax.tree.unflatten(jax.tree.structure(state.params), map(jnp.asarray, leaves)))


def _side_by_side(aggregator: aggregators.Aggregator) -> bool:
    return any(isinstance(one, aggregators.StackAggregator) for one in _nested(aggregator))


def _nested(aggregator: aggregators.Aggregator) -> Iterator[aggregators.Aggregator]:
    yield aggregator
    if isinstance(aggregator, aggregators.Wrapper):
        yield from _nested(aggregator.inner)


def _check_complete(registered: set[type], measured: set[type]) -> None:
    """Raises ``ValueError`` if a registered class is in no row."""
    if missing := sorted(cls.__name__ for cls in registered - measured):
        raise ValueError(f"Registered but in no row: {', '.join(missing)}. Add them to benchmarks/peers/fedsim_catalogue.py.")
