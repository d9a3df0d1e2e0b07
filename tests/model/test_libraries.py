"""Models of other libraries compute what the same network in Haiku computes, and are refused where they could not."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

import sys
from types import SimpleNamespace

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import Model
from fedsim.experiment._checkpoint import Checkpoints, to_leaves

FEATURES, CLASSES, HIDDEN = federation.FEATURES, federation.NUM_CLASSES, 5
IMPORTS = {"flax": "flax.linen", "nnx": "flax.nnx", "equinox": "equinox", "keras": "keras", "functions": "jax"}


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
    """Returns two dense layers and a dropout in a library: its model, and its form of the parameters of the Haiku network."""
    module = pytest.importorskip(IMPORTS[name])
    return SimpleNamespace(name=name, **globals()[f"in_{name}"](module))


def in_flax(nn):
    class Net(nn.Module):
        rate: float = 0.0

        @nn.compact
        def __call__(self, x, train):
            x = nn.relu(nn.Dense(HIDDEN)(x))
            return nn.Dense(CLASSES)(nn.Dropout(self.rate, deterministic=not train)(x))

    flags = {"train_kwargs": {"train": True}, "eval_kwargs": {"train": False}}
    return {
        "model": lambda rate=0.0, **options: Model.from_flax(Net(rate), features=FEATURES, **flags, **options),
        "params": lambda p: {f"Dense_{i}": {"kernel": w, "bias": b} for i, (w, b) in enumerate(layers(p))},
        "names": ["['Dense_0']['bias']", "['Dense_0']['kernel']", "['Dense_1']['bias']", "['Dense_1']['kernel']"],
    }


def in_nnx(nnx):
    class Net(nnx.Module):
        def __init__(self, rate, rngs):
            self.first = nnx.Linear(3, HIDDEN, rngs=rngs)
            self.dropout = nnx.Dropout(rate, rngs=rngs)
            self.last = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(nnx.relu(self.first(x))))

    return {
        "model": lambda rate=0.0, **options: Model.from_nnx(lambda rngs: Net(rate, rngs), features=FEATURES, **options),
        "params": lambda p: {n: {"kernel": w, "bias": b} for n, (w, b) in zip(("first", "last"), layers(p), strict=True)},
        "names": ["['first']['bias']", "['first']['kernel']", "['last']['bias']", "['last']['kernel']"],
    }


def in_equinox(eqx):
    class Net(eqx.Module):
        layers: list
        dropout: eqx.nn.Dropout

        def __init__(self, rate, key):
            first, last = jax.random.split(key)
            self.layers = [eqx.nn.Linear(3, HIDDEN, key=first), eqx.nn.Linear(HIDDEN, CLASSES, key=last)]
            self.dropout = eqx.nn.Dropout(rate)

        def __call__(self, x, *, key=None):
            return self.layers[1](self.dropout(jax.nn.relu(self.layers[0](x)), key=key))

    def params(p):
        like = eqx.filter(Net(0.0, jax.random.key(0)), eqx.is_inexact_array)
        weights = [leaf for w, b in layers(p) for leaf in (w.T, b)]
        return jax.tree.unflatten(jax.tree.structure(like), weights)

    return {
        "model": lambda rate=0.0, **options: Model.from_equinox(lambda key: Net(rate, key), features=FEATURES, **options),
        "params": params,
        "names": [f".layers[{i}].{name}" for i in range(2) for name in ("weight", "bias")],
    }


def in_keras(keras):
    def network(rate):
        layers = keras.layers
        return keras.Sequential([layers.Dense(HIDDEN, activation="relu"), layers.Dropout(rate), layers.Dense(CLASSES)])

    names = "sequential/dense", "sequential/dense_1"
    return {
        "model": lambda rate=0.0, **options: Model.from_keras(lambda: network(rate), features=FEATURES, **options),
        "params": lambda p: {name: {"kernel": w, "bias": b} for name, (w, b) in zip(names, layers(p), strict=True)},
        "names": [f"['{name}']['{variable}']" for name in names for variable in ("bias", "kernel")],
    }


def in_functions(jax):
    def apply(rate):
        def outputs(params, x, key=None):
            x = jax.nn.relu(x @ params[0]["w"] + params[0]["b"][None])
            x = fedsim.models.dropout(key, rate, x) if key is not None else x
            return x @ params[1]["w"] + params[1]["b"][None]

        return outputs

    def init(key):
        shapes = (3, HIDDEN), (HIDDEN, CLASSES)
        return [{"w": jax.random.normal(jax.random.fold_in(key, w[0]), w), "b": jnp.zeros(w[1])} for w in shapes]

    return {
        "model": lambda rate=0.0, **options: Model.from_functions(init, apply(rate), features=FEATURES, **options),
        "params": lambda p: [{"w": w, "b": b} for w, b in layers(p)],
        "names": [f"[{i}]['{name}']" for i in range(2) for name in ("b", "w")],
    }


def layers(params):
    return [(params[name]["w"], params[name]["b"]) for name in ("linear", "linear_1")]


def in_haiku(x):
    hidden = jax.nn.relu(hk.Linear(HIDDEN)(x))
    return hk.Linear(CLASSES)(hidden)


HAIKU = Model.from_haiku(hk.transform(in_haiku), features=FEATURES, inputs="x")
PARAMS = HAIKU.init(jax.random.key(5))


def batch(seed=0, n=6):
    draw = np.random.default_rng(1)
    examples = {"x": draw.normal(size=(n, 3)).astype(np.float32), "y": draw.integers(0, CLASSES, n).astype(np.int32)}
    return fedsim.Batch(jax.tree.map(jnp.asarray, examples), jnp.arange(n) < n - 2, jax.random.key(seed), 0)


def fedavg(model):
    return fedsim.algorithms.FedAvg(
        model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), execution=fedsim.Jit()
    )


def test_outputs_gradients_and_a_round_equal_those_in_haiku(library):
    model, params = library.model(), library.params(PARAMS)
    assert jax.tree.structure(model.init(jax.random.key(0))).num_leaves == 4
    given = batch()
    federation.assert_trees_close(model.apply_for_eval(params, given.examples), HAIKU.apply_for_eval(PARAMS, given.examples))
    federation.assert_trees_close(model.outputs(params, given), HAIKU.outputs(PARAMS, given))
    gradient = jax.grad(model.train_loss)(jax.tree.map(jnp.asarray, params), given)
    expected = jax.grad(HAIKU.train_loss)(PARAMS, given)
    federation.assert_trees_close(jax.tree.leaves(gradient), jax.tree.leaves(library.params(expected)))

    states = []
    for each, start in ((model, params), (HAIKU, PARAMS)):
        algorithm = fedavg(each)
        algorithm.check(federation.data())
        state = algorithm.init(jax.random.key(0))
        start = jax.tree.unflatten(jax.tree.structure(state.params), jax.tree.leaves(start))
        states.append(algorithm.apply(state._replace(params=start), federation.cohort())[0].params)
    federation.assert_trees_close(jax.tree.leaves(states[0]), jax.tree.leaves(library.params(states[1])))


@pytest.mark.first(3)
def test_initial_parameters_depend_on_the_key_and_on_nothing_else(library):
    model, again = library.model(), library.model()
    one, two, other = (each.init(jax.random.key(seed)) for each, seed in ((model, 0), (again, 0), (model, 1)))
    federation.assert_trees_equal(jax.tree.leaves(one), jax.tree.leaves(two))
    federation.assert_trees_equal(one, jax.jit(model.init)(jax.random.key(0)))
    weights = [(x, y) for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True) if x.ndim == 2]
    assert len(weights) == 2 and all(np.abs(x - y).min() > 0 for x, y in weights)
    assert jax.tree.structure(one) == jax.tree.structure(other)


def test_names_of_parameters_survive_in_a_checkpoint(library, tmp_path):
    state = fedavg(library.model()).init(jax.random.key(0))
    assert sorted(to_leaves({"params": state.params})) == sorted(f"['params']{name}" for name in library.names)
    Checkpoints(tmp_path).save(1, state)
    restored, _ = Checkpoints(tmp_path).newest(jax.eval_shape(fedavg(library.model()).init, jax.random.key(0)))
    federation.assert_trees_equal(jax.tree.leaves(restored), jax.tree.leaves(state))


@pytest.mark.first(2)
def test_dropout_draws_from_the_key_of_the_step_and_in_training_only(library):
    """With a rate of 1/2, the mean over many keys is the output without dropout, because the last layer is linear."""
    model, params = library.model(rate=0.5), library.params(PARAMS)
    outputs = jax.jit(lambda seed: model.outputs(params, batch()._replace(key=jax.random.key(seed))))
    one, again, other = map(outputs, (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.1
    plain = HAIKU.apply_for_eval(PARAMS, batch().examples)
    federation.assert_trees_close(model.apply_for_eval(params, batch().examples), plain)
    draws = jax.jit(jax.vmap(outputs))(jnp.arange(1000))
    np.testing.assert_allclose(draws.mean(0), plain, atol=6 * float(draws.std(0).max()) / np.sqrt(1000))
    equal = {"x": jnp.tile(batch().examples["x"][1:2], (6, 1)), "y": batch().examples["y"]}
    assert len({*map(tuple, model.outputs(params, batch()._replace(examples=equal)).tolist())}) > 1  # a draw for each example


def test_streams_of_stacked_layers_of_nnx_have_a_key_each():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=5)
            @nnx.vmap
            def stacked(rngs):
                return nnx.Dropout(0.5, rngs=rngs)

            self.layers = stacked(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None), out_axes=1)(self.layers, x)

    model, x = Model.from_nnx(Net, features=FEATURES), {"x": jnp.ones([8, 3])}
    one, again, other = (np.asarray(model.apply_for_train({}, x, jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any() and {*one.flat} == {0.0, 2.0}
    assert all((one[:, layer] != one[:, 0]).any() for layer in range(1, 5))


@pytest.mark.parametrize("name", IMPORTS)
def test_several_inputs_and_outputs_that_are_dicts(name):
    """The outputs of x and z are a dict, of which the loss reads the logits."""
    module = pytest.importorskip(IMPORTS[name])
    features = {**FEATURES, "z": jax.ShapeDtypeStruct((3,), jnp.float32)}

    def outputs(layer, x, z):
        return {"features": x - z, "logits": layer(x - z)}

    options = {"features": features, "inputs": ("x", "z"), "loss": lambda e, o: fedsim.metrics.cross_entropy(e, o["logits"])}
    if name == "flax":

        class Net(module.Module):
            @module.compact
            def __call__(self, x, z):
                return outputs(module.Dense(CLASSES), x, z)

        model = Model.from_flax(Net(), **options)
    elif name == "nnx":

        class Net(module.Module):
            def __init__(self, rngs):
                self.layer = module.Linear(3, CLASSES, rngs=rngs)

            def __call__(self, x, z):
                return outputs(self.layer, x, z)

        model = Model.from_nnx(Net, **options)
    elif name == "equinox":

        class Net(module.Module):
            layer: module.nn.Linear

            def __call__(self, x, z):
                return outputs(self.layer, x, z)

        model = Model.from_equinox(lambda key: Net(module.nn.Linear(3, CLASSES, False, key=key)), **options)
    elif name == "keras":

        def net():
            x, z = module.Input((3,)), module.Input((3,))
            return module.Model([x, z], outputs(module.layers.Dense(CLASSES), x, z))

        model = Model.from_keras(net, **options)
    else:
        init = lambda key: {"w": jax.random.normal(key, (3, CLASSES))}  # noqa: E731
        model = Model.from_functions(init, lambda p, x, z: outputs(lambda x: x @ p["w"], x, z), **options)
    given = batch()
    examples = {**given.examples, "z": given.examples["x"][::-1]}
    params = model.init(jax.random.key(0))
    found = model.outputs(params, given._replace(examples=examples))
    np.testing.assert_allclose(found["features"], examples["x"] - examples["z"], rtol=1e-6)
    weights = next(leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2)
    weights = weights.T if name == "equinox" else weights
    np.testing.assert_allclose(found["logits"], found["features"] @ weights, rtol=1e-4, atol=1e-6)
    assert model.apply_for_eval(params, examples).keys() == {"features", "logits"}
    assert np.isfinite(model.train_loss(params, given._replace(examples=examples)))


def test_state_of_haiku_is_refused_by_name():
    network = hk.transform_with_state(lambda examples: hk.BatchNorm(True, True, 0.9)(examples["x"], is_training=True))
    with pytest.raises(ValueError, match="got batch_norm/~/mean_ema/counter of dtype int32: use fedsim.models.BatchNorm"):
        Model.from_haiku(network, features=FEATURES)


def haiku_with_one_name_twice():
    def network(examples):
        return examples["x"] @ hk.get_parameter("w", [3, CLASSES], init=jnp.ones) + hk.get_state("w", [1], init=jnp.zeros)

    return Model.from_haiku(hk.transform_with_state(network), features=FEATURES)


def linen_with_one_name_twice():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (3, CLASSES))
            return x @ w + self.variable("seen", "w", jnp.zeros, (1,)).value

    return Model.from_flax(Net(), features=FEATURES)


def keras_with_one_name_twice():
    keras = pytest.importorskip("keras")

    class Net(keras.Model):
        def __init__(self):
            super().__init__(name="net")
            self.one, self.other = (keras.layers.Dense(3, name="same") for _ in range(2))

        def call(self, x):
            return self.other(self.one(x))

    return Model.from_keras(Net, features=FEATURES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (haiku_with_one_name_twice, "got two variables ~/w: rename"),
        (linen_with_one_name_twice, "got two variables w: rename"),
        (keras_with_one_name_twice, "got net/same/(kernel|bias) twice: give layers different names"),
    ],
    ids=["haiku", "flax", "keras"],
)
def test_variables_with_one_name_are_refused(make, message):
    """They would have one value."""
    with pytest.raises(ValueError, match=f"different names, {message}"):
        make()


@pytest.mark.parametrize(
    ("statistics", "message"),
    [("frozen", "for a network without state, got statistics='frozen': leave"), ("mean", "or 'frozen', got statistics='mean'")],
)
def test_statistics_of_a_network_without_state_are_refused(statistics, message):
    with pytest.raises(ValueError, match=message):
        Model.from_haiku(hk.transform(in_haiku), features=FEATURES, inputs="x", statistics=statistics)


@pytest.mark.parametrize("name", ["flax", "nnx", "equinox", "keras", "haiku"])
def test_a_network_of_another_library_names_the_right_constructor(name):
    given = {"haiku": lambda: hk.transform(lambda x: x)}
    if name != "haiku":
        module = pytest.importorskip(IMPORTS[name])
        given |= {
            "flax": lambda: module.Dense(2),
            "nnx": lambda: module.Linear(2, 2, rngs=module.Rngs(0)),
            "equinox": lambda: module.nn.Linear(2, 2, key=jax.random.key(0)),
            "keras": lambda: module.Sequential([module.layers.Dense(2)]),
        }
    network = given[name]()
    constructors = {
        "from_haiku": lambda network: Model.from_haiku(network, features=FEATURES),
        "from_flax": lambda network: Model.from_flax(network, features=FEATURES),
        "from_nnx": lambda network: Model.from_nnx(lambda rngs: network, features=FEATURES),
        "from_equinox": lambda network: Model.from_equinox(lambda key: network, features=FEATURES),
        "from_functions": lambda network: Model.from_functions(network, network, features=FEATURES),
    }
    for wrong, make in constructors.items():
        if wrong != f"from_{name}":
            with pytest.raises(
                ValueError,
                match=rf"^Expected .*, got a \w+: it is of {IMPORTS.get(name, name)}, so use fedsim.Model.from_{name}\(",
            ):
                make(network)


def test_a_function_for_another_library_gets_a_note_about_the_constructors():
    nnx, nn = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox").nn
    pytest.importorskip("keras")
    of_nnx, of_equinox = lambda rngs: nnx.Linear(3, 2, rngs=rngs), lambda key: nn.Linear(3, 2, key=key)
    for constructor, make, given in [
        (Model.from_nnx, of_equinox, "an nnx.Rngs"),
        (Model.from_equinox, of_nnx, "a key"),
        (Model.from_keras, of_nnx, "no argument"),
    ]:
        with pytest.raises((TypeError, AttributeError, ValueError)) as error:
            constructor(make, features=FEATURES)
        name = constructor.__name__
        (note,) = (each for each in error.value.__notes__ if each.startswith("Model."))  # JAX adds one, too
        assert note.startswith(f"Model.{name} calls make with {given}. Networks of other libraries have Model.from_haiku(")
        assert f", Model.{name}" not in note and note.count("Model.from_") == 5


@pytest.mark.parametrize("name", ["nnx", "equinox"])
def test_a_network_that_is_already_made_is_refused(name):
    """Its parameters would be the same for every seed."""
    module = pytest.importorskip(IMPORTS[name])
    if name == "nnx":
        constructor, network = Model.from_nnx, module.Linear(2, 2, rngs=module.Rngs(0))
    else:
        constructor, network = Model.from_equinox, module.nn.Linear(2, 2, key=jax.random.key(0))
    with pytest.raises(ValueError, match="Expected make to be a function that makes a network of .*: give a function that"):
        constructor(network, features=FEATURES)


def test_equinox_modules_may_have_functions_that_their_constructor_makes():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        layer: eqx.nn.Linear
        table: jax.Array
        activation: object = eqx.field(static=True)

        def __init__(self, key):
            self.layer, self.table = eqx.nn.Linear(3, CLASSES, key=key), jnp.arange(CLASSES)[::-1]
            self.activation = lambda x: jax.nn.relu(x)  # another function in every module

        def __call__(self, x):
            return self.activation(self.layer(x))[self.table]

    model = Model.from_equinox(Net, features=FEATURES)
    one, other = (model.init(jax.random.key(seed)) for seed in (0, 1))
    mean = jax.tree.map(lambda a, b: (a + b) / 2, one, other)
    x = batch().examples["x"]
    expected = np.maximum(x @ mean.layer.weight.T + mean.layer.bias, 0)[:, ::-1]
    np.testing.assert_allclose(model.apply_for_eval(mean, {"x": x}), expected, rtol=1e-5, atol=1e-6)
    assert mean.table is None  # integers are no parameters


def test_losses_inside_a_keras_model_are_refused():
    keras = pytest.importorskip("keras")
    layer = lambda: keras.Sequential([keras.layers.Dense(2, kernel_regularizer="l2")])  # noqa: E731
    with pytest.raises(ValueError, match="without losses of its own, got 1, from regularizers"):
        Model.from_keras(layer, features=FEATURES)


@pytest.mark.parametrize(
    ("constructor", "module"),
    [("from_flax", "flax.linen"), ("from_nnx", "flax.nnx"), ("from_equinox", "equinox"), ("from_keras", "keras")],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(constructor, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=rf"Model.{constructor} needs {module}: pip install 'fedsim-jax\[{module.split('.')[0]}\]'"
    ):
        getattr(Model, constructor)(lambda *_: None, features=FEATURES)


@pytest.mark.parametrize("inputs", ["image", ("x", "z"), (), ["x"], 1])
def test_inputs_must_be_features(inputs):
    with pytest.raises(ValueError, match=r"of \['x', 'y'\], got inputs="):
        Model.from_functions(lambda key: {}, lambda params, x: x, features=FEATURES, inputs=inputs)
