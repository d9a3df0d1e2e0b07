"""Streaming DiLoCo: fragments of the model are synchronized in turn, while training goes on.

A. Douillard, Y. Donchev, K. Rush, S. Kale, Z. Charles, Z. Garrett, G. Teston, D. Lacey, R. McIlroy, J. Shen, A. Ramé, A. Szlam,
M. Ranzato, P. Barham, "Streaming DiLoCo with overlapping communication: Towards a distributed free lunch", 2025, Algorithm 2:
https://arxiv.org/abs/2501.18512. A round has the H local steps in which each of the P fragments is synchronized once, fragment
p after (p + 1) H / P of them. With θ_m the parameters of worker m, and θ those of the server as the worker received them last,
after a step of the workers at which fragment p is due, and τ steps later::

    Δ_{m,p} = θ_p - θ_{m,p},     θ_p = OuterOpt(θ_p, mean_m Δ_{m,p})
    θ_{m,p} = α θ_{m,p} + (1 - α) θ_p

P is ``fragments``, τ is ``delay``, α is ``alpha`` and H is ``batches.steps``; for the others see `fedsim.algorithms.DiLoCo`.
Deviations: the quantizers of `fedsim.compressors` with 4 bits, such as ``aggregator=Compressed(QSGD(levels=7))``, have evenly
spaced levels, which the paper's 4-bit floats do not have. In the paper all workers participate in every round; here a worker
that was absent, or whose update did not count, takes all parameters of the server when it comes back.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._diloco import OuterNesterov, Worker
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._server_step import ServerState, Shared, after_step
from fedsim.model import Model, Params, named
from fedsim.names import did_you_mean
from fedsim.rounds import Client, Clients, ClientUpdate
from fedsim.transfer import module_names


class StreamingWorker(NamedTuple):
    """What a worker keeps: its parameters, those of the server as it received them last, and how many fragments it has sent.

    ``sent`` counts from the run's first round, ``int32 []``, as if the worker had always participated; -1 for a new worker.
    """

    params: Params
    received: Params
    worker: Worker
    sent: jax.Array


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A part of a model: parameters by name, each with the rows that belong to the part; None for the whole array.

    >>> fragment = Fragment({"layers/w": (1,), "head/b": None})
    >>> params = {"layers": {"w": jnp.array([1.0, 2.0])}, "head": {"w": jnp.float32(3), "b": jnp.float32(4)}}
    >>> part = fragment.take(params)
    >>> jax.tree.map(lambda x: x.tolist(), part)
    {'head': {'b': 4.0, 'w': None}, 'layers': {'w': [2.0]}}
    >>> jax.tree.map(lambda x: x.tolist(), fragment.put(params, jax.tree.map(lambda x: -x, part)))
    {'head': {'b': -4.0, 'w': 3.0}, 'layers': {'w': [1.0, -2.0]}}
    """

    rows: dict[str, tuple[int, ...] | None]

    def take(self, params: Params) -> Params:
        """Returns the part of the parameters, with None in place of the other arrays."""

        def of_leaf(path: Any, x: jax.Array) -> jax.Array | None:
            name = _name(path)
            if name not in self.rows:
                return None
            rows = self.rows[name]
            return x if rows is None else x[np.array(rows)]

        return jax.tree_util.tree_map_with_path(of_leaf, params)

    def put(self, params: Params, part: Params) -> Params:
        """Returns the parameters with this part of them in place of their own."""
        new = dict(named(part))

        def of_leaf(path: Any, x: jax.Array) -> jax.Array:
            name = _name(path)
            if name not in self.rows:
                return x
            rows = self.rows[name]
            return new[name] if rows is None else x.at[np.array(rows)].set(new[name])

        return jax.tree_util.tree_map_with_path(of_leaf, params)


