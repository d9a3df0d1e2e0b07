"""Running statistics of networks of Flax NNX, Equinox and Keras, compared with training loops of these libraries."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import Model
from fedsim.experiment._checkpoint import Checkpoints, to_leaves

SIZES, RATE, MOMENTUM = [8, 20], 0.1, 0.9
FEATURES = {"x": jax.ShapeDtypeStruct((4,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
IMPORTS = {"nnx": "flax.nnx", "equinox": "equinox", "keras": "keras"}
WHOLE = fedsim.Batches(size=4, shuffle=False)  # no batch is partial
PARTIAL = fedsim.Batches(size=6, shuffle=False)


@pytest.fixture(autouse=True)
def settings_of_other_libraries(tmp_path, monkeypatch):
    """Other libraries need JAX's default promotion. Keras writes its configuration into a folder that is not the user's."""
    if "keras" not in sys.modules:
        monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(params=IMPORTS)
def library(request):
    return made(request.param)


def made(name):
    """Returns a network with batch normalization in a library: its model, and the library's own training and evaluation."""
    return SimpleNamespace(name=name, **globals()[f"in_{name}"](pytest.importorskip(IMPORTS[name])))


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def in_nnx(nnx):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.body = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, momentum=MOMENTUM, rngs=rngs)
            self.head = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x, mask=None):
            return self.head(nnx.relu(self.norm(self.body(x), mask=None if mask is None else mask[:, None])))

    def module_with(values):
        module = Net(nnx.Rngs(0))
        nnx.update(module, values)
        return module

    def train(values, batches):
        module = module_with(values)
        optimizer = nnx.Optimizer(module, optax.sgd(RATE), wrt=nnx.Param)
        step = nnx.jit(nnx.grad(lambda module, x, y: cross_entropy(module(x), y)))
        for x, y in batches:
            optimizer.update(module, step(module, x, y))
        return nnx.to_pure_dict(nnx.state(module))

    def evaluate(values, x):
        module = module_with(values)
        module.eval()
        return module(x)

    return {
        "model": lambda **options: Model.from_nnx(Net, features=FEATURES, **options),
        "masked": lambda: Model.from_nnx(Net, features=FEATURES),
        "train": train,
        "evaluate": evaluate,
        "statistics": ["['norm']['mean']", "['norm']['var']"],
        "weights": lambda p: [
            p[layer][name]
            for layer, names in {"body": ("kernel", "bias"), "norm": ("scale", "bias"), "head": ("kernel", "bias")}.items()
            for name in names
        ],
    }


def in_equinox(eqx):
    class Net(eqx.Module):
        body: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        head: eqx.nn.Linear

        def __init__(self, key):
            first, last = jax.random.split(key)
            self.body = eqx.nn.Linear(4, 8, key=first)
            self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch", momentum=MOMENTUM)
            self.head = eqx.nn.Linear(8, 3, key=last)

        def __call__(self, x, state):
            x, state = self.norm(self.body(x), state)
            return self.head(jax.nn.relu(x)), state

    make = eqx.nn.make_with_state(Net)

    def of_batch(module, state, x):
        return jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    def module_with(values):
        """Returns the module with these values, and the count for their share."""
        module, state = make(jax.random.key(0))
        count = round(np.log1p(-float(values.norm.batch_counter.init)) / np.log(MOMENTUM))
        state = state.set(module.norm.batch_counter, state.get(module.norm.batch_counter) + count)
        state = state.set(module.norm.batch_state_index, values.norm.batch_state_index.init)
        return eqx.combine(eqx.nn.delete_init_state(values), module), state

    def train(values, batches):
        module, state = module_with(values)

        @eqx.filter_jit
        def step(module, state, x, y):
            def loss(module):
                logits, new = of_batch(module, state, x)
                return cross_entropy(logits, y), new

            gradient, state = eqx.filter_grad(loss, has_aux=True)(module)
            return eqx.apply_updates(module, jax.tree.map(lambda g: -RATE * g, gradient)), state

        for x, y in batches:
            module, state = step(module, state, x, y)
        indices = lambda net: (net.norm.batch_counter.init, net.norm.batch_state_index.init)  # noqa: E731
        share = 1 - MOMENTUM ** float(state.get(module.norm.batch_counter))
        state = np.float32(share), state.get(module.norm.batch_state_index)
        return eqx.tree_at(indices, eqx.filter(module, eqx.is_inexact_array), state)

    def evaluate(values, x):
        module, state = module_with(values)
        return of_batch(eqx.nn.inference_mode(module), state, x)[0]

    return {
        "model": lambda **options: Model.from_equinox(make, features=FEATURES, **options),
        "train": train,
        "evaluate": evaluate,
        "statistics": [".norm.batch_counter.init", *(f".norm.batch_state_index.init[{i}]" for i in range(2))],
        "weights": lambda p: [p.body.weight.T, p.body.bias, p.norm.weight, p.norm.bias, p.head.weight.T, p.head.bias],
    }


