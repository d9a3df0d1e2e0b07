"""`DecentralizedAlgorithm`: nodes that train models of their own, and mix them with those of their neighbours."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fedsim import checks, rng, tree
from fedsim.aggregators import Mean, accumulation_dtype
from fedsim.algorithm import Algorithm, Capabilities
from fedsim.algorithms import Local, LocalTraining, Shared, check_client_optimizer
from fedsim.data import Batch, FederatedData
from fedsim.decentralized._local_noise import LocalNoise
from fedsim.decentralized._mixer import MessageLoss, Mixer, Neighbours
from fedsim.decentralized._mixing import Matrix, Weights, is_doubly_stochastic
from fedsim.decentralized._robust_mixing import RobustMixing
from fedsim.decentralized._topology import Topology
from fedsim.model import Model, ModelParts, Params
from fedsim.rounds import Client, Clients
from fedsim.samplers import Sampler, UniformSampler
from fedsim.systems import Devices
from fedsim.transfer import Head


class NodesState(NamedTuple):
    """The state of all nodes.

    Attributes:
      models: the parameters of every node that nodes exchange, leaves ``[nodes, ...]``.
      memory: what the algorithm keeps of every node, leaves ``[nodes, ...]``.
      round: the number of rounds so far, ``int32 []``.
      personal: the other parameters of every node, which it never sends, leaves ``[nodes, ...]``; () if there are none.
      statistics: the running statistics of every node's model, as the fields ``statistics``, which nodes mix, and
        ``own_statistics`` of `fedsim.model.ModelParts`, leaves ``[nodes, ...]``.
      training: what the local steps of every node keep from round to round, such as the state of an optimizer, leaves
        ``[nodes, ...]``; () if they keep nothing.

    >>> state = NodesState(models={"w": jnp.array([[1.0], [5.0]])}, memory=(), round=jnp.int32(0))
    >>> state.params["w"].tolist()
    [3.0]
    """

    models: Params
    memory: Any
    round: jax.Array
    personal: Any = ()
    statistics: ModelParts = ModelParts()
    training: Any = ()

    @property
    def params(self) -> Params:
        """The mean of the nodes' parameters, which is evaluated as the model of all; shapes if the state has only shapes."""

        def mean(x: Any) -> Any:
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            return _mean(x).astype(x.dtype)

        return jax.tree.map(mean, self.statistics.join(_joined(self.models, self.personal)))


class Trained(NamedTuple):
    """The local steps of a round.

    Attributes:
      movement: the models from which nodes trained minus the results, leaves ``[nodes, ...]``, without personal parameters;
        zeros for a node that is not in the cohort. One whose training is not finite has zeros, too, or its noise alone.
      personal: the personal parameters of all nodes after the local steps, leaves ``[nodes, ...]``.
      statistics, training: the running statistics of all nodes, and what their local steps keep, see `NodesState`.
      info: metrics of the round: the mean training loss, and the number of nodes whose training was not finite.
    """

    movement: Params
    personal: Params
    statistics: ModelParts
    training: Any
    info: dict[str, jax.Array]


class NodeResult(NamedTuple):
    """The local steps of one node, or of all nodes, with a leading axis ``[nodes]``.

    Attributes:
      movement: its model minus the result, without personal parameters, and with the noise of ``local_noise``.
      personal: the same of personal parameters, without noise.
      statistics: the same of running statistics, see `NodesState`.
      training: what its local steps keep, see `NodesState`.
      loss: the mean training loss, ``float32 []``.
      trained: whether it took a step, ``bool []``; False for nodes that are not in the cohort.
      diverged: whether one of the above but the loss was not finite, ``bool []``. Then it has moved by zeros, to which noise
        is added, and keeps what it had.
    """

    movement: Params
    personal: Params
    statistics: ModelParts
    training: Any
    loss: jax.Array
    trained: jax.Array
    diverged: jax.Array


_REFUSED = {"kept": "nodes keep the parameters of the field personal; use personal=lambda module, name: ... in its place"}

