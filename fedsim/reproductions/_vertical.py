"""Vertical federated learning on tables whose columns are divided between two parties, and on halves of digits.

The methods are split learning (P. Vepakomma et al., 2018, https://arxiv.org/abs/1812.00564), FedBCD (Y. Liu et al., 2022,
https://arxiv.org/abs/1912.11187) and C-VFL (T. Castiglia et al., ICML 2022, https://arxiv.org/abs/2206.08330). The tables are
those of FATE's examples (default of credit card clients, breast cancer) and of UCI (Adult, also as a9a). The figures to compare
with are no paper's: they are those of scikit-learn's logistic regression with C = 1 on the columns of one party and on all.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedsim import metrics, rng
from fedsim.compressors import UniformQuantizer
from fedsim.data import FormatError
from fedsim.evaluation import evaluate
from fedsim.model import Model, Params
from fedsim.reproductions._reproduction import Case, Extent, Reproduction, Request, Row, join_nonempty
from fedsim.text_files import read_csv, read_text
from fedsim.vertical import (
    CVFL,
    BatchSampler,
    FedBCD,
    Party,
    SplitLearning,
    VerticalAlgorithm,
    VerticalBatch,
    VerticalData,
    VerticalModel,
    align,
    concatenate,
    dense,
    divide_columns,
    sum_embeddings,
)

_FOLDER, _SECRET, _LOCAL_STEPS = "tabular_vfl", "a secret of both", 5
_SHARES, _MISSING = (0.25, 0.5, 1.0), (0.0, 0.3, 0.6)

Splits = tuple[VerticalData, VerticalData]  # training and test


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """Data of two parties and how a model is trained on them.

    Attributes:
      title: the name in the table.
      load: returns training and test data.
      model: returns a model of data.
      known: the figures of scikit-learn by the parties whose columns are used, for each measure.
      steps, batch_size, rate: of training; the learning rate falls to 0 as a cosine.
      decay: whether weights have the L2 penalty of scikit-learn's C = 1.
    """

    title: str
    load: Callable[[Request], Splits]
    model: Callable[[VerticalData], VerticalModel]
    known: Mapping[str, Mapping[str, str]]
    steps: int = 1500
    batch_size: int = 500
    rate: float = 0.05
    decay: bool = True

    @property
    def measures(self) -> list[str]:
        return list(next(iter(self.known.values())))


def _logistic(data: VerticalData) -> VerticalModel:
    """Logistic regression: each party sends one number per person, and the sum of all is the logit."""

    def loss(examples: metrics.Examples, logits: jax.Array) -> jax.Array:
        return jax.nn.softplus(logits) - examples["y"].astype(jnp.float32) * logits

    def accuracy(examples: metrics.Examples, logits: jax.Array) -> jax.Array:
        return ((logits > 0) == (examples["y"] > 0)).astype(jnp.float32)

    total = sum_embeddings()
    top = hk.transform(lambda embeddings: total.apply({}, None, embeddings)[:, 0])
    measures = {"accuracy": accuracy, "AUC": metrics.AUC(bins=20_001)}
    return VerticalModel.of(data, bottoms=dense(1), top=top, loss=loss, metrics=measures, num_classes=2)


def _network(data: VerticalData) -> VerticalModel:
    return VerticalModel.of(data, bottoms=dense(16, hidden=(64,)), top=concatenate(10, hidden=(32,)), num_classes=10)


def _fate(name: str, request: Request) -> Splits:
    """Returns the two parties of one of FATE's tables, which has no test split: the test data are the training data."""
    files = {party: request.file(_FOLDER, f"{name}_hetero_{party}.csv*", f"{name} of FATE") for party in ("guest", "host")}
    parties = {
        "A": Party.from_csv(files["guest"], labels="y", prefix="A."),
        "B": Party.from_csv(files["host"], prefix="B."),
    }
    data = align(parties, secret=_SECRET)
    return data, data


