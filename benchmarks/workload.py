"""The task, data and initial parameters of all contenders. NumPy alone computes them, so all contenders get the same bytes."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import sqlite3
from pathlib import Path

import numpy as np

EVEN = 40  # number of examples of every client in "even"

Layer = tuple[np.ndarray, np.ndarray]  # (bias, weight): the order in which JAX flattens Haiku's {"b": ..., "w": ...}.

SHAPES: dict[str, list[tuple[int, ...]]] = {  # weights in Haiku's layout: [in, out], [height, width, in, out]
    "softmax": [(784, 10)],
    "logistic": [(784, 62)],
    "dense": [(784, 200), (200, 200), (200, 62)],
    "cnn": [(3, 3, 1, 32), (3, 3, 32, 64), (9216, 128), (128, 62)],
    "lstm": [(670, 96), (96, 10004), (766, 2680)],  # projection, output, recurrence: Haiku's alphabetical order
}
EMBEDDINGS = {"lstm": (10004, 96)}  # precede the layers in Haiku's order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One federated training: model, data and hyperparameters. Defaults: Reddi et al. (2021), EMNIST-62 with server Adam.

    Attributes:
      data: "emnist" (sizes clip(normal(198, 77), 19, 420)), "repeated" and "even" (for the equality checks, see
        `population`), "sentences" (for the lstm: 8 to 128 per client), "mnist" (69 examples each), "evaluation" (3,400 clients,
        77,483 examples) or "femnist" (TFF's HDF5 files).
      server: "adam", or "average": the clients' weighted mean becomes the model.
      per_dispatch: number of rounds per dispatch, for contenders that support more than one.
      source: the file of client sizes ("evaluation") or the folder of HDF5 files ("femnist").
      catalogue: "algorithms", "aggregators" or "fedjax", for contenders with many algorithms.
    """

    model: str
    data: str = "emnist"
    population: int = 500
    clients: int = 10
    batch: int = 20
    client_lr: float = 10**-1.5
    server: str = "adam"
    server_lr: float = 10**-2.5
    b2: float = 0.99
    eps: float = 1e-4
    dropout: bool = True
    per_dispatch: int = 1
    seed: int = 0
    device: str = "cpu"
    source: str | None = None
    catalogue: str | None = None

    def steps(self, size: int) -> int:
        """Returns the number of client steps of one epoch; the last batch may be partial."""
        return -(-int(size) // self.batch)


@dataclasses.dataclass(frozen=True)
class Population:
    """Packed clients: ``x: [n, 28, 28, 1] uint8``, ``y: [n] int32``, ``sizes: [clients] int64``, in client order.

    For the lstm, ``x`` and ``y`` are ``[n, 20] int32``: ids of words and of the next words.
    """

    x: np.ndarray
    y: np.ndarray
    sizes: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def client(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(*self.offsets[index : index + 2])
        return self.x[rows], self.y[rows]

    def floats(self) -> np.ndarray:
        """Returns ``x / 255`` as float32, for libraries whose datasets store floats."""
        return np.multiply(self.x, np.float32(1 / 255), dtype=np.float32)

    def digest(self) -> str:
        """Returns a digest by which contenders show that they have the same bytes."""
        digest = hashlib.sha256()
        for array in (self.x, self.y, self.sizes):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()[:16]


def population(task: Task, split: str = "train") -> Population:
    """Returns the clients of ``task``.

    In "repeated", for the equality check, a client has one image many times. All of its batches are then the same, in any
    order and however a library completes the last batch (mask, wrap around, leave short). So libraries that shuffle with
    different generators must still agree on batches, steps, weights, averaging and server step. In "even", all clients
    also have the same size.
    """
    rng = np.random.default_rng(0)
    if task.data == "femnist":
        return _femnist(Path(task.source or "."), split)
    if task.data in ("repeated", "even"):
        sizes = np.array([7, 20, 33, 60, 45, 19, 21, 40, 3, 52]) if task.data == "repeated" else np.full(10, EVEN)
        examples = _sentences(rng, len(sizes)) if task.model == "lstm" else _examples(rng, len(sizes))
        return Population(*(np.repeat(a, sizes, axis=0) for a in examples), sizes)
    if task.data == "sentences":
        sizes = np.clip(rng.normal(64, 24, task.population), 8, 128).astype(np.int64)
        return Population(*_sentences(rng, int(sizes.sum())), sizes)
    if task.data == "evaluation":
        sizes = _evaluation_sizes(rng, task.source)
    elif task.data == "mnist":
        sizes = np.full(task.population, 69)
    else:
        sizes = np.clip(rng.normal(198, 77, task.population), 19, 420).astype(np.int64)
    return Population(*_examples(rng, int(sizes.sum()), classes=10 if task.data == "mnist" else 62), sizes)


def domains(data: Population) -> np.ndarray:
    """Returns the domain of each example, for agnostic learning: 0 for even labels, 1 for odd ones."""
    return (data.y % 2).astype(np.int32)


def repeat_sqlite(source: Path, target: str, clients: int) -> None:
    """Writes a FedJAX SQLite file that repeats the clients of another one under new names."""
    with contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as small:
        rows = small.execute("SELECT client_id, data, num_examples FROM federated_data ORDER BY rowid").fetchall()
        (table,) = small.execute("SELECT sql FROM sqlite_master WHERE name = 'federated_data'").fetchone()
    with contextlib.closing(sqlite3.connect(target)) as large:
        large.execute(table)
        repeated = ((b"%06d" % i + rows[i % len(rows)][0], *rows[i % len(rows)][1:]) for i in range(clients))
        large.executemany("INSERT INTO federated_data VALUES (?, ?, ?)", repeated)
        large.commit()


def initial_layers(model: str, seed: int = 0) -> list[Layer]:
    """Draws initial parameters like Haiku's with NumPy: clipped at 2 standard deviations of 1/sqrt(fan in); biases are 0."""
    rng = np.random.default_rng(seed)
    layers = []
    for shape in SHAPES[model]:
        weight = np.clip(rng.standard_normal(shape), -2, 2) / np.sqrt(np.prod(shape[:-1]))
        layers.append((np.zeros(shape[-1], np.float32), weight.astype(np.float32)))
    return layers


def initial_leaves(model: str, seed: int = 0) -> list[np.ndarray]:
    """Returns `initial_layers` in the order in which JAX flattens the Haiku parameters of these models."""
    layers = [array for layer in initial_layers(model, seed) for array in layer]
    if model not in EMBEDDINGS:
        return layers
    return [np.clip(np.random.default_rng(seed).standard_normal(EMBEDDINGS[model], np.float32), -2, 2), *layers]


def _sentences(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws sentences of 4 to 30 words by Zipf's law, cut to 20. Ids: 0 is padding, 1 the beginning, 2 the end."""
    words = np.minimum(3 + rng.zipf(1.2, (n, 21)), 10_003)
    ends = rng.integers(4, 30, (n, 1))
    place = np.arange(21)
    words = np.select([place == 0, place < ends, place == ends], [1, words, 2], 0).astype(np.int32)
    return words[:, :-1], words[:, 1:]


def _examples(rng: np.random.Generator, n: int, classes: int = 62) -> tuple[np.ndarray, np.ndarray]:
    """Draws learnable images: half the prototype of the class, half noise. Blocks keep the peak memory low."""
    prototypes = rng.integers(0, 128, (classes, 28, 28, 1), np.uint8)
    y = rng.integers(0, classes, n, np.int32)
    x = np.empty((n, 28, 28, 1), np.uint8)
    for start in range(0, n, 4096):
        block = x[start : start + 4096]
        block[:] = prototypes[y[start : start + 4096]] + rng.integers(0, 128, block.shape, np.uint8)
    return x, y


def _evaluation_sizes(rng: np.random.Generator, source: str | None) -> np.ndarray:
    """Returns the number of test examples per writer, from a CSV of EMNIST or drawn with the same count and sum."""
    if source is None:
        return 1 + rng.multinomial(77_483 - 3_400, rng.dirichlet(np.full(3_400, 4.0)))
    with open(source, newline="") as file:
        return np.array([int(row["num_examples"]) for row in csv.DictReader(file)])


def _femnist(folder: Path, split: str) -> Population:
    """Reads files in TFF's layout and inverts the images, because the files have 255 for paper."""
    import h5py

    with h5py.File(folder / f"femnist_{split}.h5") as file:
        clients = [(c["pixels"][()], c["label"][()]) for c in file["examples"].values()]
    x = 255 - np.concatenate([pixels for pixels, _ in clients])[..., None]
    y = np.concatenate([labels for _, labels in clients]).astype(np.int32)
    return Population(x, y, np.array([len(labels) for _, labels in clients]))
