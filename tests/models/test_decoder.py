"""Decoder-only transformers against outputs of the library ``transformers``, published sizes, and packed documents."""

import itertools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import fedsim
from fedsim import models, text

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "hf_tiny"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="reference files are absent: set FEDSIM_TEST_DATA to their folder")


def reference(name):
    """Returns the configuration, the arrays, and the reference's input ids, logits and loss."""
    config = json.loads((REAL / name / "config.json").read_text())
    with np.load(REAL / name / "oracle.npz") as oracle:
        return config, load_file(REAL / name / "model.safetensors"), dict(oracle)


def sequences(ids):
    return {"x": ids[:, :-1], "y": ids[:, 1:], "document": np.ones_like(ids[:, 1:])}


@pytest.mark.slow
@needs_real
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_logits_loss_and_gradients_are_those_of_the_reference(name):
    config, tensors, oracle = reference(name)
    params = models.decoder_params(config, tensors)
    whole = models.decoder_of(config, length=17)
    shapes = jax.eval_shape(whole.init, jax.random.key(0))
    assert jax.tree.map(np.shape, params) == jax.tree.map(jnp.shape, shapes)
    ids = oracle["input_ids"]
    logits = whole.apply_for_eval(params, {"x": ids, "document": np.ones_like(ids)})
    np.testing.assert_allclose(logits, oracle["logits"], atol=1e-4)
    model = models.decoder_of(config, length=16)
    batch = sequences(ids)

    def mean_loss(params):
        return jnp.mean(model.losses(batch, model.apply_for_eval(params, batch)))

    loss, gradient = jax.value_and_grad(mean_loss)(params)
    np.testing.assert_allclose(loss, oracle["loss"], rtol=1e-5)
    norms = json.loads((REAL / name / "gradient_norms.json").read_text())
    theirs = np.sqrt(sum(norm**2 for norm in norms.values()))
    np.testing.assert_allclose(np.sqrt(fedsim.tree.squared_norm(gradient)), theirs, rtol=1e-4)
    embedding = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    np.testing.assert_allclose(np.linalg.norm(gradient["embedding"]["embeddings"]), norms[embedding], rtol=1e-4)
    for layer in range(2):
        key = f"transformer.h.{layer}.mlp.c_fc.weight" if name == "gpt2" else f"model.layers.{layer}.mlp.up_proj.weight"
        np.testing.assert_allclose(np.linalg.norm(gradient["layers/up"]["w"][layer]), norms[key], rtol=1e-4)


def small(**options):
    return models.decoder(30, length=8, width=16, layers=2, heads=4, kv_heads=2, hidden=24, **options)


@pytest.mark.first(1)
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_tokens_see_their_own_document_only(positions):
    """The logits of packed documents are those of each document alone."""
    model = small(positions=positions)
    params = model.init(jax.random.key(0))
    documents = [[4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]
    packed = text.pack(documents, 8)
    assert packed["document"].tolist() == [[1, 1, 1, 2, 2, 3, 3, 3]]
    together = model.apply_for_eval(params, packed)[0]
    at = 0
    for document in documents:
        count = len(document) - 1
        alone = model.apply_for_eval(params, text.pack([document], 8))[0, :count]
        np.testing.assert_allclose(together[at : at + count], alone, atol=1e-5)
        at += count


def test_packing_keeps_every_pair_of_neighbours_once():
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 30, draw.integers(0, 12)).tolist() for _ in range(20)]
    packed = text.pack(documents, 7)
    counted = packed["document"] > 0
    pairs = list(zip(packed["x"][counted].tolist(), packed["y"][counted].tolist(), strict=True))
    assert pairs == [pair for document in documents for pair in itertools.pairwise(document)]
    # Tokens of different documents have different numbers, and those of one document in one sequence have the same.
    owner = [number for number, document in enumerate(documents) for _ in document[1:]]
    rows = np.pad(np.array(owner), (0, -len(owner) % 7), constant_values=-1).reshape(-1, 7)
    for own, found in zip(rows, packed["document"], strict=True):
        assert ((own[:, None] == own[None]) == (found[:, None] == found[None])).all() and found.min() >= 0