def _two_parties(first: int, tables: Sequence[tuple[np.ndarray, np.ndarray]]) -> Splits:
    """Returns training and test data of party A, with the ``first`` columns and the labels, and party B, with the others."""
    blocks = {"A": np.arange(first), "B": np.arange(first, tables[0][0].shape[1])}
    train, test = (align(divide_columns(x, y, blocks, labels_at="A"), secret=_SECRET) for x, y in tables)
    return train, test


def read_adult(request: Request) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
    """Returns Adult's fourteen columns of texts by name, the labels ``int32 [n]``, and the number of training examples.

    Raises:
      FormatError: a line does not have 15 values.
    """
    names: list[str] = []
    rows: list[list[str]] = []
    train = 0
    for split in ("data", "test"):
        path = request.file(_FOLDER, f"adult.{split}*", "Adult of UCI")
        (_, names), *these = ((place, row) for place, row in read_csv(read_text(path), path) if row)
        if wrong := next((place for place, row in these if len(row) != 15), None):
            raise FormatError(f"{wrong} does not have the 15 values of Adult: download the file again.")
        rows += [row for _, row in these]
        train = train or len(these)
    *columns, labels = (np.array(column) for column in zip(*rows, strict=True))
    return dict(zip(names, columns, strict=False)), np.char.startswith(labels, ">").astype(np.int32), train


def _adult(request: Request) -> Splits:
    """Returns Adult: the first seven of fourteen columns at A, texts as indicators, numbers standardized."""
    columns, y, train = read_adult(request)
    encoded = [_encoded(column, train) for column in columns.values()]
    x, first = np.concatenate(encoded, axis=1), sum(column.shape[1] for column in encoded[:7])
    return _two_parties(first, [(x[:train], y[:train]), (x[train:], y[train:])])


def _encoded(column: np.ndarray, train: int) -> np.ndarray:
    """Returns numbers in units of their standard deviation in the training data, or an indicator of each text."""
    try:
        numbers = column.astype(np.float64)
    except ValueError:
        return (column[:, None] == np.unique(column)[None]).astype(np.float64)
    return ((numbers - numbers[:train].mean()) / numbers[:train].std())[:, None]


def _a9a(request: Request) -> Splits:
    """Returns a9a, the binary features of Adult: 1 to 67 at A, 68 to 123 at B."""
    tables = []
    for name in ("a9a", "a9a.t"):
        path = request.file(_FOLDER, f"{name}.gz", "a9a of LIBSVM")
        lines = [line.split() for line in read_text(path).splitlines()]
        x, y = np.zeros([len(lines), 123]), np.zeros(len(lines), np.int32)
        for row, line in enumerate(lines):
            try:
                columns = [int(entry.partition(":")[0]) for entry in line[1:]]
                y[row] = float(line[0]) > 0
            except (ValueError, IndexError):
                columns = [0]
            if columns and not 1 <= min(columns) <= max(columns) <= 123:
                raise FormatError(f"{path}, line {row + 1} has no label and features from 1 to 123: download the file again.")
            x[row, np.array(columns, int) - 1] = 1
        tables.append((x, y))
    return _two_parties(67, tables)


@functools.cache
def _digits_tables() -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns images as ``[n, 64]`` in [0, 1] and labels, of training and test: four fifths and one fifth."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = rng.generator(np.asarray(rng.words(rng.root(0)))).permutation(len(labels))
    x, y = images[order] / 16, labels[order].astype(np.int32)
    return [(x[:1437], y[:1437]), (x[1437:], y[1437:])]


def _halves(overlap: float = 1.0, seed: int = 0) -> tuple[dict[str, Party], VerticalData]:
    """Returns the parties of the training images, A with left halves and labels, B with right halves, and the test data."""
    columns = np.arange(64).reshape(8, 8)
    blocks = {"A": columns[:, :4].ravel(), "B": columns[:, 4:].ravel()}
    (x, y), (test_x, test_y) = _digits_tables()
    test = align(divide_columns(test_x, test_y, blocks, labels_at="A"), secret=_SECRET)
    return divide_columns(x, y, blocks, labels_at="A", overlap=overlap, seed=seed), test


