"""DiLoCo and streaming DiLoCo of a small language model on Stack Exchange text, against data-parallel AdamW with equal tokens.

A. Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023,
https://arxiv.org/abs/2311.08105; A. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
https://arxiv.org/abs/2501.18512.

Every run takes the same number of steps, and in a step all workers together read the same number of sequences, so that the
methods differ in their communication alone. Data-parallel AdamW averages the workers' gradients in every step.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optax

from fedsim import models, tree
from fedsim.aggregators import Compressed, Mean
from fedsim.algorithm import Algorithm
from fedsim.algorithms import DiLoCo, FedSGD, StreamingDiLoCo
from fedsim.compressors import Eden
from fedsim.data import Batches, FederatedData
from fedsim.evaluation import evaluate
from fedsim.model import Model
from fedsim.reproductions._curve import Curve, train
from fedsim.reproductions._reproduction import Case, Extent, Reproduction, Request, Row, join_nonempty
from fedsim.samplers import UniformSampler
from fedsim.text import pack, vocabulary_from_counts

WORKERS, LOCAL_STEPS, STEPS, SEQUENCES, LENGTH, WORDS = (2, 4, 8), (10, 50, 250), 500, 16, 64, 2044
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
RATE = 1e-3  # the best of RATES for data-parallel AdamW, by the loss of validation paragraphs: the case "rate"
# What is assumed of the workers' machines and of the server's links.
STEP_SECONDS, GIGABITS = 0.1, (1, 10)
_FRAGMENTS, _DELAY, _ALPHA, _EVALUATED = 2, 5, 0.5, 512


class Text(NamedTuple):
    """Sequences of training paragraphs by worker, and validation and test sequences of all users."""

    train: FederatedData
    validation: FederatedData
    test: FederatedData


@functools.cache
def _model() -> Model:
    return models.lm_tiny(WORDS + 4, length=LENGTH)


def divide(sizes: Mapping[str, int], workers: int) -> list[list[str]]:
    """Returns the sites of each worker: the largest site that is left goes to the worker that has least.

    >>> divide({"beer": 5, "coffee": 3, "bicycles": 4}, workers=2)
    [['beer'], ['bicycles', 'coffee']]
    """
    groups: list[list[str]] = [[] for _ in range(workers)]
    for site in sorted(sizes, key=lambda site: (-sizes[site], site)):
        min(groups, key=lambda group: sum(sizes[each] for each in group)).append(site)
    return groups


def load(request: Request, workers: int, *, by_site: bool, seed: int) -> Text:
    """Returns the text of all users, by site or dealt to the workers at random.

    Every tenth training paragraph of a user is for validation.
    """
    what = "posts of Stack Exchange sites"
    posts = request.file("stackexchange", "*.jsonl.gz", what)
    words = vocabulary_from_counts(request.file("stackexchange", "*.word_count", f"counts of words of {what}"), WORDS)
    parts = _documents(posts, tuple(words))
    if by_site:
        sizes = {site: sum(map(len, documents)) for site, documents in parts["train"].items()}
        own = [_joined(parts["train"][site] for site in sites) for sites in divide(sizes, workers)]
    else:
        own = [_joined(parts["train"].values())]
    draw = np.random.default_rng(seed)
    own = [[documents[i] for i in draw.permutation(len(documents))] for documents in own]
    if not by_site:
        own = [own[0][worker::workers] for worker in range(workers)]

    def of_all(split: str) -> FederatedData:
        documents = _joined(parts[split].values())
        packed = pack([documents[i] for i in np.random.default_rng(0).permutation(len(documents))], LENGTH)
        kept = {name: rows[:_EVALUATED] for name, rows in packed.items()}
        return FederatedData.from_arrays(kept, sizes=[len(kept["x"])])

    each = [pack(documents, LENGTH) for documents in own]
    columns = {name: np.concatenate([packed[name] for packed in each]) for name in each[0]}
    sizes_of = [len(packed["x"]) for packed in each]
    return Text(FederatedData.from_arrays(columns, sizes=sizes_of), of_all("validation"), of_all("test"))


def _joined(parts: Iterable[list[np.ndarray]]) -> list[np.ndarray]:
    return list(itertools.chain.from_iterable(parts))


@functools.lru_cache(maxsize=1)
def _documents(posts: Path, words: tuple[str, ...]) -> dict[str, dict[str, list[np.ndarray]]]:
    """Returns the ids of the tokens of each paragraph, by split and site."""
    ids = {word: id for id, word in enumerate(words, 3)}
    unknown, splits = len(words) + 3, {"train": {}, "validation": {}, "test": {}}  # type: ignore[var-annotated]
    with gzip.open(posts, "rt", encoding="utf-8") as lines:
        for user in map(json.loads, lines):
            site = user["client_id"].partition(":")[0]
            for split in ("train", "test"):
                for number, post in enumerate(user[split]):
                    tokens = [1, *(ids.get(word, unknown) for word in post["tokens"].split(" ")), 2]
                    kind = "validation" if split == "train" and number % 10 == 9 else split
                    splits[kind].setdefault(site, []).append(np.array(tokens, np.int32))
    return splits


def seconds(steps: int, rounds: int, bits: float, gigabits: float, overlap: float = 0.0) -> float:
    """Returns the simulated seconds of a run in which workers wait for the messages of each round.

    Args:
      steps: the local steps of a worker, each of `STEP_SECONDS`.
      rounds: the number of times that workers communicate.
      bits: the bits that a worker sends and receives each time.
      gigabits: the rate of its link in each direction, in 10⁹ bits per second.
      overlap: the seconds of local steps that it takes meanwhile.

    >>> seconds(100, rounds=10, bits=1e9, gigabits=1), seconds(100, rounds=10, bits=1e9, gigabits=1, overlap=0.5)
    (20.0, 15.0)
    """
    return steps * STEP_SECONDS + rounds * max(0.0, bits / (gigabits * 1e9) - overlap)


def algorithms(workers: int, steps: int, rate: float = RATE) -> dict[str, tuple[Algorithm, int, int, float]]:
    """Returns by name the algorithm, its steps in a round, its synchronizations in a round, and the seconds that overlap."""
    model, of_worker = _model(), SEQUENCES // workers
    adamw = optax.adamw(optax.warmup_cosine_decay_schedule(0, rate, max(1, steps // 20), steps), weight_decay=0.1)
    one = Batches(size=of_worker, steps=1)
    found: dict[str, tuple[Algorithm, int, int, float]] = {
        "data-parallel AdamW": (FedSGD(model=model, server_optimizer=adamw, batches=one, weighting="uniform"), 1, 1, 0.0)
    }
    for local in sorted({min(each, steps) for each in LOCAL_STEPS}):
        batches = Batches(size=of_worker, steps=local)
        found[f"DiLoCo, H = {local}"] = (DiLoCo(model=model, client_optimizer=adamw, batches=batches), local, 1, 0.0)
    local = min(50, steps)
    fragments = {"fragments": _FRAGMENTS, "strided": True, "delay": min(_DELAY, local // _FRAGMENTS - 1), "alpha": _ALPHA}
    streaming = StreamingDiLoCo(
        model=model,
        client_optimizer=adamw,
        batches=Batches(size=of_worker, steps=local),
        aggregator=Compressed(Eden(bits=4), inner=Mean()),
        **fragments,  # type: ignore[arg-type]
    )
    overlap = fragments["delay"] * STEP_SECONDS
    found[f"streaming DiLoCo, H = {local}, 4 bits up"] = (streaming, local, _FRAGMENTS, overlap)
    return found


def run(algorithm: Algorithm, text: Text, split: str, rounds: int, seed: int) -> Curve:
    """Trains for a number of rounds, and evaluates eight times: the score is minus the loss per token of a split."""
    sampler = UniformSampler(text.train, clients=text.train.num_clients, seed=seed)

    def score(state: object) -> float:
        return -evaluate(_model(), state.params, getattr(text, split)).overall["loss"]  # type: ignore[attr-defined]

    return train(algorithm, sampler, rounds=rounds, every=max(1, rounds // 8), score=score)


def _compare(request: Request, workers: int, by_site: bool) -> Iterator[Row]:
    extent = _extent(request)
    texts = [load(request, workers, by_site=by_site, seed=seed) for seed in extent.seeds]
    for name, (algorithm, local, times, overlap) in algorithms(workers, extent.rounds).items():
        rounds = extent.rounds // local
        steps = rounds * local  # fewer if the number of local steps does not divide that of all steps
        curves = [run(algorithm, text, "test", rounds, seed) for seed, text in zip(extent.seeds, texts, strict=True)]
        losses = [-curve.scores[-1] for curve in curves]
        up = curves[0].bits_up / workers / (rounds * times)  # of a worker each time
        down = tree.num_bits(curves[0].state.params) / times
        clock = {gigabits: seconds(steps, rounds * times, up + down, gigabits, overlap) for gigabits in GIGABITS}
        request.log(f"{workers} workers, {'by site' if by_site else 'IID'}, {name}: {np.round(losses, 3)}")
        yield Row.of_seeds(
            losses,
            case=f"{workers} workers, {'by site' if by_site else 'IID'}: {name}",
            measure=f"test loss per token after {steps:,} steps of {SEQUENCES} sequences",
            reduced=_reduced(extent),
            seconds=sum(curve.seconds for curve in curves),
            settings={
                "rate": RATE,
                "weight_decay": 0.1,
                "sequences": SEQUENCES // workers,
                "length": LENGTH,
                "local_steps": local,
            },
            details={
                "steps": [[at * local for at in curve.rounds] for curve in curves],
                "loss": [[-score for score in curve.scores] for curve in curves],
                "megabytes_per_worker": (up + down) * rounds * times / 8e6,
                "simulated_seconds": {f"{gigabits} Gbit/s": value for gigabits, value in clock.items()},
            },
            note=f"{(up + down) * rounds * times / 8e6:,.0f} MB per worker; "
            + ", ".join(f"{value:,.0f} s at {gigabits} Gbit/s" for gigabits, value in clock.items()),
        )


def _rate(request: Request) -> Iterator[Row]:
    extent = _extent(request)
    for rate in RATES:
        algorithm = algorithms(8, extent.rounds, rate)["data-parallel AdamW"][0]
        texts = [load(request, 8, by_site=False, seed=seed) for seed in extent.seeds]
        curves = [run(algorithm, text, "validation", extent.rounds, seed) for seed, text in enumerate(texts)]
        yield Row.of_seeds(
            [-curve.scores[-1] for curve in curves],
            case=f"data-parallel AdamW, rate {rate:g}",
            measure=f"validation loss per token after {extent.rounds:,} steps of {SEQUENCES} sequences",
            reduced=_reduced(extent),
            seconds=sum(curve.seconds for curve in curves),
        )


def _reduced(extent: Extent) -> str:
    steps = f"{extent.rounds:,} of {STEPS:,} steps" if extent.rounds < STEPS else ""
    return join_nonempty(extent.reduced(rounds=False), steps)


def _extent(request: Request) -> Extent:
    return request.extent(seeds=1, rounds=STEPS, quick_rounds=4)


def _cases(request: Request) -> Mapping[str, Case]:
    cases: dict[str, Case] = {"rate": functools.partial(_rate, request)}
    for name, by_site in (("iid", False), ("site", True)):
        cases |= {f"{name}-{workers}": functools.partial(_compare, request, workers, by_site) for workers in WORKERS}
    return cases


DILOCO = Reproduction(
    name="diloco",
    title="DiLoCo of a small language model on Stack Exchange text, against data-parallel AdamW with equal tokens",
    paper="A. Douillard et al. DiLoCo: Distributed low-communication training of language models. 2023. "
    "https://arxiv.org/abs/2311.08105; A. Douillard et al. Streaming DiLoCo with overlapping communication. 2025. "
    "https://arxiv.org/abs/2501.18512. Their models and data are far larger, so no published figures are compared",
    duration="10 minutes per case of one seed, 7 cases",
    required_data="Stack Exchange posts: DIR/stackexchange/*.jsonl.gz and *.word_count",
    cases=_cases,
    notes=f"`lm_tiny` with {WORDS:,} words and four other ids, sequences of {LENGTH} tokens. In each of {STEPS:,} steps all "
    f"workers together read {SEQUENCES} sequences, so tokens are equal. AdamW has weight decay 0.1, and a rate that rises over "
    f"a twentieth of the steps to {RATE:g} and falls with a cosine; it was chosen for data-parallel AdamW on validation "
    "paragraphs (the case `rate`) and is that of all methods. The server's rate 0.7 and momentum 0.9 are the paper's. By site: "
    "each of the eight sites belongs to one worker, and with fewer workers the sites are grouped so that tokens are about "
    f"equal. Streaming DiLoCo has {_FRAGMENTS} fragments, τ = {_DELAY}, α = {_ALPHA} and EDEN with 4 bits per parameter up. "
    f"Simulated seconds are {STEP_SECONDS} s per step, an assumption, and the time in which a worker sends and receives its "
    "messages over a link of its own; streaming DiLoCo waits only for what takes longer than τ steps. The papers start from a "
    "model that was trained before and take 88,000 steps; with 500 steps here, H = 250 leaves two rounds.",
)