def in_keras(keras):
    def net():
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8, name="body"),
                layers.BatchNormalization(momentum=MOMENTUM, epsilon=1e-5, name="norm"),
                layers.ReLU(),
                layers.Dense(3, name="head"),
            ],
            name="net",
        )

    def model_with(values):
        model = net()
        for variable in model.variables:
            variable.assign(np.array(values[variable.path.rpartition("/")[0]][variable.name]))
        return model

    def train(values, batches):
        model = model_with(values)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(RATE), loss=loss)
        for x, y in batches:
            model.train_on_batch(x, y)
        new = {}
        for variable in model.variables:
            new.setdefault(variable.path.rpartition("/")[0], {})[variable.name] = np.asarray(variable.value)
        return new

    class Masked(keras.Model):
        def __init__(self):
            super().__init__(name="net")
            self.body, self.norm, self.relu, self.head = net().layers

        def call(self, x, training=None, mask=None):
            return self.head(self.relu(self.norm(self.body(x), training=training, mask=mask)))

    return {
        "model": lambda **options: Model.from_keras(net, features=FEATURES, **options),
        "masked": lambda: Model.from_keras(Masked, features=FEATURES),
        "train": train,
        "evaluate": lambda values, x: model_with(values)(x, training=False),
        "statistics": [f"['net/norm']['moving_{name}']" for name in ("mean", "variance")],
        "weights": lambda p: [
            p[f"net/{layer}"][name]
            for layer, names in {"body": ("kernel", "bias"), "norm": ("gamma", "beta"), "head": ("kernel", "bias")}.items()
            for name in names
        ],
    }


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(0)
    columns = {"x": draw.normal(size=(28, 4)).astype(np.float32), "y": draw.integers(0, 3, 28).astype(np.int32)}
    return fedsim.FederatedData.from_arrays(columns, sizes=SIZES)


def fedavg(model, batches=WHOLE, **options):
    return fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(RATE), batches=batches, **options)


def cohort(data):
    return fedsim.Cohort.of(data, ["0", "1"])


def examples_of(data, client):
    rows = slice(0, SIZES[0]) if client == 0 else slice(SIZES[0], None)
    return data.columns["x"][rows], data.columns["y"][rows]


def batches_of(data, client, size=4):
    x, y = examples_of(data, client)
    return [(x[start : start + size], y[start : start + size]) for start in range(0, len(x), size)]


def assert_close(ours, theirs, tolerance=1e-5):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


def mean_of(values):
    return jax.tree.map(lambda *x: sum(n * leaf for n, leaf in zip(SIZES, x, strict=True)) / sum(SIZES), *values)


@pytest.mark.first(1)
def test_a_round_is_the_mean_of_loops_of_the_library(library, data):
    """Clients take 2 and 5 steps."""
    algorithm = fedavg(library.model(), execution=fedsim.Jit())
    algorithm.check(data)
    start = algorithm.init(jax.random.key(0))
    state, _ = algorithm.apply(start, cohort(data))
    expected = mean_of([library.train(start.params, batches_of(data, client)) for client in (0, 1)])
    assert_close(state.params, expected)


