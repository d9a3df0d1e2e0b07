"""FedDF: the server distils the ensemble of the clients' models into their average, on examples without labels.

T. Lin, L. Kong, S. U. Stich, M. Jaggi, "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020,
Algorithm 1: https://arxiv.org/abs/2006.07242. From the average of the clients' models x_k, the server takes steps on its own
examples d, which minimize::

    KL(softmax(mean_k f(x_k, d)) || softmax f(x, d))

with Adam, whose learning rate falls to 0 as a half cosine (the paper's η).

Deviations: each client computes the logits f(x_k, d) of its model before they are averaged, and sends them with its update. The
paper's server computes them from the models, which gives the same if updates are not changed on their way, and would need all
models at once. Clients have the weights of ``weighting`` also in the mean of the logits (the paper's is uniform). The number of
steps is fixed, by ``server_epochs`` passes; the paper's N counts steps, of which it takes at most about 10,000, and it stops
sooner if the accuracy on validation examples does not rise. Clients have one network.

The last deviation matters in studies of robustness: attacks change updates and not logits, and an aggregator such as a median
leaves out nobody's logits. If an attack changes what is sent, the logits are those of the attacker's honest model, so FedDF
withstands more here than with the paper's server, which computes them from the models that it receives. Attacks on the examples
of clients change both.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedsim import checks, metrics, tree
from fedsim.aggregators import AuxMean, WithAux
from fedsim.algorithm import Capabilities
from fedsim.algorithms._added_noise import check_adds_no_noise
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.algorithms._server_examples import Examples, SeededState, after_server_steps, server_seed
from fedsim.data import Batch, Batches, FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo

_TEACHER = "mean logits of the clients"  # the column of what the server learns
_AT_ONCE = 256  # examples of the server whose logits a client computes at a time


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedDF(FedAvg):
    """FedAvg whose server also learns the mean predictions of the clients' models, from examples without labels.

    The examples may come from another source than the clients'. Without ``server_examples``, the algorithm is FedAvg. The bits
    of a round count the logits that clients send, 32 for each class and example of the server.

    Attributes:
      server_examples: the examples of the server, feature name to array ``[n, ...]``; labels are not read. None if it has none.
        No option of the command line gives them: there, name a class of your own, ``FILE.py:CLASS``.
      server_epochs: the passes over them in each round.
      server_batch_size: examples in a batch of the server.
      distillation_learning_rate: of Adam at the start of a round, above 0.
      model, client_optimizer, server_optimizer, weighting: see `FedAvg`. The model is a classifier.
      aggregator: of the updates. Logits are averaged with any, and attackers send those of their honest models, so a run with
        an attack on updates does not show how robust FedDF is.

    Raises:
      ValueError: a number is not positive, the model has no ``num_classes``, the examples do not fit it, or the aggregator is
        secure and would not hide the logits. Before the first round: the aggregator adds noise for privacy, which would not be
        added to the logits.

    >>> import fedsim
    >>> data = fedsim.datasets.load("digits", clients=2)
    >>> algorithm = FedDF(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20),
    ...     server_examples={"x": data.test.columns["x"]})
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data.train, ["0", "1"]))
    >>> info.clients["bits_up"].tolist() == [32 * (650 + 10 * data.test.num_examples)] * 2  # parameters and logits
    True
    """

    capabilities = Capabilities(
        scalable=False,  # Logits must not be multiplied.
        microbatches=True,
        needed=("server_examples",),
        refused_parts=dict.fromkeys(
            ("statistics", "own_statistics", "kept"),
            "the server trains parameters alone; use a model without, such as one with GroupNorm",
        ),
    )

    server_examples: Examples | None = None
    server_epochs: int = 1
    server_batch_size: int = 128
    distillation_learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, server_epochs=self.server_epochs, server_batch_size=self.server_batch_size)
        checks.positive(distillation_learning_rate=self.distillation_learning_rate)
        if self.server_examples is None:
            return
        if self.model.num_classes is None:
            raise ValueError("Expected a classifier, got a model with num_classes=None: give its number of classes.")
        size = min((len(column) for column in self.server_examples.values()), default=0)
        if not size:
            raise ValueError(
                "Expected server_examples with at least one example, got none: give some, or leave server_examples out."
            )
        labels = {name: column for name, column in self.model.dummy_examples(size).items() if name == "y"}
        self.model.check(FederatedData.from_clients({"server": labels | dict(self.server_examples)}))
        if (mean := self.aggregator.innermost).is_secure:
            raise ValueError(
                f"Expected an aggregator other than {type(mean).__name__} with FedDF, got {self.aggregator}: the logits of the "
                "server's examples would be sent unmasked. Use FedAvg."
            )
        object.__setattr__(self, "aggregator", AuxMean.wrap(self.aggregator))

    def check(self, data: FederatedData) -> None:
        super().check(data)
        if self.server_examples is not None:
            check_adds_no_noise(self, "clients also send logits of the server's examples, which would have no noise")

    def init(self, key: jax.Array) -> SeededState:
        return SeededState(**super().init(key)._asdict(), server_seed=server_seed(key))

    def logits(self, params: Params) -> jax.Array:
        """Returns the logits of the server's examples, ``float32 [n, num_classes]``."""

        def of_one(example: Any) -> jax.Array:
            return self.model.apply_for_eval(params, jax.tree.map(lambda x: x[None], example))[0]

        columns = {name: jnp.asarray(column) for name, column in (self.server_examples or {}).items()}
        return jax.lax.map(of_one, columns, batch_size=_AT_ONCE)

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        if self.server_examples is None:
            return super().client_update(shared, client)
        local = self.train(shared, client)
        movement = tree.subtract(shared.params, local.params)
        update = WithAux(movement, self.logits(local.params))
        return ClientUpdate(update, self.weight(client), {"loss": local.loss.result()})

    def distillation_loss(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the mean divergence of the model's predictions from those of the ensemble, ``float32 []``, in nats."""
        teacher = jax.nn.log_softmax(batch.examples[_TEACHER])
        student = jax.nn.log_softmax(self.model.outputs(params, batch))
        return metrics.masked_mean(jnp.sum(jnp.exp(teacher) * (teacher - student), axis=1), batch.mask)

    def server_update(self, state: SeededState, update: Any, info: RoundInfo) -> SeededState:
        if self.server_examples is None:
            return super().server_update(state, update, info)
        state, batches = super().server_update(state, update.update, info), Batches(self.server_batch_size, self.server_epochs)
        steps = batches.num_steps(len(update.aux))
        optimizer = optax.adam(optax.cosine_decay_schedule(self.distillation_learning_rate, int(steps)))
        training = LocalTraining(self.distillation_loss, batches, optimizer)
        examples = {**self.server_examples, _TEACHER: update.aux}
        with jax.numpy_dtype_promotion("standard"):  # which optax.adam requires
            params = after_server_steps(training, state.params, examples, state.server_seed, state.round)
        return state._replace(params=params)
