"""Shakespeare: what 715 characters of the plays say, a client each; the next character is to be told.

B. McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017,
https://arxiv.org/abs/1602.05629; S. Caldas et al., "LEAF: a benchmark for federated settings", 2018,
https://arxiv.org/abs/1812.01097. Split and files are TensorFlow Federated's; the sequences are FedJAX's
(fedjax/datasets/shakespeare.py): all snippets of a client end to end, which loses none, where TensorFlow Federated's tutorial
drops the rest of each. So Reddi et al. (2021), who cut snippet by snippet, saw somewhat other sequences.

Hash and size of the SQLite archive are those that FedJAX's tests check, the hash of the HDF5 archive is TensorFlow Federated's
own (simulation/datasets/shakespeare.py up to 2021). For FedJAX's SQLite files none is published.

Source:
  snippets: [] text.

Loaded, with ``length=80``:
  x: [80] int16 characters: 0 pad, 1 bos, 2 eos, 3-88 TFF's characters, 89 any other.
  y: [80] int16 the same, one character on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

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
    task="tell the next character of 80 in a row; 715 characters of Shakespeare's plays, a client each",
    features={
        "x": "[80] int16 characters: 0 pad, 1 bos, 2 eos, 3-88 TFF's characters, 89 any other",
        "y": "[80] int16 the same, one character on",
    },
    source_features={"snippets": "[] text, some of it empty: what a character says in one go"},
    splits={"train": (715, 30_249), "test": (715, 4_657)},
    num_classes=90,
    default_model="shakespeare_lstm",
    options={"length": "characters in a sequence"},
    source=f"{_FEDJAX}/shakespeare_train.sqlite and _test.sqlite, of which no hash or size is published; or TFF's "
    "SQLite or HDF5",
    licence="public domain (Shakespeare); TFF's files: Apache 2.0",
    citation="B. McMahan et al. Communication-efficient learning of deep networks from decentralized data. AISTATS, 2017. "
    "https://arxiv.org/abs/1602.05629; S. Caldas et al. LEAF: a benchmark for federated settings. 2018. "
    "https://arxiv.org/abs/1812.01097",
)
def load_shakespeare(data: Path | None, cache: Path, *, length: int = 80) -> dict[str, Any]:
    """The two splits, from ``data``, or from the cache, fetched and converted into it once.

    Raises:
      FileNotFoundError: ``data`` has none of the forms.
      FormatError: a file that is damaged, or holds something else than text.
      DownloadError: nothing could be fetched; says the ways out.
    """
    tokenizer = CharacterTokenizer(length=length)
    splits = load_converted("shakespeare", data, cache, _SOURCES, tokenizer.client, length=length)
    return {**splits, "decode": lambda ids: "".join(_CHARACTERS[ids])}
