"""LG-FedAvg: local representations and a global head.

P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency, "Think locally, act
globally: Federated learning with local and global representations", 2020, Algorithm 1: https://arxiv.org/abs/2001.01523. The
paper's local parameters are called the body here, and its global parameters the head. Deviations: clients train without the
paper's optional auxiliary losses of the body. The paper starts from models that FedAvg has trained; here all bodies start from
the same random parameters (`fedsim.Model.starting_from` starts from others). For a client that never trained, the paper takes
the mean of all clients' outputs; here its body is the initial one.
"""

from __future__ import annotations

import dataclasses

from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._fedper import OwnHead
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LGFedAvg(OwnHead, FedAvg):
    """FedAvg of the head of a network, while every client keeps its own body, which is never sent: the opposite of FedPer.

    Clients train both together. Messages are small, because the head is. ``state.params`` holds only the head;
    `fedsim.evaluate_personalized` combines it with each client's body.

    Attributes:
      head: a function from a Haiku module's name and a parameter's name to whether the parameter belongs to the head, which is
        sent, see `fedsim.transfer.head_of`. With None, it is the module that the model creates last, usually the output layer.
        If all parameters belong to it, the algorithm is FedAvg. If none does, clients train alone.

    >>> import jax, optax, fedsim
    >>> algorithm = LGFedAvg(
    ...     model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=3))
    >>> state = algorithm.init(jax.random.key(0))
    >>> sorted(state.params), sorted(algorithm.client_memory(algorithm.broadcast(state)))
    (['linear_2'], ['linear', 'linear_1'])
    """

    capabilities = dataclasses.replace(OwnHead.capabilities, minimizes=False)  # Clients may keep all that is trained.

    def split(self, params: Params) -> tuple[Params, Params]:
        """Returns what is sent, the head, and what clients keep, the body."""
        body, head = super().split(params)
        return head, body
