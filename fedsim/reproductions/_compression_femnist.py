"""Accuracy against bits on FEMNIST: updates with 1, 2, 4 and 8 bits per parameter, and their largest 1 %.

FedJAX (J. H. Ro, A. T. Suresh, K. Wu, "FedJAX: federated learning simulation with JAX", 2021,
https://arxiv.org/abs/2108.02117) reports uniform stochastic quantization in a notebook: 85.5 % with 8 bits and 59.2 % with
1. DRIVE (S. Vargaftik et al., NeurIPS 2021, https://arxiv.org/abs/2105.08339) and EDEN (S. Vargaftik et al., ICML 2022,
https://arxiv.org/abs/2108.08842) should be far better with 1 bit. Bits are exact message sizes, headers included.

Deviations: a perceptron replaces the convolutional network, and only the available writers take part. The order of the
methods can be compared with the notebook, but not the accuracies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax

from fedsim import compressors, models
from fedsim.aggregators import Aggregator, Compressed, Mean
from fedsim.algorithms import FedAvg
from fedsim.compressors import Compressor
from fedsim.reproductions import _femnist as femnist
from fedsim.reproductions._curve import train
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty
from fedsim.samplers import UniformSampler

_COHORT, _EVERY, _LAST = 10, 25, 4


def _methods() -> dict[str, tuple[str, Compressor | None, str]]:
    """Returns the title, the compressor and the notebook's result of each case."""
    uniform, eden = compressors.UniformQuantizer, compressors.Eden
    methods: dict[str, tuple[str, Compressor | None, str]] = {"none": ("not compressed", None, "")}
    for bits, stated in ((8, "85.5 %"), (4, ""), (2, ""), (1, "59.2 %")):
        methods[f"uniform-{bits}"] = (f"uniform, {bits} bits", uniform(levels=2**bits), stated)
    for bits in (4, 2, 1):
        methods[f"rotated-{bits}"] = (f"rotated uniform, {bits} bits", compressors.RotatedUniformQuantizer(levels=2**bits), "")
    methods["drive-1"] = ("DRIVE, 1 bit", compressors.Drive(), "far above uniform")
    for bits in (4, 2, 1):
        methods[f"eden-{bits}"] = (f"EDEN, {bits} bits", eden(bits=bits), "far above uniform" if bits == 1 else "")
    methods["top-1-percent"] = ("top 1 %", compressors.TopK(fraction=0.01), "")
    feedback = compressors.ErrorFeedback(compressors.TopK(fraction=0.01))
    methods["top-1-percent-feedback"] = ("top 1 %, error feedback", feedback, "")
    return {
        name: (title.replace("1 bits", "1 bit"), compressor, stated) for name, (title, compressor, stated) in methods.items()
    }


def _cases(request: Request) -> Mapping[str, Case]:
    return {name: functools.partial(_run, request, *method) for name, method in _methods().items()}


def _run(request: Request, title: str, compressor: Compressor | None, stated: str) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=1000)
    train_data, test_data = femnist.load(request)
    model = models.emnist_dense()
    aggregator: Aggregator = Mean() if compressor is None else Compressed(compressor)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    accuracies, sizes, seconds = [], [], 0.0
    cohort = min(_COHORT, train_data.num_clients)
    for seed in extent.seeds:
        algorithm = FedAvg(
            model=model, client_optimizer=optax.sgd(femnist.RATE), batches=femnist.BATCHES, aggregator=aggregator
        )
        curve = train(
            algorithm,
            UniformSampler(train_data, clients=cohort, seed=seed),
            rounds=extent.rounds,
            score=lambda state: femnist.accuracy(model, state.params, test_data),
            every=_EVERY,
        )
        accuracies.append(100 * curve.mean_of_last(_LAST))
        sizes.append(curve.bits_up / (extent.rounds * cohort * numbers))
        seconds += curve.seconds
        result = f"{accuracies[-1]:.1f} %, {sizes[-1]:.3f} bits up per parameter, {curve.seconds:.0f} s"
        request.log(f"{title}: seed {seed}: {result}")
    reduced = join_nonempty(femnist.missing_writers(train_data), extent.reduced())
    settings = {"rate": femnist.RATE, "cohort": cohort, "batch_size": femnist.BATCHES.size, "rounds": extent.rounds}
    shared: dict[str, Any] = {"seeds": len(accuracies), "settings": settings, "reduced": reduced}
    yield Row.of_seeds(
        accuracies,
        digits=1,
        case=title,
        measure="test accuracy, %",
        paper=stated,
        seconds=seconds,
        **shared,
    )
    yield Row(
        case=title,
        measure="bits up per parameter",
        ours=f"{sizes[0]:.3f}",
        values=sizes,
        **shared,
    )


COMPRESSION = Reproduction(
    name="compression",
    title="Compressed uploads on FEMNIST: accuracy against bits for 1, 2, 4 and 8 bits per parameter, and for the largest 1 %",
    paper="J. H. Ro, A. T. Suresh, K. Wu. FedJAX: federated learning simulation with JAX. 2021 (its notebook on "
    "compression). https://arxiv.org/abs/2108.02117",
    duration="2 to 5 min per case of 3 seeds, 14 cases",
    required_data=femnist.NEEDS,
    cases=_cases,
    notes="FedAvg trains a perceptron with two hidden layers of 200 units, with 10 writers per round, for 1,000 rounds. The "
    "accuracy is the mean of the last four evaluations, which are 25 rounds apart. The notebook uses a convolutional "
    "network and all writers, so only the order of the methods can be compared.",
)