@pytest.mark.first(1)
def test_evaluation_uses_the_statistics(library, data):
    model = library.model()
    own = library.train(model.init_whole(jax.random.key(0)), batches_of(data, 1))
    examples = {"x": data.columns["x"], "y": data.columns["y"]}
    assert_close(model.apply_for_eval(own, examples), jnp.asarray(library.evaluate(own, data.columns["x"])), 1e-4)
    found = fedsim.evaluate(model, own, data).overall["loss"]
    np.testing.assert_allclose(found, cross_entropy(library.evaluate(own, data.columns["x"]), data.columns["y"]), rtol=1e-4)


@pytest.mark.first(1)
def test_statistics_that_clients_keep_are_those_of_their_loops(library, data):
    """Both clients start from the same values, and the server keeps the first ones."""
    algorithm = fedavg(library.model(statistics="client"), execution=fedsim.Jit())
    start = algorithm.init(jax.random.key(0))
    state, _ = algorithm.apply(start, cohort(data))
    (_, kept), _ = state.clients.rows
    roles = algorithm.model.roles
    for client in (0, 1):
        theirs = library.train(start.params, batches_of(data, client))
        expected = jax.tree.map(lambda role, x: x if role == "own_statistics" else None, roles, theirs)
        assert_close(jax.tree.map(lambda x, client=client: x[client], kept.own_statistics), expected)


def test_names_of_statistics_survive_in_a_checkpoint(library, tmp_path):
    state = fedavg(library.model()).init(jax.random.key(0))
    assert set(to_leaves({"params": state.params})) >= {f"['params']{name}" for name in library.statistics}
    Checkpoints(tmp_path).save(1, state)
    restored, _ = Checkpoints(tmp_path).newest(jax.eval_shape(fedavg(library.model()).init, jax.random.key(0)))
    assert_close(jax.tree.leaves(restored), jax.tree.leaves(state), 0)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["nnx", "keras"])
def test_padding_is_left_out_by_an_argument_mask(name, data):
    """The library's own loop has partial batches, without padding.

    The last batches have 8 examples. Of 2 examples, a feature may have a variance near 0 (2.5e-5 here, with batches of 6),
    which NNX computes as a difference of means of order 0.1. The gradients of its weights are such differences, too, and both
    sides were wrong by up to 4e-4 there.
    """
    library = made(name)
    algorithm = fedavg(library.masked(), fedsim.Batches(size=12, shuffle=False), execution=fedsim.Jit())
    algorithm.check(data)
    start = algorithm.init(jax.random.key(0))
    state, _ = algorithm.apply(start, cohort(data))
    expected = mean_of([library.train(start.params, batches_of(data, client, 12)) for client in (0, 1)])
    assert_close(state.params, expected, 1e-6)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["equinox", "keras"])
def test_padding_is_refused_without_a_mask(name, data):
    library = made(name)
    with pytest.raises(ValueError, match=r"The last batch of 2 of 2 clients.*running statistics.*drop_remainder=True"):
        fedavg(library.model(), PARTIAL).check(data)
    whole = fedavg(library.model(), fedsim.Batches(size=6, shuffle=False, drop_remainder=True), execution=fedsim.Jit())
    start = whole.init(jax.random.key(0))
    state, _ = whole.apply(start, cohort(data))
    full = [[batch for batch in batches_of(data, client, 6) if len(batch[1]) == 6] for client in (0, 1)]
    assert_close(state.params, mean_of([library.train(start.params, batches) for batches in full]))


@pytest.mark.first(1)
def test_frozen_statistics_normalize_in_training_too(library, data):
    check_frozen(library.model(statistics="frozen"), data)
    averaged = library.model()
    examples = {"x": data.columns["x"], "y": data.columns["y"]}
    outputs = averaged.apply_for_train(averaged.init_whole(jax.random.key(0)), examples, jax.random.key(0))
    assert np.abs(outputs - averaged.apply_for_eval(averaged.init_whole(jax.random.key(0)), examples)).max() > 0.01