def fragments_of(model: Model, fragments: int | Sequence[str | Sequence[str]], *, strided: bool) -> tuple[Fragment, ...]:
    """Returns the fragments of a model, see `StreamingDiLoCo`.

    >>> import fedsim
    >>> [sorted(each.rows) for each in fragments_of(fedsim.models.digits_dense(), 2, strided=True)]
    [['linear/b', 'linear/w', 'linear_2/b', 'linear_2/w'], ['linear_1/b', 'linear_1/w']]
    >>> language = fedsim.models.lm_tiny(layers=4)
    >>> first, last = fragments_of(language, 2, strided=False)
    >>> first.rows["embedding/embeddings"], first.rows["layers/key/w"], last.rows["layers/key/w"], last.rows["norm/scale"]
    (None, (0, 1), (2, 3), None)
    """
    params = named(jax.eval_shape(model.init, jax.random.key(0)))
    names = [name for name, _ in params]
    if not isinstance(fragments, int):
        groups = [[group] if isinstance(group, str) else list(group) for group in fragments]
        found = [[name for name in names if any(fnmatch.fnmatch(name, each) for each in group)] for group in groups]
        for group, own in zip(groups, found, strict=True):
            if not own:
                raise ValueError(
                    f"There is no parameter {' or '.join(map(repr, group))} for a fragment.{did_you_mean(group[0], names)} The "
                    f"parameters are {', '.join(names)}."
                )
        for name in names:
            if (count := sum(name in own for own in found)) != 1:
                raise ValueError(
                    f"Expected fragments that have each parameter once, got {name!r} in {count} of "
                    f"fragment_names={fragments!r}: "
                    "change the patterns."
                )
        return tuple(Fragment(dict.fromkeys(own)) for own in found)
    layers = _layers(model, params)
    if fragments > len(layers):
        raise ValueError(f"Expected fragments <= {len(layers)}, the number of layers, got fragments={fragments}: use fewer.")
    numbers = np.arange(len(layers))
    parts = [numbers[p::fragments] for p in range(fragments)] if strided else np.array_split(numbers, fragments)
    return tuple(_joined([layers[i] for i in part], dict(params)) for part in parts)


def _layers(model: Model, params: list[tuple[str, Any]]) -> list[dict[str, tuple[int, ...] | None]]:
    """Returns the rows of each layer: those of stacked layers, together with what is before or after, else the modules."""
    stacked = {name: x.shape[0] if x.shape else 0 for name, x in params if name.startswith("layers/")}
    if len(counts := set(stacked.values())) == 1 and (count := counts.pop()) > 1:
        layers: list[dict[str, tuple[int, ...] | None]] = [dict.fromkeys(stacked, (i,)) for i in range(count)]
        # The order of names is that of the modules, in which the embedding is before the layers.
        order = module_names(model)
        first = min(i for i, module in enumerate(order) if module.startswith("layers"))
        for name, _ in params:
            if name not in stacked:
                place = next(i for i, module in enumerate(order) if name.startswith(f"{module}/"))
                layers[0 if place < first else -1][name] = None
        return layers
    order = module_names(model)
    own = [{name: None for name, _ in params if name.rpartition("/")[0] == module} for module in order]
    if sum(map(len, own)) != len(params):  # Modules are nested, as those of Flax.
        own = [{name: None for name, _ in params if name.split("/")[0] == module} for module in order]
    return [dict(each) for each in own if each]


