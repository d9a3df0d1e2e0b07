"""Shakespeare: the lines of 715 roles in the plays, for next-character prediction; each role is a client.

B. McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017,
https://arxiv.org/abs/1602.05629; S. Caldas et al., "LEAF: a benchmark for federated settings", 2018,
https://arxiv.org/abs/1812.01097. The splits and files are TensorFlow Federated's. The sequences are FedJAX's
(fedjax/datasets/shakespeare.py): the snippets of a client are concatenated, so no character is lost, whereas TensorFlow
Federated's tutorial drops the remainder of each snippet. Reddi et al. (2021) cut each snippet by itself, so their sequences
differ somewhat.

The hash and size of the SQLite archive are those that FedJAX's tests check; the hash of the HDF5 archive is TensorFlow
Federated's own (simulation/datasets/shakespeare.py up to 2021). None is published for FedJAX's SQLite files.

Source:
  snippets: [] text.

Loaded, with ``length=80``:
  x: [80] int16 characters: 0 pad, 1 bos, 2 eos, 3-88 TFF's characters, 89 any other.
  y: [80] int16 the next characters: x shifted by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.datasets._chosen_clients import OPTIONS, choose_clients
from fedsim.datasets._download import Download
from fedsim.datasets._registry import register
from fedsim.datasets._source import Source, load_converted, read_fedjax
from fedsim.formats import read_tff_hdf5, read_tff_sqlite
from fedsim.text import TFF_SHAKESPEARE, CharacterTokenizer

_FEDJAX = "https://storage.googleapis.com/gresearch/fedjax/shakespeare"
_TFF = "https://storage.googleapis.com/tff-datasets-public"
_SPLITS = ("train", "test")
_SOURCES = [
    Source(
        "FedJAX's SQLite",
        {split: (f"*_{split}.sqlite",) for split in _SPLITS},
        lambda path, split: read_fedjax(path, ["snippets"]),
        downloads=[Download(f"{_FEDJAX}/shakespeare_{split}.sqlite", (f"shakespeare_{split}.sqlite",)) for split in _SPLITS],
    ),
    Source(
        "TFF's SQLite",
        dict.fromkeys(_SPLITS, ("shakespeare.sqlite", "shakespeare.sqlite.lzma")),
        lambda path, split: read_tff_sqlite(path, split, {"snippets": ((), object)}),
        downloads=[
            Download(
                f"{_TFF}/shakespeare.sqlite.lzma",
                ("shakespeare.sqlite",),
                "d3d11fceb9e105439ac6f4d52af6efafed5a2a1e1eb24c5bd2dd54ced242f5c4",
                1_329_828,
            )
        ],
    ),
    Source(
        "TFF's HDF5",
        {split: (f"*_{split}.h5",) for split in _SPLITS},
        lambda path, split: read_tff_hdf5(path, ["snippets"]),
        downloads=[
            Download(
                f"{_TFF}/shakespeare.tar.bz2",
                ("shakespeare_train.h5", "shakespeare_test.h5"),
                "0285be9906cb5f268092eee4edeeacfc2af4574f2941f7cc2f08a321d7f5c707",
            )
        ],
    ),
]
_CHARACTERS = np.array(["", "⊢", "⊣", *TFF_SHAKESPEARE.decode(), "�"])


@register(
    "shakespeare",
    task="next-character prediction, sequences of {length}; each of 715 roles in Shakespeare's plays is a client",
    features={
        "x": "[{length}] int16 characters: 0 pad, 1 bos, 2 eos, 3-88 TFF's characters, 89 any other",
        "y": "[{length}] int16 the next characters: x shifted by one",
    },
    source_features={"snippets": "[] text, may be empty: one speech of the role"},
    splits={"train": (715, 30_249), "test": (715, 4_657)},
    num_classes=90,
    default_model="shakespeare_lstm(length={length})",
    options={"length": "characters in a sequence", **OPTIONS},
    source=f"{_FEDJAX}/shakespeare_train.sqlite and _test.sqlite (no hash or size is published); or TFF's SQLite or HDF5",
    licence="public domain (Shakespeare); TFF's files: Apache 2.0",
    citation="B. McMahan et al. Communication-efficient learning of deep networks from decentralized data. AISTATS, 2017. "
    "https://arxiv.org/abs/1602.05629; S. Caldas et al. LEAF: a benchmark for federated settings. 2018. "
    "https://arxiv.org/abs/1812.01097",
)
def load_shakespeare(
    data: Path | None, cache: Path, *, length: int = 80, clients: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Loads train and test from ``data``, or from the cache, into which they are downloaded and converted once.

    Raises:
      FileNotFoundError: ``data`` holds the dataset in none of its formats.
      FormatError: a file is damaged, or does not hold text.
      ValueError: ``clients`` exceeds the number of clients.
      DownloadError: the files could not be downloaded; the message says what to do instead.
    """
    checks.whole(1, or_none=True, clients=clients)
    tokenizer = CharacterTokenizer(length=length)
    splits = load_converted("shakespeare", data, cache, _SOURCES, tokenizer.client, length=length)
    splits = choose_clients("shakespeare", splits, clients, seed, cache)
    return {**splits, "decode": lambda ids: "".join(_CHARACTERS[ids])}
