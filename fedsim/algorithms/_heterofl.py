"""HeteroFL: clients of different capacity train sub-networks of different width.

E. Diao, J. Ding, V. Tarokh, "HeteroFL: Computation and communication efficient federated learning for heterogeneous clients",
ICLR 2021, Algorithm 1: https://arxiv.org/abs/2010.01264. A client of width r has the first ⌈r n⌉ of the n units of each hidden
layer, so its parameters W_r are a corner of each array of the server's W. Each entry of W becomes the mean over the clients
that have it, and stays as it is if none of the cohort does.

Deviations: a client has one width, by its position in the population (the paper's "fix"). The paper's scaler (which divides
activations in training by r), static batch normalization and masked cross-entropy are left out. Clients are weighted by
``weighting``. Sub-networks are simulated as the whole network with zeros, so a client computes as long as for the whole, and
its messages count as if it sent all parameters; its info has the number that it really has. A client sends the number of its
width beside its update, and the server divides by the share of the cohort's weight that has an entry, whatever the aggregator.
A compressor with a rotation has errors in all entries. Those of narrow clients are divided by the share of the wide clients,
too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators import AuxMean, WithAux
from fedsim.algorithm import Capabilities
from fedsim.algorithms._added_noise import check_adds_no_noise
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local, LocalTraining
from fedsim.algorithms._server_step import check_weights_all_alike
from fedsim.data import Batch, FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo
from fedsim.transfer import module_names


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HeteroFL(FedAvg):
    """FedAvg whose clients train sub-networks of the server's network, as wide as their devices can train.

    ``state.params`` is the whole network. `fedsim.evaluate_personalized` evaluates each client's sub-network. Layers must
    follow one another in the order in which the model creates them, as dense layers and convolutions do. All units of a layer
    that normalizes over units, such as GroupNorm, would enter the statistics of a sub-network.

    Attributes:
      widths: shares of the units of each hidden layer, in (0, 1]. The client at position p of the population has number p
        modulo their count. With ``(1.0,)``, the algorithm is FedAvg.
      model, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``widths`` is no tuple or is empty, or one is not in (0, 1]. Before the first round: the aggregator adds
        noise for privacy, or is `PartlyUniform`.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits", clients=2).train
    >>> algorithm = HeteroFL(
    ...     model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20),
    ...     widths=(1.0, 0.5))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> info.clients["num_parameters"].tolist()  # 64 x 128 x 64 x 10 and 64 x 64 x 32 x 10
    [17226, 6570]
    """

    capabilities = Capabilities(
        scalable=False,
        microbatches=True,
        refused_parts=dict.fromkeys(
            ("statistics", "own_statistics", "kept"),
            "they would have to be those of sub-networks; use a model without, such as one without normalization",
        ),
    )

    widths: tuple[float, ...] = (1.0, 0.5, 0.25)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.widths, tuple) or not self.widths:
            raise ValueError(f"Expected widths to be a tuple of shares, got widths={self.widths!r}: (1.0,) is whole networks.")
        for width in self.widths:
            checks.number(above=0, most=1, widths=width)
        object.__setattr__(self, "aggregator", AuxMean.wrap(self.aggregator))

    def masks(self, params: Params, level: jax.Array | int) -> Params:
        """Returns which entries of the parameters a sub-network has, of the dtypes and shapes of the parameters, 0 or 1.

        Args:
          params: the parameters, or what is sent of them.
          level: the number of its width in ``widths``, ``int32 []``.
        """
        modules, sizes = module_names(self.model), self._sizes

        def has(size: int, period: int) -> jax.Array:
            """Returns which of ``size`` units remain, where flattened channels repeat with a period."""
            # 0.55 * 200 is slightly above 110 in floating point.
            counts = jnp.array([max(1, math.ceil(width * period - 1e-9)) for width in self.widths], jnp.int32)
            return jnp.arange(size) % period < counts[level]

        def of_leaf(path: Any, x: jax.Array) -> jax.Array:
            at = modules.index(jax.tree_util.keystr(path, simple=True, separator="/").rsplit("/", 1)[0])
            mask = jnp.ones(x.shape, bool)
            if at < len(modules) - 1 and x.ndim:
                mask &= jnp.broadcast_to(has(x.shape[-1], x.shape[-1]), x.shape)
            if at > 0 and x.ndim > 1:
                before, inputs = sizes[modules[at - 1]], x.shape[-2]
                kept = has(inputs, before if inputs % before == 0 else inputs)
                mask &= jnp.broadcast_to(kept[:, None], x.shape)
            return mask.astype(x.dtype)

        return jax.tree_util.tree_map_with_path(of_leaf, params)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_adds_no_noise(
            self,
            "the server divides the sum of movements, and so the noise, by the share of the clients that have an entry, which "
            "has no noise",
        )
        check_weights_all_alike(self, "the server divides the mean of movements by the share of the weight of examples")

    @property
    def _sizes(self) -> dict[str, int]:
        """The number of outputs of each module."""
        whole = jax.eval_shape((self.model.network or self.model).init, jax.random.key(0))
        return {name: max(x.shape[-1] if x.shape else 1 for x in jax.tree.leaves(whole[name])) for name in whole}

    def _level(self, client: Client) -> jax.Array:
        return client.position % len(self.widths)

    def personal_params(self, shared: Any, client: Client) -> Params:
        """Returns the parameters of the client's sub-network, with zeros in place of the others."""
        return jax.tree.map(jnp.multiply, shared.params, self.masks(shared.params, self._level(client)))

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        training, masks = super().local_training(shared, client), self.masks(shared.params, self._level(client))

        def loss(params: Params, batch: Batch) -> jax.Array:
            return training.loss(jax.tree.map(jnp.multiply, params, masks), batch)

        return dataclasses.replace(training, loss=loss)

    def train(self, shared: Any, client: Client) -> Local:
        return self.local_training(shared, client).run(client, self.personal_params(shared, client))

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        local, level = self.train(shared, client), self._level(client)
        masks = self.masks(shared.params, level)
        movement = jax.tree.map(jnp.multiply, tree.subtract(shared.params, local.params), masks)
        count = sum(jnp.sum(mask, dtype=jnp.float32) for mask in jax.tree.leaves(masks))
        info = {"loss": local.loss.result(), "num_parameters": jnp.asarray(count, jnp.int32)}
        update = WithAux(movement, jax.nn.one_hot(level, len(self.widths)))
        return ClientUpdate(update, self.weight(client), info)

    def server_update(self, state: Any, update: WithAux, info: RoundInfo) -> Any:
        movement, shares = update  # of the cohort's weight, by width
        of_width = [self.masks(movement, level) for level in range(len(self.widths))]
        held = jax.tree.map(lambda *masks: sum(s * m for s, m in zip(shares, masks, strict=True)), *of_width)

        def mean(x: jax.Array, share: jax.Array) -> jax.Array:
            # An entry that no client of the cohort has does not move, though a compressor with a rotation has errors there.
            return jnp.where(share > 0, x / jnp.where(share > 0, share, 1).astype(x.dtype), 0)

        return super().server_update(state, jax.tree.map(mean, movement, held), info)