def _digits(request: Request) -> Splits:
    del request
    parties, test = _halves()
    return align(parties, secret=_SECRET), test


def _figures(measures: Sequence[str], **by_party: str) -> dict[str, dict[str, str]]:
    return {parties: dict(zip(measures, text.split(), strict=True)) for parties, text in by_party.items()}


_DIGITS = _Task(
    title="digits",
    load=_digits,
    model=_network,
    known={"": {"accuracy": ""}},
    steps=1000,
    batch_size=64,
    rate=0.01,
    decay=False,
)
_TABLES = {
    "default_credit": _Task(
        title="default credit",
        load=functools.partial(_fate, "default_credit"),
        model=_logistic,
        known=_figures(["AUC"], A=".65855", B=".71699", both=".72422"),
    ),
    "breast": _Task(
        title="breast",
        load=functools.partial(_fate, "breast"),
        model=_logistic,
        known=_figures(["AUC"], A=".99289", both=".99745"),
        batch_size=128,
    ),
    "adult": _Task(
        title="Adult",
        load=_adult,
        model=_logistic,
        known=_figures(["accuracy", "AUC"], A=".8320 .87976", B=".8062 .85941", both=".8531 .90543"),
    ),
    "a9a": _Task(
        title="a9a",
        load=_a9a,
        model=_logistic,
        known=_figures(["accuracy", "AUC"], A=".83631 .88556", B=".79412 .76824", both=".84976 .90222"),
    ),
}


def optimizer(task: _Task, steps: int, people: int) -> optax.GradientTransformation:
    """Returns Adam with a learning rate that falls to 0 in ``steps`` steps, and the L2 penalty 1/2 ||w||² / people."""

    def weights(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "w", params)

    penalty = optax.add_decayed_weights(1 / people if task.decay else 0.0, mask=weights)
    return optax.chain(penalty, optax.adam(optax.cosine_decay_schedule(task.rate, steps)))


def _methods(model: VerticalModel, made: optax.GradientTransformation, **options: Any) -> dict[str, VerticalAlgorithm]:
    given = {"model": model, "optimizer": made, **options}
    four_bits = UniformQuantizer(levels=16)
    return {
        "split learning": SplitLearning(**given),
        f"FedBCD, Q = {_LOCAL_STEPS}": FedBCD(**given, local_steps=_LOCAL_STEPS),
        f"C-VFL, Q = {_LOCAL_STEPS}, 4 bits": CVFL(**given, local_steps=_LOCAL_STEPS, compressor=four_bits),
    }