def _joined(layers: Sequence[dict[str, tuple[int, ...] | None]], shapes: dict[str, Any]) -> Fragment:
    """Returns the fragment of these layers. An array all of whose rows belong to it is whole."""
    rows: dict[str, tuple[int, ...] | None] = {}
    for layer in layers:
        for name, own in layer.items():
            rows[name] = None if own is None else (*(rows.get(name) or ()), *own)
    return Fragment({n: None if own is None or len(own) == shapes[n].shape[0] else own for n, own in rows.items()})


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StreamingDiLoCo(OuterNesterov, FedAvg):
    """DiLoCo whose workers send one fragment of the model after another, and train on until it comes back, τ steps later.

    A round has one call of the clients per fragment, whose messages are this fragment alone. With the defaults it is `DiLoCo`.
    A worker keeps its parameters, so its memory is three times as large as DiLoCo's with SGD and momentum. ``bits_down`` is
    without the first download of the model, and that of a worker that was absent.

    Attributes:
      fragments: the number of fragments, each of consecutive layers. Layers are the modules in the order in which the model
        creates them. If all parameters under ``layers/`` have as many rows, as in `fedsim.models.decoder`, layers are these
        rows; what comes before them belongs to the first one, and what comes after to the last one.
      fragment_names: instead of the number, for each fragment the patterns (`fnmatch`) of the names of its parameters, such as
        ``["linear/*", ["linear_1/*", "linear_2/*"]]``.
      strided: whether fragment p of P has the layers p, p + P, p + 2 P, ..., as the paper recommends.
      delay: τ, the local steps between sending a fragment and receiving the server's; less than those between two fragments.
      alpha: α in [0, 1], the weight of the worker's own parameters when it receives a fragment. With 1 it ignores it.
      batches: ``Batches(steps=H)``, where each of the fragments is sent once in H steps. With epochs there can be only one
        fragment, without a delay.
      server_learning_rate, momentum, client_optimizer, weighting, model: see `DiLoCo`.

    Raises:
      ValueError: a number is out of range, a pattern matches no parameter, or a parameter is not in exactly one fragment.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits", clients=2).train
    >>> algorithm = StreamingDiLoCo(
    ...     model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=20, steps=8),
    ...     client_optimizer=optax.sgd(0.1, 0.9),
    ...     fragment_names=["linear/w", "linear/b"], delay=1, alpha=0.5,
    ...     aggregator=fedsim.aggregators.Compressed(fedsim.compressors.QSGD(levels=7)))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> info.clients["bits_up"].tolist()  # 4 for each of 650 parameters, and the norms of two arrays
    [2664, 2664]
    """

    capabilities = Capabilities(
        scalable=False,
        reads_on=True,
        microbatches=True,
        refused_parts=dict.fromkeys(
            ("statistics", "own_statistics", "kept"),
            "its workers send parameters in fragments, to which these do not belong; use DiLoCo or a model without, such as "
            "one with GroupNorm",
        ),
    )

    # Its workers go on from parameters of their own, and not in one loop of steps from those of the server.
    train: ClassVar[Any] = None

    fragments: int = 1
    fragment_names: Sequence[str | Sequence[str]] | None = None
    strided: bool = False
    delay: int = 0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.truth(strided=self.strided)
        checks.whole(0, delay=self.delay)
        checks.number(least=0, most=1, alpha=self.alpha)
        checks.whole(1, fragments=self.fragments)
        if self.fragment_names is not None and self.fragments != 1:
            raise ValueError(
                f"Expected fragments or fragment_names, got fragments={self.fragments} and "
                f"fragment_names={self.fragment_names!r}: leave one of them out."
            )
        if self.staleness is not None:
            raise ValueError(
                "Expected no staleness and no virtual clock, because StreamingDiLoCo calls its clients several times in a "
                f"round, got staleness={self.staleness}: run it in ordinary rounds, or use DiLoCo."
            )
        count, steps = len(self._fragments), self._steps
        if steps is None:
            if count > 1 or self.delay:
                raise ValueError(
                    f"Expected batches with steps for {count} fragments and delay={self.delay}, got "
                    f"batches={self.batches}: give Batches(steps=...), the local steps in which each fragment is sent once."
                )
        elif steps < count or self.delay >= steps // count:
            raise ValueError(
                f"Expected a delay below the steps between two fragments, {steps} / {count}, got delay={self.delay}: lower it, "
                "or use more steps or fewer fragments."
            )

    @functools.cached_property
    def _fragments(self) -> tuple[Fragment, ...]:
        return fragments_of(self.model, self.fragment_names or self.fragments, strided=self.strided)

    @property
    def _steps(self) -> int | None:
        """H; None with epochs."""
        return None if self.batches.steps is None else int(self.batches.num_steps(1))

    def init(self, key: jax.Array) -> ServerState:
        params = self.model.init(key)
        opt_states = tuple(self.server_optimizer.init(each.take(params)) for each in self._fragments)
        return ServerState(params, opt_states, jnp.int32(0))

    def client_memory(self, shared: Shared) -> StreamingWorker:
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(self.model.init, jax.random.key(0)))
        return StreamingWorker(params, params, Worker.new(self, shared, params), jnp.int32(-1))

    def round(self, state: ServerState, clients: Clients) -> tuple[ServerState, Any]:
        before, loss, squared_norms = state, jnp.float32(0), jnp.float32(0)
        for number, fragment in enumerate(self._fragments):
            # Workers have the other fragments from earlier rounds.
            update = functools.partial(self.synchronize, number, state.params)
            gradient, info = clients.aggregate(update, Shared(self._fragments[number - 1].take(state.params), before.round))
            own = ServerState(fragment.take(state.params), state.opt_state[number], before.round)
            own = tree.select(
                self.aggregator.acts_on(info.num_aggregated), after_step(own, gradient, self.server_optimizer), own
            )
            opt_states = (*state.opt_state[:number], own.opt_state, *state.opt_state[number + 1 :])
            state = ServerState(fragment.put(state.params, own.params), opt_states, before.round + 1)
            loss = loss + info.clients["loss"]
            squared_norms = squared_norms + jnp.square(info.clients["update_norm"]) if self.update_norms else squared_norms
        norms = {"update_norm": tree.root(squared_norms)} if self.update_norms else {}
        return state, info._replace(clients={**info.clients, **norms, "loss": loss})

    def synchronize(self, number: int, current: Params, shared: Shared, client: Client) -> ClientUpdate:
        """Trains until fragment ``number`` is due and sends it. ``current`` are the server's parameters."""
        fragment, arriving, memory = self._fragments[number], self._fragments[number - 1], client.memory
        count, sent = len(self._fragments), shared.round * len(self._fragments) + number
        is_current = memory.sent == sent
        received = arriving.put(tree.select(is_current, memory.received, current), shared.params)
        training = self.local_training(shared, client)
        start = training.start(tree.select(is_current, memory.params, received), client.parts)
        opt_state = tree.select(memory.sent < 0, start.opt_state, memory.worker.opt_state)

        def receive(params: Params, now: jax.Array) -> Params:
            theirs = arriving.take(received)
            mixed = tree.add(theirs, tree.scale(tree.subtract(arriving.take(params), theirs), self.alpha))
            return tree.select(now & is_current, arriving.put(params, mixed), params)

        def step(local: Any, batch: Any) -> Any:
            if self.delay:
                local = local._replace(params=receive(local.params, batch.step == self.delay))
            return training.step(local, batch)

        batches, taken, most = self.batches, client.num_steps, None
        if self._steps is not None and count > 1:
            first, last = (self._steps * each // count for each in (number, number + 1))
            batches = dataclasses.replace(batches, steps=last - first, max_steps=None)
            taken = most = jnp.clip(client.num_steps - first, 0, last - first)
        start = start._replace(opt_state=opt_state)
        if not self.delay:
            start = start._replace(params=receive(start.params, jnp.bool_(True)))
        continuing, worker = memory.worker.continuing(client, self.batches, most)
        local = continuing.for_each_batch(batches, step, start)
        if self.delay:  # A straggler may have stopped before.
            local = local._replace(params=receive(local.params, taken <= self.delay))
        worker = worker._replace(opt_state=local.opt_state, step=worker.step + taken)
        loss = local.loss.result()
        if count > 1:  # The info of a round has the mean over its steps.
            loss = loss * taken.astype(jnp.float32) / jnp.maximum(client.num_steps, 1).astype(jnp.float32)
        movement = tree.subtract(fragment.take(received), fragment.take(local.params))
        kept = StreamingWorker(local.params, received, worker, sent + 1)
        return ClientUpdate(movement, self.weight(client), {"loss": loss}, kept, local.parts)
