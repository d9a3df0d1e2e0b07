"""A synthetic stand-in for Stack Overflow with as many users as the real one, or more.

It serves to measure speed and memory without the download. Accuracy on it says nothing about Stack Overflow.

These properties are real: the dataset has 342,477 users with 135,818,730 training sentences, and users with fewer than 100
sentences were left out (TensorFlow Federated, tff.simulation.datasets.stackoverflow.load_data). We know of no published
quantiles of the sizes, so a client's size is drawn from the one-parameter distribution that fits these two facts: a Pareto
distribution from 100 to 200,000 (the maximum is assumed) whose exponent, 1.288, gives the real mean of 396.6. Its median is
171, its 90 % quantile 597 and its 99 % quantile 3,555. Every client has an eighth as many test sentences, whereas only 60 % of
the real users have any. Shapes, dtypes and special ids are those of the real task: 10,000 words, and pad, bos, eos,
out-of-vocabulary. These are synthetic: a word is one of the eight usual followers of the previous word (45 %), or a word of the
topic (25 %), or any word by Zipf's law. A user has one of 4,096 mixtures of 50 topics, drawn from Dirichlet(concentration, ...,
concentration), and a sentence has one topic. Lengths are log-normal with a median of 12 words, truncated at 20.

Loaded, as by FedJAX's preprocessing (0 pad, 1 bos, 2 eos, 3 to 10,002 words; out-of-vocabulary, 10,003, does not occur):
  x: [20] int16, bos and the sentence without its last token.
  y: [20] int16, the sentence, followed by eos if it fits, and pad.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.datasets import _stand_in
from fedsim.datasets._random_access import bits, generator, normal, streams, uniform
from fedsim.datasets._registry import register

_BOS, _EOS, _FIRST_WORD = 1, 2, 3
_WORDS, _LENGTH, _TOPICS, _TOPIC_WORDS, _FOLLOWERS = 10_000, 20, 50, 1024, 8
_SMALLEST, _LARGEST, _EXPONENT, _TEST_SHARE = 100, 200_000, 1.288, 16_586_035 / 135_818_730


class _Language:
    """Data shared by all users of a seed."""

    def __init__(self, seed: int, concentration: float) -> None:
        base = np.ones(_TOPICS)
        self.mixes = _stand_in.dirichlet_mixes(seed, "stackoverflow_like mixes", base, concentration)
        draw = generator(seed, "stackoverflow_like language")
        chances = np.cumsum(1 / np.arange(1, _WORDS + 1))
        # The inverse of Zipf's distribution at 2**18 even steps; the rarest word has two or three of these.
        self.any_word = np.searchsorted(chances / chances[-1], (np.arange(2**18) + 0.5) / 2**18).astype(np.int16) + _FIRST_WORD
        self.followers = draw.choice(self.any_word, (_FIRST_WORD + _WORDS, _FOLLOWERS))
        # The words of a topic, the most frequent first, exclude the hundred words that all topics share.
        own = np.stack([draw.choice(np.arange(100, _WORDS), _TOPIC_WORDS, replace=False) for _ in range(_TOPICS)])
        ranks = np.searchsorted(chances[:_TOPIC_WORDS] / chances[_TOPIC_WORDS - 1], (np.arange(2**12) + 0.5) / 2**12)
        self.topic_words = (own[:, ranks] + _FIRST_WORD).astype(np.int16)


_language = functools.lru_cache(maxsize=2)(_Language)


def rows(client: np.ndarray, number: np.ndarray, *, split: int, seed: int, concentration: float) -> Mapping[str, np.ndarray]:
    """Returns the examples with these numbers of these clients, each ``int64 [n]``.

    >>> row = rows(np.array([7]), np.array([0]), split=0, seed=0, concentration=0.1)
    >>> row["x"].shape, row["x"][0, 0], bool((row["x"][:, 1:] == row["y"][:, :-1]).all())
    ((1, 20), np.int16(1), True)
    """
    language = _language(seed, concentration)
    user = streams(seed, "stackoverflow_like user", client)
    sentence = streams(seed, "stackoverflow_like sentence", client, number * 2 + split)
    topic = _stand_in.pick(language.mixes, (bits(user, 0) % len(language.mixes)).astype(np.int64), uniform(sentence, 0))
    length = np.clip(np.rint(12 * np.exp(0.6 * normal(sentence, 1))), 2, _LENGTH + 1)
    tokens = np.empty((len(client), _LENGTH + 1), np.int16)
    tokens[:, 0] = _BOS
    for i in range(1, _LENGTH + 1):
        random = bits(sentence, i + 2)
        which, slot, any_slot = random & 0xFF, (random >> 8) & 0xFFF, (random >> 20) & 0x3FFFF
        word = language.any_word[any_slot]
        word = np.where(which < 179, language.topic_words[topic, slot], word)
        tokens[:, i] = np.where(which < 115, language.followers[tokens[:, i - 1], _FAVOURITES[slot]], word)
    place = np.arange(1, _LENGTH + 1)
    y = np.where(place <= length[:, None], tokens[:, 1:], np.where(place == length[:, None] + 1, _EOS, 0)).astype(np.int16)
    return {"x": np.concatenate([tokens[:, :1], y[:, :-1]], axis=1), "y": y}


# The first follower of a word is drawn half of the time, the second a quarter, and so on.
_FAVOURITES = np.minimum(12 - np.frexp(np.arange(2**12))[1], _FOLLOWERS - 1)


def sizes(clients: int, seed: int, max_examples: int | None) -> dict[str, np.ndarray]:
    """Returns the numbers of train and test examples of each client, ``int64 [clients]``.

    >>> sizes(3, 0, 200)["train"].max() <= 200
    np.True_
    """
    u = uniform(streams(seed, "stackoverflow_like size", np.arange(clients)), 0)
    train = (_SMALLEST * (1 - u * (1 - (_SMALLEST / _LARGEST) ** _EXPONENT)) ** (-1 / _EXPONENT)).astype(np.int64)
    train = np.minimum(train, max_examples or _LARGEST)
    return {"train": train, "test": np.rint(train * _TEST_SHARE).astype(np.int64)}


@register(
    "stackoverflow_like",
    task="a synthetic stand-in for stackoverflow_word without a download: any number of users; generated",
    features={"x": "[20] int16 token ids, from bos on", "y": "[20] int16 the next token's ids; 0 = pad"},
    source_features={"x": "[20] int16 token ids, from bos on", "y": "[20] int16 the next token's ids; 0 = pad"},
    options={
        "clients": "number of clients, 1 to 10,000,000; the real dataset has 342,477",
        "max_examples": "largest number of training examples of a client; None: fitted to the real sizes",
        "concentration": "of the clients' topics; small values give skewed clients, large values similar ones",
        "seed": "seed of all random numbers",
    },
    splits={"train": (10_000, 3_717_737), "test": (10_000, 454_015)},
    num_classes=_FIRST_WORD + _WORDS + 1,
    default_model="stackoverflow_lstm(expected_length=13.3)",
    source="generated; stored in the cache if larger than a gigabyte",
    download_bytes=0,
    licence="none needed: generated text",
    citation="for the counts: TensorFlow Federated, tff.simulation.datasets.stackoverflow. "
    "https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/stackoverflow/load_data",
)
def load_stackoverflow_like(
    data: Path | None,
    cache: Path,
    *,
    clients: int = 10_000,
    max_examples: int | None = None,
    concentration: float = 0.1,
    seed: int = 0,
) -> dict[str, FederatedData]:
    """Generates train and test in memory, or above a gigabyte once into the cache, from where they are memory-mapped.

    Raises:
      ValueError: an argument is out of its range, or a folder ``data`` is given.
      OSError: the cache is full or cannot be written.
    """
    options: dict[str, Any] = dict(clients=clients, max_examples=max_examples, concentration=concentration, seed=seed)
    return _stand_in.load("stackoverflow_like", data, cache, sizes, rows, **options)