def test_perplexity_overall_and_per_client():
    model = small()
    draw = np.random.default_rng(1)
    clients = [text.pack([draw.integers(1, 30, 9 + client)], 8) for client in range(2)]
    columns = {name: np.concatenate([client[name] for client in clients]) for name in clients[0]}
    data = fedsim.FederatedData.from_arrays(columns, sizes=[len(client["x"]) for client in clients])
    params = model.init(jax.random.key(0))
    found = fedsim.evaluate(model, params, data, execution=fedsim.Jit())
    losses = []
    for client in clients:
        log = np.asarray(jax.nn.log_softmax(model.apply_for_eval(params, client)), np.float64)
        chosen = np.take_along_axis(log, client["y"][..., None], 2)[..., 0]
        losses.append(-chosen[client["document"] > 0])
    np.testing.assert_allclose(found.overall["perplexity"], np.exp(np.concatenate(losses).mean()), rtol=1e-5)
    np.testing.assert_allclose(found.clients["perplexity"].result(), [np.exp(own.mean()) for own in losses], rtol=1e-5)


@pytest.mark.slow
def test_a_round_of_a_divided_model_is_that_of_one_device():
    model = small(tied=True)
    draw = np.random.default_rng(2)
    columns = text.pack([draw.integers(1, 30, 60)], 8)
    data = fedsim.FederatedData.from_arrays(columns, sizes=[3, 1, 4])
    found = []
    for execution in (fedsim.Jit(), fedsim.Sharded(clients=2, model=2), fedsim.Sharded(clients=1, model=2, data=2)):
        algorithm = fedsim.algorithms.FedAvg(
            model=model, client_optimizer=optax.sgd(0.5, momentum=0.9), batches=fedsim.Batches(size=2), execution=execution
        )
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, data.client_ids))
        found.append(jax.device_get(state.params))
    for other in found[1:]:
        for ours, theirs in zip(jax.tree.leaves(found[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)


GPT2 = {"model_type": "gpt2", "vocab_size": 30, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
GPT2 |= {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
LLAMA = {"model_type": "llama", "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"intermediate_size": 24, "rms_norm_eps": 1e-6, "max_position_embeddings": 8}


def test_configurations_without_entries_that_have_defaults():
    """GPT-2's published ones have no n_inner, and those of the first Llama no num_key_value_heads."""
    gpt2, llama = (jax.eval_shape(models.decoder_of(each, length=8).init, jax.random.key(0)) for each in (GPT2, LLAMA))
    assert gpt2["layers/up"]["w"].shape == (2, 16, 64) and llama["layers/key"]["w"].shape == (2, 16, 16)


def test_names_of_gpt2_may_have_a_prefix():
    """The published files have none."""
    draw = np.random.default_rng(0)
    shapes = {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16), "mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16)}
    tensors = {name: draw.normal(size=shape) for name, shape in {"wte.weight": (30, 16), "wpe.weight": (8, 16)}.items()}
    names = ["ln_f", *(f"h.{layer}.{name}" for layer in range(2) for name in (*shapes, "ln_1", "ln_2"))]
    for name in names:
        shape = shapes.get(name.split(".", 2)[-1], (16,))
        tensors |= {f"{name}.weight": draw.normal(size=shape), f"{name}.bias": draw.normal(size=shape[-1])}
    params = models.decoder_params(GPT2, tensors)
    form = jax.eval_shape(models.decoder_of(GPT2, length=8).init, jax.random.key(0))
    assert jax.tree.map(np.shape, params) == jax.tree.map(jnp.shape, form)
    prefixed = models.decoder_params(GPT2, {f"transformer.{name}": array for name, array in tensors.items()})
    jax.tree.map(np.testing.assert_array_equal, prefixed, params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(head_size=3), "even sizes, got heads=4, kv_heads=2, width=16, head_size=3"),
        (lambda: models.decoder(9, length=8, width=16, layers=1, heads=3, hidden=8), "heads=3, kv_heads=None, width=16"),
        (lambda: models.decoder_of({"model_type": "bert"}, length=8), "got model_type='bert'"),
        (lambda: models.decoder_of({"model_type": "llama", "attention_bias": True}, length=8), "got attention_bias=True"),
        (lambda: models.decoder_of(LLAMA, length=9), "Expected 1 <= length <= 8, got length=9: use sequences"),
        (lambda: models.decoder_of(LLAMA | {"model_type": "qwen3"}, length=9), "Expected 1 <= length <= 8, got length=9"),
        (lambda: models.decoder_of(GPT2, length=9), "Expected num_positions >= 9, or None, got num_positions=8"),
        (lambda: models.decoder_of(GPT2 | {"tie_word_embeddings": False}, length=8), "got tie_word_embeddings=False"),
        (lambda: models.decoder_of(GPT2 | {"scale_attn_weights": False}, length=8), "got scale_attn_weights=False"),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
