"""`Model`: the functions of a neural network that algorithms call, made from a network of one of several libraries."""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Required, Self, TypedDict, Unpack

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng
from fedsim import metrics as metrics_lib
from fedsim.model import _haiku, _precision
from fedsim.model._initial import fitted, init_with, renamed
from fedsim.model._network import Call, Examples, Feature, Network, Params, accepted, zeros
from fedsim.model._parts import PARTS_IN_WORDS, ModelParts, Names, assigned, divide, named, scope_of
from fedsim.model._shardings import Division, Shardings, division_of

if TYPE_CHECKING:
    from fedsim.data import Batch, Batches, FederatedData


class Options(TypedDict, total=False):
    """The arguments that the constructors of `Model` have in common, described in `Model.from_haiku`."""

    features: Required[Mapping[str, Feature]]
    inputs: str | tuple[str, ...] | None
    train_kwargs: Mapping[str, Any] | None
    eval_kwargs: Mapping[str, Any] | None
    loss: Callable[[Examples, Any], jax.Array]
    metrics: Mapping[str, metrics_lib.Metric] | None
    num_classes: int | None
    statistics: Literal["average", "client", "frozen"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A neural network as pure functions of parameters and examples. Models are compared by identity.

    ``examples`` is a dict of arrays whose first axis is the example, for instance
    ``{"x": uint8 [n, 28, 28, 1], "y": int32 [n]}``.

    Attributes:
      init: ``key -> params``.
      apply_for_train: ``(params, examples, key) -> outputs``; the key is for dropout and other random draws.
      apply_for_eval: ``(params, examples) -> outputs``; deterministic.
      loss: ``(examples, outputs) -> float32 [n]``, one loss per example.
      metrics: the metrics of an evaluation by name: functions ``(examples, outputs)`` that return one number per example,
        ``[n]``, or another statistic of `fedsim.metrics`. A model's own do not change, because they are compiled:
        ``dataclasses.replace(model, metrics={**model.metrics, "f1": fedsim.metrics.F1()})`` is a model with one more.
      features: the features that the model reads, by name: the ``jax.ShapeDtypeStruct`` of one example, or a tuple of them if
        the model accepts several dtypes.
      num_classes: labels ``examples["y"]`` must be in ``[0, num_classes)``. None checks them only if the loss is the
        cross-entropy, by the number of logits.
      init_parts: ``key -> ModelParts`` if the model has other parts than the parameters of algorithms, which ``init`` returns:
        running statistics, or what `with_parts` has taken out. None if it has none.
      shardings: how the parameters are divided over devices, see `with_shardings`.
      network, roles: the functions of the whole network, and which part each leaf belongs to, if there are such parts.

    >>> model = Model.from_haiku(
    ...     hk.transform(lambda examples: hk.Linear(3)(examples["x"])),
    ...     features={"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)},
    ...     num_classes=3)
    >>> params = model.init(jax.random.key(0))
    >>> model.apply_for_eval(params, {"x": jnp.ones([5, 2])}).shape
    (5, 3)
    """

    init: Callable[[jax.Array], Params]
    apply_for_train: Callable[[Params, Examples, jax.Array], Any]
    apply_for_eval: Callable[[Params, Examples], Any]
    loss: Callable[[Examples, Any], jax.Array]
    metrics: Mapping[str, metrics_lib.Metric]
    features: Mapping[str, Feature]
    num_classes: int | None = None
    init_parts: Callable[[jax.Array], ModelParts] | None = None
    shardings: Shardings | None = None
    network: Network | None = dataclasses.field(default=None, repr=False)
    roles: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", types.MappingProxyType(dict(self.metrics)))

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and pickled. Compiled programs are left out."""
        fields = {name: value for name, value in vars(self).items() if name != "_execution"}
        return {**fields, "metrics": dict(self.metrics)}  # A mapping that does not change cannot be pickled.

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Model.__post_init__(self)

    @classmethod
    def from_haiku(cls, transformed: hk.Transformed, **options: Unpack[Options]) -> Model:
        """Returns a model from a Haiku transform.

        Parameters are drawn by one compiled program, so initializers must draw with JAX. An initializer that draws with NumPy
        draws once, and gives the same parameters for every key.

        Args:
          transformed: the result of ``hk.transform`` for a function of ``examples`` and of keyword arguments.
          features: see the attributes.
          inputs: what the function gets. None, the default, is the dict of all features, ``examples``. The name of a feature is
            its array alone, and a tuple of names is one positional argument for each.
          train_kwargs: keyword arguments of the function in training, and when parameters are drawn.
          eval_kwargs: keyword arguments of the function in evaluation.
          loss: see the attributes. The default is the cross-entropy of logits ``[n, num_classes]``.
          metrics: see the attributes. The default is "loss", and with the default loss also "accuracy".
          num_classes: see the attributes.
          statistics: for a network with state (``hk.transform_with_state``), such as the running statistics of
            `fedsim.models.BatchNorm`. With ``"average"``, clients receive them, change them in their local steps, and send the
            change; the server takes the mean with the clients' weights. With ``"client"``, every client keeps its own, and with
            ``"frozen"`` they stay as they were initialized, and normalizations use them in training, too:
            `fedsim.models.BatchNorm`, ``BatchNorm`` of Linen, NNX and Equinox, and Keras's ``BatchNormalization``.

        Raises:
          ValueError: ``transformed`` is not the result of ``hk.transform`` or ``hk.transform_with_state``, but for example of
            another library, whose constructor the message names; its state has other numbers than floats, or a variable with
            the name of a parameter; or it has no state and ``statistics`` is given.
        """
        options.setdefault("inputs", None)
        return cls._of(functools.partial(_haiku.network, transformed), **options)

    @classmethod
    def from_flax(cls, module: Any, **options: Unpack[Options]) -> Model:
        """Returns a model from a module of Flax Linen. It needs the extra ``flax``.

        Parameters are the collection "params", a nested dict with the names of the modules, and all other collections, such as
        "batch_stats", are running statistics. Every stream of random numbers, such as "dropout", draws from the key of the
        step. There is none in evaluation. If a module with statistics has an argument ``mask``, it gets which rows of the batch
        are real in training, ``bool [n]``.

        Args:
          module: an instance of ``flax.linen.Module``.
          **options: those of `from_haiku`. The default of ``inputs`` is ``"x"``.

        Raises:
          ImportError: flax is not installed.
          ValueError: ``module`` is no instance of ``flax.linen.Module``, or it has state other than floats, or with the name of
            a parameter, which the message names.

        >>> import flax.linen as nn
        >>> spec = {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
        >>> model = Model.from_flax(nn.Dense(3), features=spec)
        >>> jax.tree.map(jnp.shape, model.init(jax.random.key(0)))
        {'bias': (3,), 'kernel': (2, 3)}
        """
        from fedsim.model import _linen

        return cls._of(functools.partial(_linen.network, module), **options)

    @classmethod
    def from_nnx(cls, make: Callable[[Any], Any], **options: Unpack[Options]) -> Model:
        """Returns a model from modules of Flax NNX. It needs the extra ``flax``.

        Parameters are the values of ``nnx.Param``, a nested dict with the names of the attributes;
        ``nnx.update(module, params)`` writes them into a module. Random streams of the module draw from the key of the step. If
        its ``__call__`` has an argument ``rngs``, it gets an ``nnx.Rngs`` of this key in training. ``module.train()`` and
        ``module.eval()`` are called before training and evaluation. All other variables, such as ``nnx.BatchStat``, are running
        statistics. If a module with statistics has an argument ``mask``, it gets which rows of the batch are real in training,
        ``bool [n]``.

        Args:
          make: ``rngs -> module``, for an ``nnx.Rngs``, such as the class of the module.
          **options: see `from_flax`.

        Raises:
          ImportError: flax is not installed.
          ValueError: ``make`` does not make an ``nnx.Module``, or this has state other than floats, which the message names.

        >>> from flax import nnx
        >>> spec = {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
        >>> model = Model.from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs), features=spec)
        >>> jax.tree.map(jnp.shape, model.init(jax.random.key(0)))
        {'bias': (3,), 'kernel': (2, 3)}
        """
        from fedsim.model import _nnx

        return cls._of(functools.partial(_nnx.network, make), **options)

    @classmethod
    def from_equinox(cls, make: Callable[[jax.Array], Any], *, axis_name: str = "batch", **options: Unpack[Options]) -> Model:
        """Returns a model from modules of Equinox. It needs the extra ``equinox``.

        As usual in Equinox, a module is a function of one example, which is mapped over the batch by ``jax.vmap``. Parameters
        are the module with its arrays of floats, and None for everything else; ``eqx.combine(params, make(key))`` is a module
        with these parameters. If the module has an argument ``key``, it gets a key for each example in training. In evaluation
        ``eqx.nn.inference_mode`` switches dropout off. Layers that are made with ``inference=True`` stay so in training.

        A module with state is called with the inputs of one example and the state, and returns the outputs and the new state.
        Its running statistics are in the module of parameters, in the fields ``init`` of its ``eqx.nn.StateIndex``. That of
        ``batch_counter`` of ``eqx.nn.BatchNorm(mode="batch")`` is ``1 - momentum ** count``, ``float32 []``, and the averages
        of the batches are ``batch_state_index`` divided by it.

        Args:
          make: ``key -> module``, or ``key -> (module, state)`` as ``eqx.nn.make_with_state`` returns them.
          axis_name: of the batch in ``jax.vmap``, the one that ``eqx.nn.BatchNorm`` was given.
          **options: see `from_flax`.

        Raises:
          ImportError: equinox is not installed.
          ValueError: ``make`` does not make an ``eqx.Module``, this has state other than floats, such as that of
            ``eqx.nn.BatchNorm(mode="ema")``, which the message names, its state is missing, or its ``eqx.nn.BatchNorm`` has
            another axis name.

        >>> import equinox as eqx
        >>> spec = {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
        >>> model = Model.from_equinox(lambda key: eqx.nn.Linear(2, 3, key=key), features=spec)
        >>> model.init(jax.random.key(0)).weight.shape
        (3, 2)
        >>> norm = eqx.nn.make_with_state(lambda key: eqx.nn.BatchNorm(2, "batch", mode="batch"))
        >>> model = Model.from_equinox(norm, features=spec)
        >>> [values.shape for values in model.init_parts(jax.random.key(0)).statistics.batch_state_index.init]
        [(2,), (2,)]
        """
        from fedsim.model import _equinox

        return cls._of(functools.partial(_equinox.network, make, axis_name), **options)

    @classmethod
    def from_keras(cls, make: Callable[[], Any], **options: Unpack[Options]) -> Model:
        """Returns a model from a Keras 3 model. It needs the extra ``keras``, and the JAX backend (``KERAS_BACKEND=jax``).

        Parameters are ``{layer: {variable: array}}`` with Keras's paths, such as ``{"sequential/dense": {"kernel": ...}}``.
        Automatic names are numbered as in a process that makes no other model. The model is called with ``training=True`` or
        ``False``, and its seed generators (dropout) get new states from the key of the step. An initializer that has a seed
        of its own gives the same values for every key, and so do weights that ``make`` sets. Other variables that are not
        trained, such as ``moving_mean``, are running statistics. If a model with statistics has a ``call`` of its own, not
        that of a functional or sequential model, with an argument ``mask``, this gets which rows of the batch are real in
        training, ``bool [n]``.

        Args:
          make: a function without arguments that returns a ``keras.Model``.
          **options: see `from_flax`. A functional model gets several inputs as one list.

        Raises:
          ImportError: keras is not installed.
          ValueError: Keras has another backend; ``make`` does not make a ``keras.Model``; this has state other than floats,
            layers with ``trainable=False``, or variables with one name, which the message names; or it has losses of its own.
        """
        from fedsim.model import _keras

        return cls._of(functools.partial(_keras.network, make), **options)

    @classmethod
    def from_functions(
        cls, init: Callable[[jax.Array], Params], apply: Callable[..., Any], **options: Unpack[Options]
    ) -> Model:
        """Returns a model from plain functions.

        Args:
          init: ``key -> params``, any pytree of arrays of floats.
          apply: ``(params, *inputs) -> outputs``. If it has an argument ``key``, it gets the key of the step in training, by
            name.
          **options: see `from_flax`.

        Raises:
          ValueError: one of them is not a function.

        >>> model = Model.from_functions(
        ...     lambda key: {"w": jax.random.normal(key, (2,))},
        ...     lambda params, x: x @ params["w"],
        ...     features={"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.float32)},
        ...     loss=metrics_lib.squared_error)
        >>> model.apply_for_eval({"w": jnp.array([1.0, 2.0])}, {"x": jnp.array([[3.0, 4.0]])}).tolist()
        [11.0]
        """
        from fedsim.model import _functions

        return cls._of(functools.partial(_functions.network, init, apply), **options)

    @classmethod
    def _of(
        cls,
        network: Callable[[Call], Network],
        *,
        features: Mapping[str, Feature],
        inputs: str | tuple[str, ...] | None = "x",
        train_kwargs: Mapping[str, Any] | None = None,
        eval_kwargs: Mapping[str, Any] | None = None,
        loss: Callable[[Examples, Any], jax.Array] = metrics_lib.cross_entropy,
        metrics: Mapping[str, metrics_lib.Metric] | None = None,
        num_classes: int | None = None,
        statistics: Literal["average", "client", "frozen"] = "average",
        **fields: Any,
    ) -> Self:
        """Returns a model of a network, which is made for the way it is called. ``fields`` are those of a subclass."""
        made = network(Call.of(features, inputs, train_kwargs, eval_kwargs))
        made = made._replace(init=jax.jit(made.init))  # Compiled one by one, the operations take twice as long.
        functions: dict[str, Any] = {"init": made.init, "apply_for_train": made.train, "apply_for_eval": made.evaluate}
        checks.one_of("average", "client", "frozen", statistics=statistics)
        if made.is_statistic is None and statistics != "average":
            raise ValueError(
                f"Expected statistics='average', the default, for a network without state, got statistics={statistics!r}: "
                "leave it out, or give a network that has running statistics."
            )
        if made.is_statistic is not None:
            role = {"average": "statistics", "client": "own_statistics", "frozen": "frozen"}[statistics]
            roles = jax.tree.map(lambda is_one: role if is_one else "params", made.is_statistic)
            functions = {**divide(made, roles)._asdict(), "network": made, "roles": roles}
        return cls(
            **functions,
            loss=loss,
            metrics=default_metrics(loss) if metrics is None else dict(metrics),
            features=dict(features),
            num_classes=num_classes,
            **fields,
        )

    def with_precision(self, compute: str, *, loss_scale: float | None = None) -> Model:
        """Returns this model with a network that computes in half precision. Parameters, outputs and losses stay float32.

        Gradients are float32, too, and so are the normalizations of Haiku networks. Keras models and Flax modules with a
        ``dtype`` of their own have other means for this. Derivatives in forward mode are not supported.

        Args:
          compute: "bfloat16" or "float16".
          loss_scale: a constant factor of the gradient inside of the network, so that small values do not become 0 in
            float16. The gradient of the parameters is divided by it. If it overflows, the client's update is not finite and is
            dropped, which a warning says: then use a smaller one. None: 1024 with "float16", and 1 with "bfloat16".

        Raises:
          ValueError: ``compute`` is another name, ``loss_scale`` is not positive, the model has parts, or (in the first round)
            the network computes outputs in another precision nevertheless.

        >>> model = Model.from_haiku(
        ...     hk.transform(lambda examples: hk.Linear(1, w_init=jnp.ones, with_bias=False)(examples["x"])),
        ...     features={"x": jax.ShapeDtypeStruct((2,), jnp.float32)}, loss=metrics_lib.squared_error)
        >>> x, params = {"x": jnp.array([[1.0, 0.001]])}, model.init(jax.random.key(0))
        >>> model.apply_for_eval(params, x).item(), model.with_precision("bfloat16").apply_for_eval(params, x).item()
        (1.0010000467300415, 1.0)
        """
        if type(self) is not Model:
            raise ValueError(
                f"Expected a model without parts, got a {type(self).__name__}: convert activations inside of its parts."
            )
        if self.init_parts is not None:
            raise ValueError(
                f"Expected a model without {self.parts_in_words}, got one with: call with_precision before with_parts; running "
                "statistics need float32, so convert activations inside of the network."
            )
        train, evaluate = (
            _precision.in_precision(apply, compute, loss_scale) for apply in (self.apply_for_train, self.apply_for_eval)
        )
        return dataclasses.replace(self, apply_for_train=train, apply_for_eval=evaluate)

    def with_parts(self, *, frozen: Names = (), kept: Names = ()) -> Self:
        """Returns the model with some of its parameters frozen, and some kept by each client, which trains them for itself.

        An algorithm then sees the other parameters only: these are sent, trained and averaged. Frozen parameters are neither
        sent nor differentiated. ``state.params`` has all of them. See `fedsim.evaluate_personalized` for each client's own
        model.

        Args:
          frozen: the parameters that do not change: a pattern of `fnmatch` for names such as ``"linear_1/w"``, several
            patterns, or a function from a name to whether it is meant.
          kept: the parameters that clients keep, in the same way.

        Raises:
          ValueError: a pattern matches no parameter, a parameter is meant twice, or none is left for the algorithm.

        >>> import fedsim
        >>> model = fedsim.models.digits_dense().with_parts(frozen="linear/*", kept=["linear_2/*"])
        >>> [name for name, values in model.init(jax.random.key(0)).items() if values["w"] is not None]
        ['linear_1']
        """
        network, roles = self._whole_network, self.roles
        if roles is None:
            roles = jax.tree.map(lambda _: "params", jax.eval_shape(network.init, jax.random.key(0)))
        roles = assigned(roles, {"frozen": frozen, "kept": kept})
        return dataclasses.replace(self, **divide(network, roles)._asdict(), network=network, roles=roles)

    def starting_from(self, params: Any, *, names: Mapping[str, str] | None = None, partly: bool = False) -> Self:
        """Returns the model with an ``init`` that returns given values, such as those of another run or of a file.

        Every algorithm then starts from these; one that draws several models (`fedsim.algorithms.HypCluster`) gets equal ones.
        Running statistics and parts of the model count as parameters here. Floats are converted to the dtypes of the
        parameters. Algorithms that call ``init`` in rounds, such as FedPer, have the values in their programs.

        Args:
          params: a pytree of arrays, such as ``state.params`` or what `fedsim.read_params` returns. Names of arrays are their
            paths, ``"linear/w"``.
          names: new names of arrays by their old names, which may have one ``*`` for any text: ``{"encoder/*": "body/*"}``. An
            empty new name leaves arrays out. The first that matches counts, and other arrays keep their names.
          partly: whether parameters without an array keep their initial values, and arrays without a parameter are left out. A
            warning names them.

        Raises:
          ValueError: an array has another shape than its parameter, or is no float; a value is not finite; a name matches
            nothing; or, unless ``partly``, a parameter has no array, or an array has no parameter. The message lists all.

        >>> import fedsim
        >>> old, new = fedsim.models.digits_dense(), fedsim.models.digits_dense().with_parts(frozen=["linear/*", "linear_1/*"])
        >>> params = old.init(jax.random.key(0))
        >>> start = new.starting_from(params).init_whole(jax.random.key(1))
        >>> bool((start["linear"]["w"] == params["linear"]["w"]).all())
        True
        """
        network, arrays = self._whole_network, renamed(dict(named(params)), names or {})
        values, missing, extra = fitted(arrays, jax.eval_shape(network.init, jax.random.key(0)), partly=partly)
        if missing or extra:
            warnings.warn(
                f"The model starts from {len(values)} given arrays. Parameters that keep their initial values: "
                f"{', '.join(missing) or 'none'}. Arrays that are left out: {', '.join(extra) or 'none'}.",
                stacklevel=2,
            )
        network = network._replace(init=init_with(network.init, values))
        if self.roles is None:
            return dataclasses.replace(self, init=network.init)
        return dataclasses.replace(self, **divide(network, self.roles)._asdict(), network=network)

    @property
    def _whole_network(self) -> Network:
        """The functions of the whole network, whose parameters have all parts."""
        return self.network or Network(self.init, self.apply_for_train, self.apply_for_eval)

    def with_shardings(self, shardings: Shardings) -> Self:
        """Returns the model with parameters that are divided in this way where `fedsim.Sharded` trains it.

        Tensor parallelism divides the output axis of a layer and the input axis of the next one over ``"model"``. With axes
        that are divided over ``"data"``, as the batches are, each layer is gathered when it is computed (fully sharded data
        parallelism).

        Args:
          shardings: patterns of `fnmatch` for names of parameters, with the ``jax.P`` of their axes, which names ``"model"``
            and ``"data"``. The first pattern that matches counts, and parameters that none matches are whole on every device.

        Raises:
          ValueError: a pattern matches no parameter.

        >>> import fedsim
        >>> rule = {"linear/w": jax.P(None, "model"), "linear/b": jax.P("model"), "linear_1/w": jax.P("model", None)}
        >>> model = fedsim.models.digits_dense().with_shardings(rule)
        >>> tuple(model.division({"model": 2, "data": 1}).spec_of("linear_1/w", (128, 64)))
        ('model', None)
        """
        model = dataclasses.replace(self, shardings=dict(shardings))
        model.division({"data": 1, "model": 1})
        return model

    def division(self, sizes: Mapping[str, int]) -> Division:
        """Returns how the model is divided over the axes of a mesh, by name with their numbers of devices.

        Raises:
          ValueError: its shardings do not fit it, or the mesh.
        """
        return division_of(jax.eval_shape(self.init_whole, jax.random.key(0)), self.shardings, sizes)

    def init_whole(self, key: jax.Array) -> Params:
        """Returns the parameters together with the other parts of the model, as ``state.params`` has them."""
        params = self.init(key)
        return params if self.init_parts is None else self.init_parts(key).join(params)

    def outputs(self, params: Params, batch: Batch) -> Any:
        """Returns the outputs in training for a batch, with the batch's random draws.

        They are what the network returns: an array, or for instance a dict that has the features of an inner layer, too, for
        losses that need them. With the same batch, other parameters have the same dropout.

        >>> model = Model.from_haiku(
        ...     hk.transform(lambda examples: {"features": examples["x"], "logits": hk.Linear(3)(examples["x"])}),
        ...     features={"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)},
        ...     loss=lambda examples, outputs: metrics_lib.cross_entropy(examples, outputs["logits"]))
        >>> from fedsim.data import Batch
        >>> batch = Batch({"x": jnp.ones([5, 2]), "y": jnp.zeros(5, jnp.int32)}, jnp.ones(5, bool), jax.random.key(1), 0)
        >>> jax.tree.map(jnp.shape, model.outputs(model.init(jax.random.key(0)), batch))
        {'features': (5, 2), 'logits': (5, 3)}
        """
        return self.apply_for_train(params, batch.examples, batch.key)

    def mean_loss(self, batch: Batch, outputs: Any) -> jax.Array:
        """Returns the mean loss of these outputs over the batch, a scalar ``float32``; 0 if all rows are padding."""
        return metrics_lib.masked_mean(self.losses(batch.examples, outputs), batch.mask)

    def train_loss(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the mean training loss over the examples of ``batch``, a scalar ``float32``; 0 if all rows are padding."""
        return self.mean_loss(batch, self.outputs(params, batch))

    def losses(self, examples: Examples, outputs: Any) -> jax.Array:
        """Returns the loss of each example, ``float32 [n]``.

        Raises:
          ValueError: ``loss`` returns an array of another shape, such as ``[n, 1]`` or a mean over the batch, with which the
            mean over the real examples of a padded batch would be wrong.
        """
        losses, n = self.loss(examples, outputs), len(next(iter(examples.values())))
        if jnp.shape(losses) != (n,):
            raise ValueError(
                f"Expected the model's loss to return one number per example, shape [{n}] for a batch of {n}, got shape "
                f"{list(jnp.shape(losses))}. Return losses that are not yet averaged over the batch, with a single axis."
            )
        return losses

    def check_trainable(self) -> None:
        """Raises ``ValueError`` unless the model has parameters and all of them are floats, as `jax.grad` needs them."""
        leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(self.init, jax.random.key(0)))
        if not leaves:
            raise ValueError("The model has no parameters, so there is nothing to train. Check what its init returns.")
        for path, leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"Expected all parameters of the model to be floats, got params{jax.tree_util.keystr(path)} of dtype "
                    f"{leaf.dtype}, which has no gradient. Make it a constant of the model instead of a parameter."
                )

    @property
    def part_names(self) -> frozenset[str]:
        """The names of the fields of `fedsim.model.ModelParts` that the model has."""
        return frozenset(jax.tree.leaves(self.roles)) - {"params"}

    @property
    def has_changing_parts(self) -> bool:
        """Whether clients change other parts of the model than the parameters: not if it has frozen ones only."""
        return not self.part_names <= {"frozen"}

    @property
    def parts_in_words(self) -> str:
        """The other parts of the model, for messages; "" if there are none."""
        return " and ".join(words for name, words in PARTS_IN_WORDS.items() if name in self.part_names)

    def check_padding(self, batches: Batches, sizes: np.ndarray, *, purpose: str | None = None) -> None:
        """Raises ``ValueError`` if a model with running statistics would normalize by the padding of clients' last batches.

        Args:
          batches: how clients cut their examples into batches.
          sizes: the clients' numbers of examples, ``int [clients]``.
          purpose: what they compute, for the message, if it is a pass over all examples (`Batches.one_pass`) and not training.
        """
        if not {"statistics", "own_statistics"} & self.part_names:
            return
        partial = np.flatnonzero(batches.has_padding(sizes))
        if not len(partial):
            return

        def train(params: Params, key: jax.Array) -> Any:  # A function of its own, since JAX does not trace one again.
            return self.apply_for_train(params, jax.tree.map(jnp.asarray, self.dummy_examples(2)), key)

        key = rng.root(0)
        with scope_of(ModelParts(), jnp.array([True, False])) as scope:
            jax.eval_shape(train, jax.eval_shape(self.init_whole, key), key)
        if not scope.reads_mask:
            names = ", ".join([name for name, role in named(self.roles) if "statistics" in role][:4])
            what, remedy = f"which would enter the running statistics ({names})", "set drop_remainder=True in Batches"
            if purpose is not None:
                what = f"which would enter the statistics ({names}) of the pass over all examples that computes {purpose}"
                remedy = "choose a batch size that divides the clients' numbers of examples, since this pass drops no examples"
            raise ValueError(
                f"The last batch of {len(partial)} of {len(sizes)} clients is filled up with padding, {what}: {remedy}, or "
                "leave padding out of them, as fedsim.models.BatchNorm in Haiku does, and BatchNorm of Flax and Keras with an "
                "argument mask."
            )

    def dummy_examples(self, count: int) -> dict[str, np.ndarray]:
        """Returns ``count`` examples of zeros, in the shapes and dtypes that the model reads."""
        return zeros(self.features, count)

    def check(self, data: FederatedData, *, unlabelled: bool = False) -> None:
        """Checks that ``data`` fits the model.

        Args:
          data: the population.
          unlabelled: whether labels may be hidden, which is -1, see `fedsim.partitioners.hide_labels`.

        Raises:
          ValueError: a feature is missing, has another shape or dtype, or has values that are not finite or that a device
            changes (`FederatedData.check_range`); or a label is not of a class.
        """
        for name, feature in self.features.items():
            specs = accepted(feature)
            if name not in data.columns:
                raise ValueError(
                    f"The model reads feature {name!r}, which the data does not have; it has {sorted(data.columns)}. "
                    "Rename a column, or choose a model for this dataset."
                )
            column = data.columns[name]
            if tuple(column.shape[1:]) not in {tuple(spec.shape) for spec in specs}:
                raise ValueError(
                    f"Feature {name!r} has shape {list(column.shape[1:])} per example, and the model expects "
                    f"{list(specs[0].shape)}. Reshape the column, or choose a model for this dataset."
                )
            if _kind(column.dtype) not in {_kind(spec.dtype) for spec in specs}:
                raise ValueError(
                    f"Feature {name!r} has dtype {column.dtype}, and the model expects "
                    f"{' or '.join(str(np.dtype(spec.dtype)) for spec in specs)}. Convert the column before packing it."
                )
        data.check_finite()
        if self._classes is not None and "y" in self.features:
            data.check_labels("y", self._classes, unlabelled=unlabelled)
        data.check_range(self.features)

    @functools.cached_property
    def _classes(self) -> int | None:
        """The number of classes that labels may have; None if any labels are possible."""
        if self.num_classes is not None or self.loss is not metrics_lib.cross_entropy:
            return self.num_classes
        params = jax.eval_shape(self.init_whole, jax.random.key(0))
        logits = jax.eval_shape(self.apply_for_eval, params, self.dummy_examples(1))
        return logits.shape[1] if getattr(logits, "ndim", 0) == 2 else None


def default_metrics(loss: Callable[[Examples, Any], jax.Array]) -> dict[str, metrics_lib.Metric]:
    """Returns the metric "loss", and with the cross-entropy of labels also "accuracy".

    >>> list(default_metrics(metrics_lib.cross_entropy))
    ['loss', 'accuracy']
    """
    metrics: dict[str, metrics_lib.Metric] = {
        "loss": lambda examples, outputs: metrics_lib.per_example(loss(examples, outputs))
    }
    return metrics | ({"accuracy": metrics_lib.accuracy} if loss is metrics_lib.cross_entropy else {})


def _kind(dtype: Any) -> str:
    """Returns the kind of a dtype: "f" for floats, "i" for signed and unsigned integers."""
    return np.dtype(dtype).kind.replace("u", "i")