@pytest.mark.first(1)
@pytest.mark.parametrize("given", ["when made", "when called", "when called by position"])
def test_frozen_statistics_of_linen_normalize_in_training_too(given, data):
    """Linen takes ``use_running_average`` from the module or from its call."""
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train, mask=None):
            made = {"use_running_average": not train} if given == "when made" else {}
            called = {"use_running_average": not train} if given == "when called" else {}
            position = (not train,) if given == "when called by position" else ()
            mask = None if mask is None else mask[:, None]
            x = nn.BatchNorm(momentum=MOMENTUM, **made)(nn.Dense(8)(x), *position, mask=mask, **called)
            return nn.Dense(3)(nn.relu(x))

    flags = {"train_kwargs": {"train": True}, "eval_kwargs": {"train": False}}
    check_frozen(Model.from_flax(Net(), features=FEATURES, statistics="frozen", **flags), data)


def test_frozen_statistics_of_a_subclass_of_linens_normalization_are_refused(data):
    nn = pytest.importorskip("flax.linen")

    class Own(nn.BatchNorm):
        @nn.compact
        def __call__(self, x, train):
            return super().__call__(x, use_running_average=not train)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(3)(Own()(x, train))

    flags = {"train_kwargs": {"train": True}, "eval_kwargs": {"train": False}}
    model = Model.from_flax(Net(), features=FEATURES, statistics="frozen", **flags)
    with pytest.raises(ValueError, match="Expected normalizations to be nn.BatchNorm itself with statistics='frozen', got Own"):
        model.apply_for_train(model.init_whole(jax.random.key(0)), {"x": data.columns["x"]}, jax.random.key(0))


@pytest.mark.parametrize("name", ["nnx", "equinox"])
def test_frozen_statistics_normalize_in_training_too_whatever_a_call_says(name, data):
    """As in modules that were written for Linen, calls say how to normalize."""
    module = pytest.importorskip(IMPORTS[name])
    flags = {"train_kwargs": {"train": True}, "eval_kwargs": {"train": False}}
    if name == "nnx":

        class Net(module.Module):
            def __init__(self, rngs):
                self.norm = module.BatchNorm(4, rngs=rngs)

            def __call__(self, x, train):
                return self.norm(self.norm(x, use_running_average=not train), not train)

        model = Model.from_nnx(Net, features=FEATURES, statistics="frozen", **flags)
    else:

        class Net(module.Module):
            norm: module.nn.BatchNorm

            def __init__(self, key):
                self.norm = module.nn.BatchNorm(4, "batch", mode="batch")

            def __call__(self, x, state, train):
                return self.norm(x, state, inference=not train)

        make = module.nn.make_with_state(Net)
        model = Model.from_equinox(lambda key: make(key), features=FEATURES, statistics="frozen", **flags)
    whole, examples = model.init_whole(jax.random.key(0)), {"x": 3 * data.columns["x"] + 1}
    assert_close(model.apply_for_train(whole, examples, jax.random.key(0)), model.apply_for_eval(whole, examples))


def test_equinox_layers_that_are_made_for_inference_stay_so_in_training(data):
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        dropout: eqx.nn.Dropout

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch", inference=True)
            self.dropout = eqx.nn.Dropout(0.5, inference=True)

        def __call__(self, x, state, *, key=None):
            x, state = self.norm(x, state)
            return self.dropout(x, key=key), state

    make = eqx.nn.make_with_state(Net)
    model = Model.from_equinox(lambda key: make(key), features=FEATURES)
    whole, examples = model.init_whole(jax.random.key(0)), {"x": data.columns["x"]}
    whole = jax.tree.map(lambda role, x: x + 0.5 if role == "statistics" else x, model.roles, whole)  # a share of 1/2
    outputs, after = model.network.train(whole, examples, jax.random.key(0))
    assert_close(outputs, model.apply_for_eval(whole, examples))
    before = jax.tree.map(lambda role, x: x if role == "statistics" else None, model.roles, whole)
    assert len(jax.tree.leaves(before)) == 3
    assert_close(after, before)


def check_frozen(model, data):
    """Training and evaluation have the same outputs, and a round changes all parameters and no statistics."""
    algorithm, examples = fedavg(model, PARTIAL), {"x": data.columns["x"], "y": data.columns["y"]}
    algorithm.check(data)
    start = algorithm.init(jax.random.key(0))
    outputs = model.apply_for_train(start.params, examples, jax.random.key(0))
    assert_close(outputs, model.apply_for_eval(start.params, examples))
    state, _ = algorithm.apply(start, cohort(data))
    change = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, start.params)
    is_frozen = jax.tree.map(lambda role: role == "frozen", model.roles)
    assert jax.tree.map(lambda x: bool(x == 0), change) == is_frozen and 2 <= sum(jax.tree.leaves(is_frozen)) < 9


