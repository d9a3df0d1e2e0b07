"""Decoder-only transformers, with the parts of Llama, Qwen3 and GPT-2, as large as language models are.

Llama: H. Touvron et al. (2023), https://arxiv.org/abs/2302.13971: rotary positions (J. Su et al., 2021), root-mean-square
normalization before each part (B. Zhang and R. Sennrich, 2019), SwiGLU (N. Shazeer, 2020) and grouped-query attention (J.
Ainslie et al., 2023). Qwen3 (2025) normalizes queries and keys, too. GPT-2: A. Radford et al. (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fedsim import checks, metrics
from fedsim.metrics import Examples, token_losses
from fedsim.model import Model


def decoder(
    vocabulary: int,
    *,
    length: int,
    width: int,
    layers: int,
    heads: int,
    hidden: int,
    kv_heads: int | None = None,
    head_size: int | None = None,
    positions: Literal["rotary", "learned"] = "rotary",
    num_positions: int | None = None,
    theta: float = 10_000.0,
    norm: Literal["rms", "layer"] = "rms",
    epsilon: float = 1e-6,
    gated: bool = True,
    bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    remat: bool = True,
) -> Model:
    """A decoder-only transformer over tokens. Its layers are one loop, whose parameters are stacked: ``[layers, ...]``.

    Features are those of `fedsim.text.pack`: ``x``, ``y`` and ``document``, ``int32 [length]`` each. A token attends to itself
    and to the tokens before it in its document. ``document`` is 0 where there is no token; such positions do not count.

    The loss of a sequence is the sum over its tokens, divided by ``length``, so that all tokens have the same weight. The
    metrics are means over tokens: ``loss``, ``perplexity`` (its exponential) and ``accuracy``.

    `fedsim.Sharded` divides it by heads, by hidden units and by the vocabulary: tensor parallelism (M. Shoeybi et al., 2019).

    Args:
      vocabulary: the number of ids.
      length: the length of sequences.
      width: the width of the embedding.
      layers: the number of layers.
      heads: the number of query heads.
      hidden: the number of hidden units between attention layers.
      kv_heads: the number of heads of keys and values, which groups of queries share; None: as many as ``heads``.
      head_size: the width of a head; None: ``width / heads``.
      positions: ``"rotary"`` rotates queries and keys; ``"learned"`` adds a vector for each position.
      num_positions: the number of learned vectors, at least ``length``; None: ``length``.
      theta: the base of the rotary wavelengths.
      norm: ``"rms"`` or ``"layer"``, which has an offset, too.
      epsilon: that of the normalizations.
      gated: SwiGLU with three matrices; else GELU (tanh) with two.
      bias: whether linear layers have one.
      qk_norm: whether queries and keys are normalized.
      tied: whether the output layer has the weights of the embedding.
      remat: whether the gradient computes what is inside of a layer again, and only the inputs of layers are stored.

    Raises:
      ValueError: a size is not positive, or does not fit another one.

    >>> model = decoder(512, length=16, width=64, layers=2, heads=8, kv_heads=2, hidden=160)
    >>> params = jax.eval_shape(model.init, jax.random.key(0))
    >>> params["layers/key"]["w"].shape, sum(leaf.size for leaf in jax.tree.leaves(params))
    ((2, 64, 16), 147776)
    """
    checks.whole(1, vocabulary=vocabulary, length=length, width=width, layers=layers, heads=heads, hidden=hidden)
    checks.whole(1, or_none=True, kv_heads=kv_heads, head_size=head_size, remedy="None takes the usual one")
    checks.one_of("rotary", "learned", positions=positions)
    checks.whole(length, or_none=True, num_positions=num_positions, remedy="None takes length")
    checks.one_of("rms", "layer", norm=norm)
    checks.number(above=0, theta=theta, epsilon=epsilon)
    checks.truth(gated=gated, bias=bias, qk_norm=qk_norm, tied=tied, remat=remat)
    groups, size = kv_heads or heads, head_size or width // heads
    if heads % groups or (head_size is None and width % heads) or (positions == "rotary" and size % 2):
        raise ValueError(
            f"Expected heads to be a multiple of kv_heads and to divide width into even sizes, got heads={heads}, "
            f"kv_heads={kv_heads}, width={width}, head_size={head_size}: use 16, 4 and 1024, for example."
        )
    initial = hk.initializers.TruncatedNormal(0.02)
    into_sum = hk.initializers.TruncatedNormal(0.02 / float(np.sqrt(2 * layers)))  # Each layer adds two terms to a sum.

    def linear(x: jax.Array, width: int, name: str, w_init: Any = initial, bias: bool = bias) -> jax.Array:
        return hk.Linear(width, with_bias=bias, w_init=w_init, name=name)(x)

    def normalized(x: jax.Array, name: str) -> jax.Array:
        if norm == "rms":
            return hk.RMSNorm(-1, eps=epsilon, name=name)(x)
        return hk.LayerNorm(-1, create_scale=True, create_offset=True, eps=epsilon, name=name)(x)

    def attention(x: jax.Array, place: jax.Array, mask: jax.Array) -> jax.Array:
        n, length, _ = x.shape
        query = linear(x, heads * size, "query").reshape(n, length, heads, size)
        key, value = (linear(x, groups * size, name).reshape(n, length, groups, size) for name in ("key", "value"))
        if qk_norm:
            query, key = normalized(query, "query_norm"), normalized(key, "key_norm")
        if positions == "rotary":
            query, key = rotated(query, place, theta), rotated(key, place, theta)
        attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
        return linear(attended.reshape(n, length, heads * size), x.shape[-1], "output", into_sum)

    def feedforward(x: jax.Array) -> jax.Array:
        up = linear(x, hidden, "up")
        active = jax.nn.silu(linear(x, hidden, "gate")) * up if gated else jax.nn.gelu(up, approximate=True)
        return linear(active, x.shape[-1], "down", into_sum)

    def network(examples: Examples) -> jax.Array:
        tokens, document = examples["x"].astype(jnp.int32), examples["document"].astype(jnp.int32)
        place = places(document)
        earlier = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
        mask = (earlier & (document[:, :, None] == document[:, None, :]))[:, None]

        def layer(x: jax.Array) -> jax.Array:
            x = x + attention(normalized(x, "attention_norm"), place, mask)
            return x + feedforward(normalized(x, "feedforward_norm"))

        embed = hk.Embed(vocabulary, width, w_init=initial, name="embedding")
        x = embed(tokens)
        if positions == "learned":
            x = x + hk.Embed(num_positions or length, width, w_init=initial, name="positions")(place)
        x = hk.layer_stack(layers, name="layers")(hk.remat(layer) if remat else layer)(x)
        x = normalized(x, "norm")
        return x @ embed.embeddings.T if tied else linear(x, vocabulary, "logits", bias=False)

    tokens = jax.ShapeDtypeStruct((length,), jnp.int32)

    def loss(examples: Examples, outputs: jax.Array) -> jax.Array:
        losses = token_losses(examples["y"].astype(jnp.int32), outputs)
        return jnp.sum(jnp.where(examples["document"] > 0, losses, 0.0), axis=1) / length

    model = Model.from_haiku(
        hk.transform(network),
        features={"x": tokens, "y": tokens, "document": tokens},
        loss=loss,
        metrics={
            "loss": metrics.TokenCrossEntropy(masked_labels=(), counted_where="document"),
            "perplexity": metrics.Perplexity(masked_labels=(), counted_where="document"),
            "accuracy": metrics.TokenAccuracy(masked_labels=(), counted_where="document"),
        },
        num_classes=vocabulary,
    )
    return model.with_shardings(_shardings(gated, bias, tied))


def rotated(x: jax.Array, place: jax.Array, theta: float) -> jax.Array:
    """Rotates the pairs (i, i + size / 2) of each head by its place times ``theta ** (-2 i / size)``.

    Args:
      x: ``[n, length, heads, size]``.
      place: ``int32 [n, length]``.
      theta: the base of the wavelengths.

    >>> rotated(jnp.ones([1, 2, 1, 2]), jnp.array([[0, 1]]), 1e4)[0, :, 0].tolist()[0]  # by 0, and the second by 1 radian
    [1.0, 1.0]
    """
    half = x.shape[-1] // 2
    frequency = jnp.asarray(theta ** (-np.arange(half) / half), jnp.float32)
    angle = place[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def places(document: jax.Array) -> jax.Array:
    """Returns the place of each token in its document, from 0, ``int32 [n, length]``.

    >>> places(jnp.array([[1, 1, 2, 2, 2, 0]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    at = jnp.arange(document.shape[1], dtype=jnp.int32)[None]
    begins = jnp.concatenate([jnp.ones_like(document[:, :1], bool), document[:, 1:] != document[:, :-1]], axis=1)
    return at - jax.lax.cummax(jnp.where(begins, at, 0), axis=1)


def _shardings(gated: bool, bias: bool, tied: bool) -> dict[str, P]:
    """Returns how the parameters are divided: by heads, by hidden units and by the vocabulary."""
    into, out = ["query", "key", "value", "up", *["gate"] * gated], ["output", "down"]
    rule = {f"layers/{name}/w": P(None, None, "model") for name in into}
    rule |= {f"layers/{name}/b": P(None, "model") for name in into if bias}
    rule |= {f"layers/{name}/w": P(None, "model", None) for name in out}
    return rule | {"embedding/embeddings": P("model", None)} | ({} if tied else {"logits/w": P(None, "model")})


def lm_tiny(vocabulary: int = 512, *, length: int = 64, **options: Any) -> Model:
    """A `decoder` of 803,968 parameters, which trains on a CPU. Arguments and errors are those of `decoder`.

    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lm_tiny().init, jax.random.key(0))))
    803968
    """
    sizes = dict(width=128, layers=4, heads=4, kv_heads=2, hidden=352, tied=True)
    return decoder(vocabulary, length=length, **sizes | options)


def lm_350m(vocabulary: int = 32_000, *, length: int = 1024, **options: Any) -> Model:
    """A `decoder` of 341,099,520 parameters. Arguments and errors are those of `decoder`.

    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lm_350m().init, jax.random.key(0))))
    341099520
    """
    sizes = dict(width=1024, layers=24, heads=16, hidden=2816, tied=True)
    return decoder(vocabulary, length=length, **sizes | options)


def lm_1b(vocabulary: int = 128_256, *, length: int = 1024, **options: Any) -> Model:
    """A `decoder` with the sizes of Llama 3.2 1B: 1,235,814,400 parameters.

    Arguments and errors are those of `decoder`.

    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lm_1b().init, jax.random.key(0))))
    1235814400
    """
    sizes = dict(width=2048, layers=16, heads=32, kv_heads=8, hidden=8192, theta=500_000.0, epsilon=1e-5, tied=True)
    return decoder(vocabulary, length=length, **sizes | options)


def lm_8b(vocabulary: int = 128_256, *, length: int = 1024, **options: Any) -> Model:
    """A `decoder` with the sizes of Llama 3 8B: 8,030,261,248 parameters.

    Arguments and errors are those of `decoder`.

    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lm_8b().init, jax.random.key(0))))
    8030261248
    """
    sizes = dict(width=4096, layers=32, heads=32, kv_heads=8, hidden=14_336, theta=500_000.0, epsilon=1e-5)
    return decoder(vocabulary, length=length, **sizes | options)


def decoder_of(config: Mapping[str, Any], *, length: int, remat: bool = True) -> Model:
    """Returns the `decoder` that a ``config.json`` of the library ``transformers`` describes.

    Args:
      config: its entries; ``model_type`` is ``"llama"``, ``"qwen3"`` or ``"gpt2"``.
      length: the length of sequences.
      remat: see `decoder`.

    Raises:
      ValueError: it describes something else, such as scaled rotary positions, or has fewer positions than ``length``.

    >>> config = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
    ...           "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(decoder_of(config, length=128).init, jax.random.key(0))))
    141056
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        computed = dict(scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True, tie_word_embeddings=True)
        _expect(config, activation_function="gelu_new", **computed)
        return decoder(
            config["vocab_size"], length=length, width=config["n_embd"], layers=config["n_layer"], heads=config["n_head"],
            hidden=config.get("n_inner") or 4 * config["n_embd"], positions="learned",
            num_positions=config["n_positions"], norm="layer",
            epsilon=config["layer_norm_epsilon"], gated=False, bias=True, tied=True, remat=remat,
        )  # fmt: skip
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"Expected a model_type of 'llama', 'qwen3' or 'gpt2', got model_type={kind!r}: use one of these.")
    _expect(config, hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False, rope_scaling=None)
    rotary = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    _expect(rotary, rope_type="default")
    if (most := config.get("max_position_embeddings")) is not None:
        checks.whole(1, most, length=length, remedy="use sequences that are not longer than max_position_embeddings")
    return decoder(
        config["vocab_size"], length=length, width=config["hidden_size"], layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"], kv_heads=config.get("num_key_value_heads"), head_size=config.get("head_dim"),
        hidden=config["intermediate_size"], theta=rotary["rope_theta"], epsilon=config["rms_norm_eps"],
        qk_norm=kind == "qwen3", tied=config.get("tie_word_embeddings", False), remat=remat,
    )  # fmt: skip


def _expect(config: Mapping[str, Any], **values: Any) -> None:
    for name, value in values.items():
        if config.get(name, value) != value:
            raise ValueError(f"Expected a configuration with {name}={value!r}, got {name}={config[name]!r}: use another model.")


def decoder_params(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """Returns the parameters of `decoder_of` from arrays with the names that the library ``transformers`` gives them.

    Args:
      config: see `decoder_of`.
      tensors: the arrays of a checkpoint by name, such as ``"model.layers.0.self_attn.q_proj.weight"``. Names of GPT-2 may
        begin with ``"transformer."``; those of the published files do not.

    Raises:
      KeyError: an array is missing.

    >>> config = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True}
    >>> shapes = {f"self_attn.{name}_proj": (4, 4) for name in "qkvo"}
    >>> shapes |= {"input_layernorm": (4,), "post_attention_layernorm": (4,)}
    >>> shapes |= {"mlp.gate_proj": (6, 4), "mlp.up_proj": (6, 4), "mlp.down_proj": (4, 6)}
    >>> tensors = {f"model.layers.0.{name}.weight": np.zeros(shape) for name, shape in shapes.items()}
    >>> tensors |= {"model.embed_tokens.weight": np.zeros((9, 4)), "model.norm.weight": np.zeros(4)}
    >>> decoder_params(config, tensors)["layers/down"]["w"].shape  # [layers, inputs, outputs]
    (1, 6, 4)
    """
    read = {name: np.asarray(value) for name, value in tensors.items()}
    if config["model_type"] == "gpt2":
        return _params_of_gpt2(config["n_layer"], {name.removeprefix("transformer."): array for name, array in read.items()})
    layers = range(config["num_hidden_layers"])

    def stacked(name: str) -> np.ndarray:
        return np.stack([read[f"model.layers.{layer}.{name}.weight"] for layer in layers])

    linear = {name: f"self_attn.{name[0]}_proj" for name in ("query", "key", "value", "output")}
    linear |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    scales = {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}
    if config["model_type"] == "qwen3":
        scales |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    params = {f"layers/{name}": {"w": stacked(theirs).swapaxes(1, 2)} for name, theirs in linear.items()}
    params |= {f"layers/{name}": {"scale": stacked(theirs)} for name, theirs in scales.items()}
    params |= {"embedding": {"embeddings": read["model.embed_tokens.weight"]}, "norm": {"scale": read["model.norm.weight"]}}
    if not config.get("tie_word_embeddings", False):
        params["logits"] = {"w": read["lm_head.weight"].T}
    return params


def _params_of_gpt2(layers: int, read: Mapping[str, np.ndarray]) -> Any:
    def stacked(name: str) -> np.ndarray:
        return np.stack([read[f"h.{layer}.{name}"] for layer in range(layers)])

    def norm(of: Any, name: str) -> dict[str, np.ndarray]:
        return {"scale": of(f"{name}.weight"), "offset": of(f"{name}.bias")}

    # Their linear layers are [inputs, outputs], and one has queries, keys and values.
    fused = [np.split(stacked(f"attn.c_attn.{part}"), 3, axis=-1) for part in ("weight", "bias")]
    params = {f"layers/{name}": {"w": w, "b": b} for name, w, b in zip(("query", "key", "value"), *fused, strict=True)}
    for name, theirs in (("output", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
        params[f"layers/{name}"] = {"w": stacked(f"{theirs}.weight"), "b": stacked(f"{theirs}.bias")}
    params |= {"layers/attention_norm": norm(stacked, "ln_1"), "layers/feedforward_norm": norm(stacked, "ln_2")}
    params["norm"] = norm(read.__getitem__, "ln_f")
    return params | {"embedding": {"embeddings": read["wte.weight"]}, "positions": {"embeddings": read["wpe.weight"]}}
