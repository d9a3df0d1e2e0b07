"""FedBN: local batch normalization.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, "FedBN: Federated learning on non-IID features via local batch normalization", ICLR
2021, Algorithm 1: https://arxiv.org/abs/2102.07623. Clients train all parameters, and the server averages those outside of
normalizations. Deviations: a client that has not trained has the normalizations with which the model starts; the paper has all
clients in each round. Other normalizations than batch normalization are kept in the same way. Clients are weighted by
``weighting`` (the paper averages uniformly).
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable

import jax

from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.data import FederatedData
from fedsim.model import named


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedBN(FedAvg):
    """FedAvg in which every client keeps the normalizations of its network, for clients whose features differ.

    It is FedAvg of the model with ``model.with_parts(kept=norm)``, which `FedBN` makes. `fedsim.evaluate_personalized`
    evaluates each client's model.

    Attributes:
      norm: the parameters of normalizations, which clients keep: a pattern of `fnmatch` for names of parameters, or a function
        of a name. The default matches the names that Haiku and Flax give them, such as ``"batch_norm/scale"``.
      model: with ``statistics="client"`` if it has running statistics, see `fedsim.Model.from_haiku`.
      client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: before the first round: no parameter of the model is meant by ``norm``, or the model has running statistics
        that the server averages.

    >>> import haiku as hk, jax.numpy as jnp, optax, fedsim
    >>> def network(examples, is_training):
    ...     x = fedsim.models.BatchNorm(name="norm")(hk.Linear(8)(examples["x"]), is_training)
    ...     return hk.Linear(3)(jax.nn.relu(x))
    >>> model = fedsim.Model.from_haiku(
    ...     hk.transform_with_state(network), train_kwargs={"is_training": True}, eval_kwargs={"is_training": False},
    ...     features={"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)},
    ...     statistics="client")
    >>> algorithm = FedBN(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    >>> [name for name, _ in fedsim.model.named(algorithm.broadcast(algorithm.init(jax.random.key(0)).server).params)]
    ['linear/b', 'linear/w', 'linear_1/b', 'linear_1/w']
    """

    capabilities = Capabilities(
        minimizes=False,  # Clients have different parameters.
        scalable=True,
        model_parts=True,
        microbatches=True,
        refused_parts={
            "statistics": "its clients keep the running statistics of their normalizations; use a model that is made with "
            'statistics="client"'
        },
    )

    norm: str | Callable[[str], bool] = "*[Nn]orm*"

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(self._is_kept(name) for name, _ in named(jax.eval_shape(self.model.init_whole, jax.random.key(0)))):
            object.__setattr__(self, "model", self.model.with_parts(kept=self._is_kept))

    def _is_kept(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.norm) if isinstance(self.norm, str) else self.norm(name)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        if "kept" not in self.model.part_names:
            raise ValueError(
                f"FedBN needs a model with normalizations, and no parameter is one by norm={self.norm!r}: use a model with "
                "them, or give a pattern for the names of the parameters that clients keep."
            )