def counting_in(name, module):
    if name == "nnx":

        class Net(module.Module):
            def __init__(self, rngs):
                self.calls = module.BatchStat(jnp.zeros((), jnp.int32))

        return lambda: Model.from_nnx(Net, features=FEATURES)
    if name == "equinox":
        norm = module.nn.make_with_state(module.nn.BatchNorm)
        return lambda: Model.from_equinox(lambda key: norm(4, "batch", mode="ema"), features=FEATURES)

    class Counting(module.layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls", initializer="zeros")

        def call(self, x):
            return x

    return lambda: Model.from_keras(lambda: module.Sequential([Counting(name="counting")]), features=FEATURES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nnx", "calls of dtype int32: keep counts"),
        ("equinox", r"ema_first_time_index/init of dtype bool: use eqx.nn.BatchNorm\(mode='batch'\) or eqx.nn.GroupNorm"),
        ("keras", "sequential/counting/calls of dtype int32: keep counts"),
    ],
)
def test_state_that_cannot_be_averaged_is_refused_by_name(name, message):
    make = counting_in(name, pytest.importorskip(IMPORTS[name]))
    with pytest.raises(ValueError, match=f"Expected the state of a network of .* to be floats, .* got {message}"):
        make()


def test_equinox_modules_that_do_not_fit_are_refused():
    nn = pytest.importorskip("equinox").nn
    norm = lambda key: nn.make_with_state(nn.BatchNorm)(4, "batch", mode="batch")  # noqa: E731
    with pytest.raises(ValueError, match="together with its state, got the module alone"):
        Model.from_equinox(lambda key: norm(key)[0], features=FEATURES)
    with pytest.raises(ValueError, match="eqx.nn.BatchNorm, 'batch', got axis_name='other'"):
        Model.from_equinox(norm, features=FEATURES, axis_name="other")


def test_keras_layers_that_are_not_trainable_are_refused():
    layers = pytest.importorskip("keras").layers
    net = lambda: sys.modules["keras"].Sequential([layers.Dense(3, trainable=False, name="body")])  # noqa: E731
    with pytest.raises(ValueError, match="got trainable=False for sequential/body/kernel, sequential/body/bias: .*with_parts"):
        Model.from_keras(net, features=FEATURES)


def test_values_that_a_keras_model_is_made_with_are_the_first_ones():
    keras = pytest.importorskip("keras")

    def net():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="norm")])
        model.set_weights([np.full(4, value, np.float32) for value in (1, 2, 3, 4)])
        return model

    norm = Model.from_keras(net, features=FEATURES).init_whole(jax.random.key(0))["sequential/norm"]
    assert {name: values.tolist() for name, values in norm.items()} == {
        name: [value] * 4 for name, value in zip(("gamma", "beta", "moving_mean", "moving_variance"), (1, 2, 3, 4), strict=True)
    }


@pytest.mark.first(1)
def test_recalibration_takes_the_statistics_of_a_client(library, data):
    """The network in NumPy, with the means of the batches' means and variances: the momentum has no influence."""
    algorithm = fedavg(library.model(), execution=fedsim.Jit())
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), cohort(data))
    found = fedsim.evaluate_personalized(algorithm, state, data, data, recalibrate=True).clients["loss"].result()
    w, b, scale, offset, v, c = (np.asarray(x, np.float64) for x in library.weights(state.params))
    for client in (0, 1):
        hidden = [x @ w + b for x, _ in batches_of(data, client)]
        mean, var = np.mean([h.mean(0) for h in hidden], 0), np.mean([h.var(0) for h in hidden], 0)
        normal = (np.concatenate(hidden) - mean) / np.sqrt(var + 1e-5) * scale + offset
        logits = np.maximum(normal, 0) @ v + c
        y = examples_of(data, client)[1]
        expected = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])
        np.testing.assert_allclose(found[client], expected, rtol=1e-5)