# Of algorithms that do not mix by weights.
WITHOUT_MIXING_WEIGHTS = Capabilities(
    aggregators=False,
    model_parts=True,
    microbatches=True,
    refused_parts={
        **_REFUSED,
        "statistics": "it has no mixing weights, by which nodes would mix them; use statistics='client', or another algorithm, "
        "such as DPSGD",
    },
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DecentralizedAlgorithm(Algorithm):
    """Base class of algorithms without a server: the clients are the nodes 0 to n - 1 of a graph.

    In a round every node takes local steps from its own model, as a client of `FedAvg` does from the server's. Then the nodes
    exchange values with their neighbours. Subclasses define `exchange` and, if they keep more than a model, `node_memory`. The
    parameters that are evaluated are the mean of the nodes' models, and ``personal_`` metrics are those of each node's own
    model on its client's test examples.

    Running statistics are mixed with the weights of the models, whatever else an algorithm does with parameters; attacks,
    robust rules and noise see parameters alone.

    If a cohort has attackers, they train on what `fedsim.attacks.Attack.poison` returns, and send to their neighbours what
    `fedsim.attacks.Attack.corrupt_all` returns of the values that they would send, which are whole models in most algorithms:
    with `fedsim.attacks.SignFlip` a node sends -x. They keep their own values, which count in the mean, like those of others.
    A malicious node that is not in a round's cohort sends its own values: for Byzantine nodes, sample all nodes in every round.

    Attributes:
      model, client_optimizer: see `fedsim.algorithms.FedAvg`. A schedule counts rounds.
      topology: a `Topology` with as many nodes as the population has clients.
      weights: the mixing weights, see `Topology.matrices`.
      message_loss: the probability that a message is lost, which is everything that a node sends to a neighbour in a round. The
        receiver uses its own value in its place; `StochasticGradientPush`, `GradientTracking`, `RelaySGD` and `ADPSGD` say what
        they do.
      link_failures: the probability that a link loses the messages in both directions in a round.
      robust_mixing: replaces the weighted means, against Byzantine neighbours: `ClippedMixing` or `TrimmedMixing`.
      local_noise: clips what a node has learned in a round, and adds noise to it; None: nothing does. The model then has no
        running statistics that nodes mix.
      personal: a function from a Haiku module's name and a parameter's name to whether nodes keep the parameter to themselves,
        as in `fedsim.algorithms.FedPer`: ``lambda module, name: module == "linear_2"``. None: they share all parameters.

    Raises:
      ValueError: an attribute is not of the kind that is described, or is for algorithms with a server; or messages may be
        lost, or a robust mean is used, where what nodes keep would be wrong from then on.

    >>> import numpy as np, fedsim
    >>> from fedsim import tree
    >>> @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    ... class TrainThenMix(DecentralizedAlgorithm):
    ...     def exchange(self, state, movement, neighbours):
    ...         return state._replace(models=neighbours.mix(tree.subtract(state.models, movement)))
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([4, 8, 8, 1], np.uint8), "y": np.arange(4, dtype=np.int32)}, sizes=[1] * 4)
    >>> algorithm = TrainThenMix(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=1),
    ...     topology=fedsim.decentralized.ring(4))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, list("0123")))
    >>> jax.tree.leaves(state.models)[0].shape[0], float(info["consensus_distance"]) > 0
    (4, True)
    """

    capabilities = Capabilities(aggregators=False, model_parts=True, microbatches=True, refused_parts=_REFUSED)
    # Whether cohorts may have attackers. They may where messages are the values that are mixed.
    attackable: ClassVar[bool] = True
    # Whether the sender keeps what is lost; otherwise the receiver uses its own value in its place.
    lost_stays_with_sender: ClassVar[bool] = False
    # Whether nodes keep something that would be wrong for ever after a lost message. Then messages cannot be lost.
    needs_all_messages: ClassVar[bool] = False
    # Whether nodes keep sums over nodes and rounds, which robust mixing would change for ever. Then there is none.
    keeps_sums: ClassVar[bool] = False
    # Whether the nodes may be divided over devices, see `fedsim.rounds.Clients.map_rows`.
    divisible: ClassVar[bool] = True
    # The topology of ``fedsim run`` without ``--topology``.
    default_topology: ClassVar[str] = "ring"

    model: Model
    client_optimizer: optax.GradientTransformation | Callable[[jax.Array], optax.GradientTransformation]
    topology: Topology
    weights: str | Weights | Sequence[Matrix] = "auto"
    message_loss: float = 0.0
    link_failures: float = 0.0
    robust_mixing: RobustMixing | None = None
    local_noise: LocalNoise | None = None
    personal: Head | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.instance(Model, "fedsim.models.emnist_dense()", model=self.model)
        checks.optimizer(or_schedule=True, client_optimizer=self.client_optimizer)
        checks.instance(Topology, "fedsim.decentralized.ring(16)", topology=self.topology)
        defaults = {"downlink": None, "staleness": None, "nonfinite": "drop", "update_norms": False}
        given = {name: value for name in defaults if (value := getattr(self, name)) != defaults[name]}
        given |= {} if type(self.aggregator) is Mean else {"aggregator": self.aggregator}
        if given:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"{type(self).__name__} has no server, got {shown}: leave it out.")
        checks.number(least=0, most=1, message_loss=self.message_loss, link_failures=self.link_failures)
        checks.instance(RobustMixing, "TrimmedMixing(trim=1)", or_none=True, robust_mixing=self.robust_mixing)
        for name in ("message_loss", "link_failures") if self.needs_all_messages else ():
            if getattr(self, name):
                raise ValueError(
                    f"{type(self).__name__} needs links that lose nothing, got {name}={getattr(self, name)}: leave it out, or "
                    "use DPSGD. After a lost message, what nodes keep would be wrong for ever."
                )
        if self.keeps_sums:
            remedy = f"a robust mean does not keep the sums of {type(self).__name__}; use DPSGD, for example"
            checks.one_of(None, robust_mixing=self.robust_mixing, remedy=remedy)
        checks.instance(LocalNoise, "LocalNoise(multiplier=1.0, norm=1.0)", or_none=True, local_noise=self.local_noise)
        if self.personal is not None and not callable(self.personal):
            raise ValueError(
                f"Expected personal to be a function of a module's and a parameter's name, or None, got {self.personal!r}."
            )
        self.check_matrices()
        if self.robust_mixing is not None:
            self.robust_mixing.check(self.matrices)

    def check_matrices(self) -> None:
        """Raises ``ValueError`` if the algorithm does not converge to a common model with the mixing matrices."""
        for number, matrix in enumerate(self.matrices):
            if not is_doubly_stochastic(matrix):
                raise ValueError(
                    f"{type(self).__name__} needs mixing matrices whose rows and columns sum to 1, but the one of round "
                    f"{number} of {self.topology.name!r} is not: use weights='metropolis' (--mixing metropolis) with an "
                    "undirected graph, or StochasticGradientPush."
                )

    @functools.cached_property
    def matrices(self) -> list[Matrix]:
        """The mixing matrices of a period, see `Topology.matrices`."""
        return self.topology.matrices(self.weights)

    @functools.cached_property
    def _mixers(self) -> dict[Mesh | None, Mixer]:
        return {}

    def mixer(self, mesh: Mesh | None = None) -> Mixer:
        """Returns the mixing matrices for compiled rounds, of nodes that are divided over the devices of a mesh or not."""
        if mesh not in self._mixers:
            self._mixers[mesh] = Mixer.of(self.matrices, padded=self.robust_mixing is not None, mesh=mesh)
        return self._mixers[mesh]

    def check(self, data: FederatedData) -> None:
        super().check(data)
        # Nodes that keep the state of their optimizer lose no gradients, of which the check would warn.
        keeps = type(self).training_memory is not DecentralizedAlgorithm.training_memory
        check_client_optimizer(self.model, self.client_optimizer, None if keeps else self.batches, data)
        if self.local_noise is not None and "statistics" in self.model.part_names:
            raise ValueError(
                f"Expected a model without running statistics with local_noise, got one with them in {type(self).__name__}: "
                "nodes send them without noise. Use GroupNorm, or keep them at the nodes (statistics='client')."
            )
        if data.num_clients != self.topology.nodes:
            raise ValueError(
                f"The topology {self.topology.name!r} has {self.topology.nodes} nodes, and the population has "
                f"{data.num_clients} clients: give a topology of {data.num_clients} nodes, or choose {self.topology.nodes} "
                "clients."
            )

    def sampler(self, data: FederatedData, clients: int, devices: Devices | None = None, seed: Any = 0) -> Sampler:
        """Returns the sampler of ``fedsim run``: all nodes in every round, whatever ``clients`` is.

        Raises:
          ValueError: devices are given; nodes wait for each other, so their speed does not matter.
        """
        if devices is not None:
            raise ValueError(f"The nodes of {type(self).__name__} wait for each other: leave step_seconds out, or use ADPSGD.")
        return UniformSampler(data, clients=data.num_clients, seed=seed)

    def init(self, key: jax.Array) -> NodesState:
        nodes, parts = self.topology.nodes, super().model_parts(key) or ModelParts()
        models, statistics = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (nodes, *x.shape)), (self.model.init(key), parts._replace(frozen=()))
        )
        models, personal = self._split(models)
        if not jax.tree.leaves(models):
            raise ValueError("All parameters are personal, so nodes would exchange nothing: let personal be False for some.")
        training = self.training_memory(_joined(models, personal))
        return NodesState(models, self.node_memory(models), jnp.int32(0), personal, statistics, training)

    def model_parts(self, key: jax.Array) -> ModelParts | tuple[()]:
        """Returns the frozen parts of the model, which all nodes have in common. The others are in `NodesState`."""
        parts = super().model_parts(key) or ModelParts()
        return () if parts.frozen == () else ModelParts(frozen=parts.frozen)

    def _split(self, params: Params) -> tuple[Params, Params]:
        """Returns the parameters that nodes exchange, and those that they keep to themselves."""
        if self.personal is None:
            return params, ()
        kept = self.personal
        personal, exchanged = hk.data_structures.partition(lambda module, name, value: kept(module, name), params)
        return exchanged, personal

    def node_memory(self, models: Params) -> Any:
        """Returns what nodes keep besides their models before the first round, leaves ``[nodes, ...]``; default: nothing."""
        return ()

    def training_memory(self, models: Params) -> Any:
        """Returns what nodes' local steps keep before the first round, leaves ``[nodes, ...]``; default: nothing."""
        return ()

    def node_models(self, state: NodesState) -> Params:
        """Returns the models that are evaluated, without personal parameters, leaves ``[nodes, ...]``."""
        return state.models

    def training_models(self, state: NodesState) -> Params:
        """Returns the models from which the nodes train, like `node_models`, which is the default."""
        return self.node_models(state)

    def broadcast(self, state: NodesState) -> NodesState:
        return state

    def round(self, state: NodesState, clients: Clients) -> tuple[NodesState, Any]:
        trained = self.train_nodes(state, clients)
        key, loss_key = (rng.round_key(clients.key, state.round, purpose) for purpose in ("exchange", "losses"))
        lossy = self.message_loss > 0 or self.link_failures > 0
        loss = MessageLoss(loss_key, self.message_loss, self.link_failures, self.lost_stays_with_sender) if lossy else None
        neighbours = Neighbours(
            self.mixer(clients.rows_mesh), state.round, key, loss, self._corrupt(clients), self.robust_mixing
        )
        statistics = trained.statistics
        if statistics.statistics != ():
            statistics = statistics._replace(statistics=self.mix_statistics(state, statistics.statistics, neighbours))
        new = self.exchange(state, trained.movement, neighbours)
        new = new._replace(round=state.round + 1, personal=trained.personal, statistics=statistics, training=trained.training)
        return new, {
            **trained.info,
            "consensus_distance": consensus_distance(self.node_models(new)),
            "bits_up": neighbours.bits,
        }

    def train_nodes(self, state: NodesState, clients: Clients) -> Trained:
        """Runs the local steps of the nodes of a round's cohort.

        Raises:
          ValueError: the cohort has attackers, and the algorithm is not ``attackable``.
        """
        if clients.attack is not None and not self.attackable:
            raise ValueError(
                f"{type(self).__name__} does not simulate attackers: use a sampler without them, or another algorithm, such as "
                "DPSGD."
            )
        models = _joined(self.training_models(state), state.personal)
        rows = models, state.statistics, state.training
        result = clients.map_rows(self.node_update, state.round, rows, divisible=self.divisible)
        info = {
            "loss": jnp.mean(result.loss, where=result.trained & ~result.diverged),
            "dropped": jnp.sum(result.diverged, dtype=jnp.int32),
        }
        personal, statistics = tree.subtract((state.personal, state.statistics), (result.personal, result.statistics))
        kept = jax.tree.map(
            lambda new, old: jnp.where(tree.per_row(result.trained, new), new, old), result.training, state.training
        )
        return Trained(result.movement, personal, statistics, kept, info)

    def _corrupt(self, clients: Clients) -> Callable[[Any, jax.Array], Any] | None:
        """Returns the function with which attackers change what they send, if there are some."""
        attack = clients.attack
        if attack is None:
            return None
        at = jnp.where(jnp.asarray(clients.plan.attacker), jnp.asarray(clients.plan.client), self.topology.nodes)
        attackers = jnp.zeros(self.topology.nodes, bool).at[at].set(True, mode="drop")
        return lambda values, key: attack.corrupt_all(values, attackers, key)

    def client_loss(self, shared: Shared, params: Params, batch: Batch) -> jax.Array:
        """Returns the loss that nodes minimize and report; ``shared.params`` is the node's model before its local steps."""
        return self.model.train_loss(params, batch)

    def local_training(self, shared: Shared, client: Client) -> LocalTraining:
        """Returns how a node trains, see `fedsim.algorithms.FedAvg.local_training`."""
        return LocalTraining.of(self, shared)

    def train_node(self, shared: Shared, client: Client, kept: Any) -> tuple[Local, Any]:
        """Runs a node's local steps from ``shared.params``; returns their result, and what they keep of ``kept``."""
        return self.local_training(shared, client).run(client, shared.params), kept

    def node_update(self, round: jax.Array, row: tuple[Params, ModelParts, Any], client: Client) -> NodeResult:
        """Runs a node's local steps from its own model, personal parameters included, and its running statistics."""
        own, statistics, kept = row
        parts = statistics._replace(frozen=(client.parts or ModelParts()).frozen)
        client = dataclasses.replace(client, parts=parts)
        local, new = self.train_node(Shared(own, round), client, kept)
        movement, moved = self._split(tree.subtract(own, local.params))
        changed = tree.subtract(statistics, (local.parts or parts)._replace(frozen=()))
        floats = [jnp.isfinite(x) for x in jax.tree.leaves((movement, moved, changed)) if tree.is_float(x)]
        # The state of an optimizer may begin with an infinity, such as the best value so far, and keep it for some steps.
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(kept), strict=True)
        floats += [jnp.isfinite(x) | (jnp.isinf(x) & jnp.isinf(before)) for x, before in pairs if tree.is_float(x)]
        finite = functools.reduce(jnp.logical_and, map(jnp.all, floats))
        zeros = jax.tree.map(jnp.zeros_like, (movement, moved, changed))
        movement, moved, changed, kept = tree.select(finite, (movement, moved, changed, new), (*zeros, kept))
        if self.local_noise is not None:  # Of zeros, too: without it, neighbours would see whose training was not finite.
            movement = self.local_noise(movement, rng.stream(client.key, "local noise"))
        return NodeResult(movement, moved, changed, kept, local.loss.result(), client.num_steps > 0, ~finite)

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        """Returns the state after the nodes have exchanged values.

        Args:
          state: before the round.
          movement: the nodes' models minus the results of their local steps, leaves ``[nodes, ...]``. With one SGD step this is
            the learning rate times the gradient.
          neighbours: ``neighbours.mix(values)`` sends values, leaves ``[nodes, ...]``, and returns the weighted means of those
            that the nodes have and receive.
        """
        raise NotImplementedError(f"{type(self).__name__} must define exchange.")

    def mix_statistics(self, state: NodesState, statistics: Any, neighbours: Neighbours) -> Any:
        """Returns the running statistics after the nodes have exchanged them, leaves ``[nodes, ...]``.

        Args:
          state: before the round.
          statistics: after the local steps.
          neighbours: see `exchange`.
        """
        return neighbours.mix(statistics, trusted=True)

    def personal_params(self, shared: Any, client: Client) -> Params:
        """Returns the parameters of a node's own model."""
        models = shared.statistics.join(_joined(self.node_models(shared), shared.personal))
        return jax.tree.map(lambda x: x[client.position], models)


def _joined(models: Params, personal: Params) -> Params:
    """Returns models with their personal parameters, if they have some."""
    return hk.data_structures.merge(models, personal) if personal else models


def _mean(x: jax.Array) -> jax.Array:
    """Returns the mean over nodes, at least ``float32``. On a CPU, a product is many times as fast as ``jnp.mean``."""
    wide = accumulation_dtype(x.dtype)
    rows = x.reshape(len(x), -1).astype(wide)
    mean = jnp.dot(jnp.full(len(x), 1 / len(x), wide), rows, precision="highest")
    return mean.reshape(x.shape[1:])


def consensus_distance(models: Params) -> jax.Array:
    """Returns the root of the mean over nodes of the squared distance between a node's model and their mean, ``float32 []``.

    >>> float(consensus_distance({"w": jnp.array([[0.0, 0.0], [6.0, 8.0]])}))
    5.0
    """

    def spread(x: jax.Array) -> jax.Array:
        mean = _mean(x)
        return jnp.sum(jnp.square(x.astype(mean.dtype) - mean[None])).astype(jnp.float32)

    nodes = len(jax.tree.leaves(models)[0])
    return tree.root(sum(map(spread, jax.tree.leaves(models)), jnp.float32(0)) / nodes)