def _train(algorithm: VerticalAlgorithm, data: VerticalData, size: int, steps: int, seed: int) -> tuple[Any, dict[str, float]]:
    """Returns the parameters after ``steps`` local steps, and the bytes up from and down to all passive parties."""
    state, infos = algorithm.init(rng.root(seed)), []
    for batch in _batches(data, size, -(-steps // algorithm.local_steps), seed):
        state, info = algorithm.apply(state, batch)
        infos.append({way: info[f"bits_{way}"] for way in ("up", "down")})
    bytes_ = {way: sum(sum(map(int, info[way].values())) for info in jax.device_get(infos)) / 8 for way in ("up", "down")}
    return state.params, bytes_


def _batches(data: VerticalData, size: int, count: int, seed: int) -> Iterator[VerticalBatch]:
    return BatchSampler(data, size=min(size, len(data)), seed=seed).rounds(count)


def _central(task: _Task, model: VerticalModel, data: VerticalData, steps: int) -> Callable[[int], Params]:
    """Returns what one organization with all columns of ``data`` trains with a seed, by gradients of the whole network.

    It starts with the parameters of the vertical algorithms and takes their batches, so that only the methods differ.
    """
    joint, made = model.joint, optimizer(task, steps, len(data))

    @jax.jit
    def step(params: Params, opt_state: optax.OptState, batch: VerticalBatch) -> tuple[Params, optax.OptState]:
        examples: dict[str, Any] = {**batch.features, "y": batch.labels}
        gradient = jax.grad(lambda params: jnp.mean(joint.losses(examples, joint.apply_for_eval(params, examples))))(params)
        updates, opt_state = made.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def train(seed: int) -> Params:
        params = joint.init(rng.stream(rng.root(seed), "init"))
        opt_state = made.init(params)
        for batch in _batches(data, task.batch_size, steps, seed):
            params, opt_state = step(params, opt_state, batch)
        return params

    return train


def _scores(model: Model, params: Params, data: VerticalData) -> dict[str, float]:
    return evaluate(model, params, data.pooled()).overall


def _extent(request: Request, task: _Task) -> Extent:
    return request.extent(seeds=3, rounds=task.steps, quick_rounds=20)


def _rows(
    task: _Task, extent: Extent, case: str, known: str, run: Callable[[int], tuple[dict[str, float], str]]
) -> Iterator[Row]:
    """Yields a row for each measure. ``run`` returns the scores of a seed, and a note."""
    began, scores, note = time.perf_counter(), [], ""
    with jax.numpy_dtype_promotion("standard"):  # which optax.adam requires
        for seed in extent.seeds:
            found, note = run(seed)
            scores.append(found)
    seconds = time.perf_counter() - began
    settings = {"steps": extent.rounds, "batch_size": task.batch_size, "rate": task.rate, "local_steps": _LOCAL_STEPS}
    for number, measure in enumerate(task.measures):
        values = [float(each[measure]) for each in scores]
        yield Row.of_seeds(
            values,
            digits=4,
            case=f"{task.title}, {case}",
            measure=measure,
            paper=task.known.get(known, {}).get(measure, ""),
            seconds=0.0 if number else seconds,
            settings=settings,
            reduced=join_nonempty(extent.reduced()),
            note="" if number else note,
        )


def _compare(request: Request, task: _Task) -> Iterator[Row]:
    """Compares each party alone, one organization with all columns, and the vertical algorithms."""
    extent = _extent(request, task)
    train, test = task.load(request)

    for parties in (*train.features, "both"):
        own_train, own_test = (data if parties == "both" else data.only(parties) for data in (train, test))
        model = task.model(own_train)
        central = _central(task, model, own_train, extent.rounds)

        def alone(seed: int, model: Any = model, central: Any = central, data: Any = own_test) -> tuple[dict[str, float], str]:
            return _scores(model.joint, central(seed), data), ""

        yield from _rows(
            task, extent, "one organization with both" if parties == "both" else f"{parties} alone", parties, alone
        )

    model = task.model(train)
    for name, algorithm in _methods(model, optimizer(task, extent.rounds, len(train))).items():

        def together(seed: int, algorithm: VerticalAlgorithm = algorithm) -> tuple[dict[str, float], str]:
            params, sent = _train(algorithm, train, task.batch_size, extent.rounds, seed)
            return _scores(model.joint, params, test), _note(sent)

        yield from _rows(task, extent, name, "both", together)


def _note(sent: Mapping[str, float]) -> str:
    return ", ".join(f"{bytes_ / 1e3:,.0f} kB {'up from' if way == 'up' else 'down to'} B" for way, bytes_ in sent.items())


def _compare_overlaps(request: Request) -> Iterator[Row]:
    """Trains on the people whom both parties know, and at A alone on all people whom it knows."""
    task, extent = _DIGITS, _extent(request, _DIGITS)
    for share in _SHARES:
        for case, names in (("split learning", ("A", "B")), ("A alone", ("A",))):
            parties, test = _halves(share, seed=0)
            model = _network(align({name: parties[name] for name in names}, secret=_SECRET))
            algorithm = SplitLearning(model=model, optimizer=optimizer(task, extent.rounds, len(test)))

            def run(seed: int, share: float = share, names: Any = names, algorithm: Any = algorithm) -> Any:
                parties, test = _halves(share, seed)
                data = align({name: parties[name] for name in names}, secret=_SECRET)
                params, sent = _train(algorithm, data, task.batch_size, extent.rounds, seed)
                scores = _scores(algorithm.model.joint, params, test.only(*names))
                return scores, f"{len(data):,} people" + (f"; {_note(sent)}" if len(names) > 1 else "")

            yield from _rows(task, extent, f"both know {100 * share:g} %, {case}", "", run)


def _compare_missing(request: Request) -> Iterator[Row]:
    """Trains with a party B that is missing in some rounds, and evaluates with it and without it."""
    task, extent = _DIGITS, _extent(request, _DIGITS)
    train, test = _digits(request)
    model = _network(train)
    without = model.without("B")
    for missing in _MISSING:
        algorithm = SplitLearning(model=model, optimizer=optimizer(task, extent.rounds, len(train)), missing=missing)
        trained: dict[int, tuple[Params, dict[str, float]]] = {}

        def there(seed: int, algorithm: VerticalAlgorithm = algorithm, trained: Any = trained) -> tuple[dict[str, float], str]:
            trained[seed] = _train(algorithm, train, task.batch_size, extent.rounds, seed)
            params, sent = trained[seed]
            return _scores(model.joint, params, test), _note(sent)

        def gone(seed: int, trained: Any = trained) -> tuple[dict[str, float], str]:
            return _scores(without, trained[seed][0], test), ""

        yield from _rows(task, extent, f"B missing in {100 * missing:g} % of rounds", "", there)
        yield from _rows(task, extent, f"B missing in {100 * missing:g} % of rounds and gone in the test", "", gone)


def _cases(request: Request) -> Mapping[str, Case]:
    def skip(name: str) -> list[Row]:
        request.log(f"The case {name} is not run: give --data DIR.")
        return []

    cases: dict[str, Case] = {
        "digits": functools.partial(_compare, request, _DIGITS),
        "digits-overlap": functools.partial(_compare_overlaps, request),
        "digits-missing": functools.partial(_compare_missing, request),
    }
    for name, task in _TABLES.items():
        cases[name] = functools.partial(_compare, request, task) if request.data else functools.partial(skip, name)
    return cases


VERTICAL = Reproduction(
    name="vertical",
    title="Columns at two parties: each alone, one organization with both, split learning, FedBCD and C-VFL",
    paper="P. Vepakomma et al. Split learning for health. 2018. https://arxiv.org/abs/1812.00564; Y. Liu et al. FedBCD. IEEE "
    "Transactions on Signal Processing 2022. https://arxiv.org/abs/1912.11187; T. Castiglia et al. Compressed-VFL. ICML 2022. "
    "https://arxiv.org/abs/2206.08330",
    duration="about 3 minutes",
    required_data="DIR/tabular_vfl with FATE's default_credit and breast, UCI's adult.data and adult.test, and LIBSVM's a9a.gz "
    "and a9a.t.gz; none for the digits",
    cases=_cases,
    notes="Party A has the labels. On the tables the model is logistic regression, to which each party contributes one "
    "number per person. It is compared with scikit-learn's logistic regression (C = 1) on the same columns, and the vertical "
    "algorithms with that on all columns. FATE's tables have no test split, so their AUC is that of the training data, "
    "and breast is nearly separable. On the digits A has the left halves and B the right halves of the images, and the model "
    "is a network: a bottom of 64 and 16 units for each party and a top of 32 units. All methods start alike, draw their "
    "batches alike and take equally many local steps with Adam, so split learning equals one organization with both, and Q = "
    "5 exchanges a fifth as often. C-VFL also sends the top model and A's embeddings down, and needs the labels at B, which "
    "are not counted. *both know 25 %* means that both know a quarter of the people, and each of the others is known to one "
    "of them.",
)
