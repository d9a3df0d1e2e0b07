"""Models that start from given parameters: of files, of other runs, under other names, and with parts."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy

import fedsim
from fedsim.experiment._checkpoint import to_leaves
from fedsim.saved_arrays import write_arrays

DENSE = {"linear/w": (64, 128), "linear/b": (128,), "linear_1/w": (128, 64), "linear_1/b": (64,), "linear_2/w": (64, 10)}
DENSE["linear_2/b"] = (10,)


def dense():
    return fedsim.models.digits_dense()


@pytest.fixture(scope="module")
def arrays():
    draw = np.random.default_rng(0)
    return {name: draw.normal(0, 0.05, shape).astype(np.float32) for name, shape in DENSE.items()}


def flat(params):
    return {f"{module}/{name}": np.asarray(x) for module, of in params.items() for name, x in of.items() if x is not None}


def assert_equal(params, expected):
    params = flat(params)
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(params[name], value, err_msg=name)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_files_are_read(arrays, tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    np.savez(path, **arrays) if kind == "npz" else safetensors.numpy.save_file(arrays, path)
    model = dense().starting_from(fedsim.read_params(path))
    assert_equal(model.init(jax.random.key(3)), arrays)
    assert fedsim.transfer.module_names(model) == fedsim.transfer.module_names(dense())


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_files_have_the_shapes_of_the_parameters(tmp_path, suffix):
    """A scalar, and an array whose rows are not adjacent in memory."""
    params = {"scale": jnp.float32(2), "w": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    fedsim.write_params(tmp_path / f"a.{suffix}", params)
    read = fedsim.read_params(tmp_path / f"a.{suffix}")
    assert {name: array.shape for name, array in read.items()} == {"scale": (), "w": (3, 2)}
    assert read["scale"] == 2 and read["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_parameters_that_are_one_array_are_read_from_a_run(tmp_path):
    features = {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.float32)}
    model = fedsim.Model.from_functions(
        lambda key: jax.random.normal(key, (2,)), lambda w, x: x @ w, features=features, loss=fedsim.metrics.squared_error
    )
    state = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2)).init(
        jax.random.key(0)
    )
    write_arrays(tmp_path / "state", to_leaves(state))
    start = model.starting_from(fedsim.read_params(tmp_path / "state"))
    np.testing.assert_array_equal(start.init(jax.random.key(1)), state.params)


def test_half_precision_of_a_file_is_read_exactly(arrays, tmp_path):
    half = {name: value.astype(ml_dtypes.bfloat16) for name, value in arrays.items()}
    half["linear/b"] = arrays["linear/b"].astype(np.float16)
    safetensors.numpy.save_file(half, tmp_path / "half.safetensors")
    read = fedsim.read_params(tmp_path / "half.safetensors")
    assert {name: x.dtype for name, x in read.items()} == {name: x.dtype for name, x in half.items()}
    start = dense().starting_from(read).init(jax.random.key(0))
    assert_equal(start, {name: x.astype(np.float32) for name, x in half.items()})
    assert {x.dtype for x in jax.tree.leaves(start)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("linear_2/b"), r"linear_2/b: there is none, the model has float32 \[10\]"),
        (lambda a: a.update({"head/w": np.ones((3, 4))}), r"head/w: float64 \[3, 4\], the model has no such parameter"),
        (lambda a: a.update({"linear/b": np.ones(5)}), r"linear/b: float64 \[5\], the model has float32 \[128\]"),
        (lambda a: a.update({"linear/b": np.ones(128, int)}), r"linear/b: int64 \[128\], the model has float32 \[128\]"),
        (lambda a: a.update({"linear/b": np.full(128, 1e300)}), "NaN or an infinity in linear/b, whose dtype is float64"),
    ],
)
def test_what_does_not_fit_is_refused(arrays, change, message):
    changed = dict(arrays)
    change(changed)
    with pytest.raises(ValueError, match=message):
        dense().starting_from(changed)


def test_arrays_of_other_names_and_a_part_of_them(arrays):
    other = {name.replace("linear", "body/dense"): value for name, value in arrays.items()}
    assert_equal(dense().starting_from(other, names={"body/dense*": "linear*"}).init(jax.random.key(0)), arrays)
    names = {"body/dense_2/*": "", "body/dense*": "linear*"}
    with pytest.raises(ValueError, match="linear_2/w: there is none"):
        dense().starting_from(other, names=names)
    with pytest.warns(UserWarning, match=r"keep their initial values: linear_2/b, linear_2/w\. Arrays that are left out: none"):
        start = dense().starting_from(other, names=names, partly=True).init(jax.random.key(5))
    head = {name: value for name, value in flat(dense().init(jax.random.key(5))).items() if "linear_2" in name}
    assert_equal(start, arrays | head)
    with pytest.raises(ValueError, match=r"different new names, got 'linear/w' for .* leave one out"):
        dense().starting_from(arrays, names={"linear_1/w": "linear/w"})
    with pytest.raises(ValueError, match=r"at most one \*"):
        dense().starting_from(arrays, names={"*/*": "*/*"})
    with pytest.raises(ValueError, match="got none of them"):
        dense().starting_from({"a": np.ones(1)}, partly=True)


def test_the_head_of_a_pretrained_model_is_trained_alone(arrays):
    """The order of `starting_from` and `with_parts` makes no difference, and the bodies stay as they were in the file."""
    data = fedsim.datasets.load("digits", clients=4).train
    body = ["linear/*", "linear_1/*"]
    results = []
    for model in (dense().starting_from(arrays).with_parts(frozen=body), dense().with_parts(frozen=body).starting_from(arrays)):
        algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=50))
        state = algorithm.init(jax.random.key(0))
        assert_equal(state.params, arrays)
        state, _ = algorithm.apply(state, fedsim.UniformSampler(data, clients=2, seed=0).cohort(0))
        results.append(flat(state.params))
        assert all((results[-1][name] == arrays[name]).all() == ("linear_2" not in name) for name in arrays)
        assert_equal(algorithm.init(jax.random.key(1)).params, arrays)  # donated buffers were copies
    np.testing.assert_array_equal(results[0]["linear_2/w"], results[1]["linear_2/w"])


def test_running_statistics_are_taken_from_the_file():
    model = fedsim.models.resnet8(norm="batch")
    whole = jax.tree.map(lambda x: x + 0.5, model.init_whole(jax.random.key(0)))
    start = model.starting_from(whole)
    jax.tree.map(np.testing.assert_array_equal, start.init_whole(jax.random.key(1)), whole)
    assert float(start.init_parts(jax.random.key(2)).statistics["batch_norm"]["mean"][0]) == 0.5


@pytest.mark.parametrize("parts", [{}, {"frozen": "linear/*", "kept": "linear_2/*"}])
def test_given_values_are_no_constants_of_the_rounds(arrays, parts):
    cohort = fedsim.UniformSampler(fedsim.datasets.load("digits", clients=4).train, clients=2, seed=0).cohort(0)
    texts = []
    for model in (dense(), dense().starting_from(arrays)):
        algorithm = fedsim.algorithms.FedAvg(
            model=model.with_parts(**parts),
            client_optimizer=optax.sgd(0.1),
            batches=fedsim.Batches(size=50),
            execution=fedsim.Jit(),
        )
        texts.append(algorithm.execution.lower(algorithm, cohort).as_text())
    assert texts[0] == texts[1]
