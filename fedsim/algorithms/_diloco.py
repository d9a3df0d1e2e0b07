"""DiLoCo: distributed low-communication training.

A. Douillard, Q. Feng, A. A. Rusu, R. Chhaparia, Y. Donchev, A. Kuncoro, M. Ranzato, A. Szlam, J. Shen, "DiLoCo: Distributed
low-communication training of language models", 2023, Algorithm 1: https://arxiv.org/abs/2311.08105. The paper's workers, of
which there are few, are clients. In each round, worker i of the k in the cohort takes H local steps with AdamW, whose state it
keeps from round to round, and the server takes a step of SGD with Nesterov momentum along the mean outer gradient::

    θ_i = θ;  H times:  θ_i = InnerOpt(θ_i, g_i(θ_i))
    θ = OuterOpt(θ, 1/k Σ_i (θ - θ_i))

InnerOpt is ``client_optimizer`` and H is ``batches.steps``. OuterOpt has ``server_learning_rate`` and ``momentum``, whose
defaults are the paper's. There are no deviations. With partial participation, which the paper does not have, an absent worker
keeps the state of its optimizer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import checks, tree
from fedsim.algorithm import Algorithm, Capabilities
from fedsim.algorithms._descent import check_descent
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local, LocalTraining, check_client_optimizer
from fedsim.algorithms._server_step import Weighting, from_fields
from fedsim.data import Batches, FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate

if TYPE_CHECKING:
    Base = FedAvg
else:  # A mixin: the classes that have it are subclasses of FedAvg.
    Base = object


class Worker(NamedTuple):
    """What a worker keeps: the state of its optimizer, the order of its first round, and the number of its steps so far.

    >>> import fedsim
    >>> model, batches = fedsim.models.digits_logistic(), fedsim.Batches(size=9)
    >>> algorithm = DiLoCo(model=model, client_optimizer=optax.sgd(0.1), batches=batches)
    >>> params = model.init(jax.random.key(0))
    >>> int(Worker.new(algorithm, fedsim.algorithms.Shared(params, jnp.int32(0)), params).step)
    0
    """

    opt_state: optax.OptState
    order: jax.Array
    step: jax.Array

    @classmethod
    def new(cls, algorithm: Any, shared: Any, params: Params) -> Worker:
        """Returns what a worker has before its first round."""
        start = LocalTraining.of(algorithm, shared).start(params)
        return cls(start.opt_state, jnp.zeros(2, jnp.uint32), jnp.int32(0))

    def continuing(self, client: Client, batches: Batches, most_steps: jax.Array | None = None) -> tuple[Client, Worker]:
        """Returns the client whose loop begins where its last one ended, and the worker with the order of its batches.

        With epochs instead of ``steps``, every round begins with new passes over its examples.
        """
        if batches.steps is None:
            return client, self
        order = jnp.where(self.step == 0, client.order, self.order)
        return client.continued(order, self.step, most_steps), self._replace(order=order)

    def run(self, training: LocalTraining, client: Client, params: Params) -> tuple[Local, Worker]:
        """Runs the local steps of a round from ``params``; returns their result, and the worker after them."""
        client, worker = self.continuing(client, training.batches)
        start = training.start(params, client.parts)._replace(opt_state=self.opt_state)
        local = client.for_each_batch(training.batches, training.step, start)
        return local, worker._replace(opt_state=local.opt_state, step=worker.step + client.num_steps)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OuterNesterov(Base):
    """What `DiLoCo` and StreamingDiLoCo share: a server with Nesterov momentum, and clients that keep their optimizer's state.

    Attributes:
      server_learning_rate, momentum: see `DiLoCo`.
    """

    server_learning_rate: float = 0.7
    momentum: float = 0.9
    weighting: Weighting = "uniform"
    server_optimizer: ClassVar[Any] = from_fields(  # type: ignore[misc]
        lambda self: optax.sgd(self.server_learning_rate, self.momentum, nesterov=True)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(server_learning_rate=self.server_learning_rate)
        checks.number(least=0, below=1, momentum=self.momentum)

    def check(self, data: FederatedData) -> None:
        Algorithm.check(self, data)  # Gradients that an optimizer accumulates are not lost, of which FedAvg would warn.
        check_descent(self.model, server_optimizer=self.server_optimizer)
        check_client_optimizer(self.model, self.client_optimizer)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DiLoCo(OuterNesterov, FedAvg):
    """FedAvg whose clients keep the state of their optimizer, and whose server has Nesterov momentum: few rounds of many steps.

    With ``Batches(steps=H)`` a client also continues to read its examples where it has stopped. So the rounds of one client,
    with a server that takes its parameters (``server_learning_rate=1.0, momentum=0.0``), are central training, whatever H.

    Attributes:
      client_optimizer: the paper's is ``optax.adamw(4e-4, weight_decay=0.1)``, with a schedule over steps. A schedule of optax
        counts the steps of all rounds, because its state is kept. (The command line has SGD.)
      server_learning_rate, momentum: of the server's SGD with Nesterov momentum, above 0 and in [0, 1). For another
        optimizer, override ``server_optimizer`` in a subclass.
      batches: ``Batches(steps=H)``; with epochs, every round makes new passes over the examples.
      weighting: default ``"uniform"``, see `FedAvg`.
      model: see `FedAvg`.

    >>> import fedsim
    >>> data = fedsim.datasets.load("digits", clients=2).train
    >>> algorithm = DiLoCo(model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1, 0.9),
    ...                    batches=fedsim.Batches(size=20, steps=10))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=2, seed=0).rounds(5):
    ...     state, info = algorithm.apply(state, cohort)
    >>> info.clients["num_steps"].tolist(), bool(max(info.clients["loss"]) < 0.5)
    ([10, 10], True)
    """

    capabilities = Capabilities(
        scalable=True,
        reads_on=True,
        model_parts=True,
        microbatches=True,
        refused_parts={
            "kept": "its clients keep the state of an optimizer of the parameters that the server sends; use FedAvg or a model "
            "without parameters that clients keep"
        },
    )

    def client_memory(self, shared: Any) -> Worker:
        return Worker.new(self, shared, shared.params)

    def train(self, shared: Any, client: Client) -> Local:
        local, _ = client.memory.run(self.local_training(shared, client), client, shared.params)
        return local

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        local, worker = client.memory.run(self.local_training(shared, client), client, shared.params)
        movement = tree.subtract(shared.params, local.params)
        return ClientUpdate(movement, self.weight(client), {"loss": local.loss.result()}, worker, local.parts)
