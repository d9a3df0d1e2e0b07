"""Masked sums of nodes: the bits of a simulation, what the server sees, lost nodes, those that come back, too few clients."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import math

import jax
import numpy as np
import optax
import pytest
from deployment.test_deployment import NearNodes, deployed, federation, largest_difference

import fedsim
from fedsim import deployment
from fedsim.aggregators import Clipped, SecureMean
from fedsim.configuration import Experiment, RunConfig, Settings
from fedsim.deployment import Node, NodeError, _node
from fedsim.deployment._deploy import for_nodes
from fedsim.deployment._masks import Masks
from fedsim.deployment._nodes import WHO
from fedsim.execution import report_problems

pytest.importorskip("cryptography")
MEAN = SecureMean(max_weight=150.0, minimum=3)


class WatchedNodes(NearNodes):
    """Nodes in this process, whose last replies are kept."""

    def ask(self, requests):
        found = super().ask(requests)
        self.replies = found.replies
        return found

    def introductions(self):
        return {number: deployment.decode(node.answer(WHO))[1] for number, node in enumerate(self.nodes)}

    def is_there(self, number):
        return number not in self.dead


def watched(folder, aggregator, name="FedAvg"):
    algorithm, sampler = federation(name, aggregator=aggregator)
    nodes = WatchedNodes(lambda: (algorithm, sampler), folder, 3)
    return algorithm, sampler, nodes, deployed(algorithm, folder, nodes)


def test_a_mask_is_the_key_stream_of_the_agreed_key():
    """RFC 5869 (HKDF) with HMAC of Python; the sums of three nodes, of which the second one adds one mask and subtracts one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    secrets = [bytes([number]) * 32 for number in range(3)]
    masks = [Masks(secret) for secret in secrets]
    keys = {number: each.public for number, each in enumerate(masks)}
    sums = [[np.full((2, 3), 7 + number, np.uint32), np.uint32(2**32 - number)] for number in (1, 2, 3)]

    def words(number, other):
        own = X25519PrivateKey.from_private_bytes(secrets[number])
        agreed = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(keys[other])))
        extracted = hmac.digest(bytes(32), agreed, hashlib.sha256)
        key = hmac.digest(extracted, b"fedsim mask of round 4\x01", hashlib.sha256)
        return np.frombuffer(Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(28)), "<u4")

    got = [each.added(sums[number], number, keys, round=4) for number, each in enumerate(masks)]
    assert [part.shape for part in got[1]] == [(2, 3), ()]
    flat = np.concatenate([np.ravel(part) for part in got[1]])
    plain = np.concatenate([np.ravel(part) for part in sums[1]])
    np.testing.assert_array_equal(flat, plain - words(0, 1) + words(1, 2))
    for at in range(2):
        total, expected = (sum(int(np.ravel(each[at])[0]) for each in some) % 2**32 for some in (got, sums))
        assert total == expected


def test_a_round_is_masked_once_and_with_the_keys_of_now():
    one, other = Masks(), Masks()
    keys, sums = {0: one.public, 1: other.public}, [np.zeros(2, np.uint32)]
    one.added(sums, 0, keys, round=3)
    with pytest.raises(ValueError, match="Expected a round after round 4, whose masks are used, got round 4: continue the run"):
        one.added(sums, 0, keys, round=3)
    with pytest.raises(ValueError, match="an older one in round 6, because node 1 has been started again: continue the run"):
        Masks().added(sums, 1, keys, round=5)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "aggregator"),
    [
        ("FedAvg", Clipped(2.0, inner=MEAN)),
        ("SCAFFOLD", MEAN),
    ],
    ids=["FedAvg", "SCAFFOLD"],
)
def test_the_bits_are_those_of_a_simulation_and_the_server_sees_masked_sums(name, aggregator, tmp_path):
    algorithm, sampler, nodes, apart = watched(tmp_path, aggregator, name)
    deployment.check_deployable(Experiment(apart, sampler, sampler.data), 3)
    state = other = algorithm.init(jax.random.key(0))
    for round in range(3):
        state, _ = algorithm.apply(state, sampler.cohort(round))
        other, _ = apart.apply(other, sampler.cohort(round))
    assert largest_difference(state.params, other.params) == 0
    # Integers of updates are small modulo 2^32, or large if negative; masked ones are anywhere.
    for reply in nodes.replies.values():
        words = next(array for array in deployment.decode(reply)[0] if array.dtype == np.uint32 and array.size > 100)
        assert 0.4 < np.mean((words > 2**30) & (words < 3 * 2**30)) < 0.6


@pytest.mark.slow
def test_a_round_without_the_answer_of_a_node_counts_for_nobody(tmp_path):
    """In the next round this node is known to be away, and the others mask without it; then it is back, with another key."""
    algorithm, sampler, nodes, apart = watched(tmp_path, MEAN)
    state = other = algorithm.init(jax.random.key(0))
    away = {0: set(), 1: {1}, 2: {1}, 3: set()}
    for round in range(4):
        cohort, nodes.unheard = sampler.cohort(round), away[round] if round == 1 else set()
        nodes.dead = away[round] if round == 2 else set()
        if round == 3:
            nodes.start()
        if away[round]:
            masked = pytest.warns(UserWarning, match="No update counts in round 2, because the masks of the other nodes do not")
            with pytest.warns(UserWarning, match="Node 1 did not answer"), masked if round == 1 else contextlib.nullcontext():
                other, info = apart.apply(other, cohort)
        else:
            other, info = apart.apply(other, cohort)
        alone = (cohort.clients % 3 == 1) if round == 2 else np.full(len(cohort), round == 1)
        state, _ = algorithm.apply(state, dataclasses.replace(cohort, work=np.where(alone, 0, 1).astype(np.float32)))
        assert int(info.num_aggregated) == np.count_nonzero(~alone)
    assert largest_difference(state.params, other.params) == 0
    lines = [json.loads(line) for line in (tmp_path / "deliveries.jsonl").read_text().splitlines()]
    assert [line["answered"] for line in lines] == [[0, 1, 2], [], [0, 2], [0, 1, 2]]
    others = "the sum is masked without node 1"
    assert lines[1]["lost"] == {"0": others, "1": "it is away", "2": others}


def test_the_sum_of_too_few_clients_is_not_asked_for(tmp_path):
    algorithm, sampler, nodes, apart = watched(tmp_path, dataclasses.replace(MEAN, minimum=5))
    state, cohort = algorithm.init(jax.random.key(0)), sampler.cohort(0)
    four_work = np.array([1, 1, 0, 1, 0, 1], np.float32)
    for few in (dataclasses.replace(cohort, clients=cohort.clients[:4]), dataclasses.replace(cohort, work=four_work)):
        with pytest.warns(UserWarning, match="No update counts in round 1, because 4 of its clients take a step, and the sum"):
            after, info = apart.apply(state, few)
        assert nodes.asked == 0
        assert int(info.num_aggregated) == 0
        assert largest_difference(state.params, after.params) == 0
    nodes.dead = {0, 1}
    with pytest.raises(
        NodeError, match="Expected at least 5 clients of round 1 at nodes that are there, got [0-4]: the sum of"
    ):
        apart.apply(state, cohort)


@pytest.mark.filterwarnings("ignore:No update counts in round 2", "ignore:In round 1, 4 client")
@pytest.mark.slow
def test_a_round_with_too_few_clients_is_that_of_a_simulation(tmp_path):
    """Four clients take a step in round 2, so that no client keeps anything of it."""
    algorithm, sampler, _, apart = watched(tmp_path, dataclasses.replace(MEAN, minimum=5), "SCAFFOLD")
    state = other = algorithm.init(jax.random.key(0))
    for round in range(3):
        cohort = sampler.cohort(round)
        cohort = dataclasses.replace(cohort, clients=cohort.clients[:4]) if round == 1 else cohort
        state, _ = algorithm.apply(state, cohort)
        other, _ = apart.apply(other, cohort)
    assert largest_difference(state.params, other.params) == 0


def test_a_node_with_an_update_that_does_not_count_sends_no_sum(tmp_path):
    """In round 2 the updates of node 2 are not finite, and the total of the other nodes would be that of too few clients."""
    mean = dataclasses.replace(MEAN, minimum=5)
    algorithm, sampler, nodes, apart = watched(tmp_path, mean, "SCAFFOLD")
    state = other = algorithm.init(jax.random.key(0))
    for round in range(3):
        cohort, good = sampler.cohort(round), nodes.nodes[2]
        work = np.full(len(cohort), round != 1, np.float32)
        state, _ = algorithm.apply(state, dataclasses.replace(cohort, work=work))
        if round == 1:
            assert np.count_nonzero(cohort.clients % 3 != 2) < mean.minimum <= len(cohort)
            diverging = dataclasses.replace(algorithm, client_optimizer=optax.sgd(1e30))
            nodes.nodes[2] = Node(diverging, sampler, 2, 3, tmp_path / "nodes" / "2")
            with (
                pytest.warns(UserWarning, match="Node 2 sent no sum in round 2, because . of its updates held a NaN or an inf"),
                pytest.warns(UserWarning, match="No update counts in round 2, because the masks of the other nodes do not"),
            ):
                other, info = apart.apply(other, cohort)
            assert int(info.num_aggregated) == 0
            assert deployment.decode(nodes.replies[2])[0] == []
            nodes.nodes[2] = good
        else:
            other, _ = apart.apply(other, cohort)
    assert largest_difference(state.params, other.params) == 0  # What clients keep is that of round 1, too.
    raising = dataclasses.replace(diverging, nonfinite="raise")
    nodes.nodes[2] = Node(raising, sampler, 2, 3, tmp_path / "nodes" / "2")
    with pytest.raises(NodeError, match="Node 2: FloatingPointError: . of its updates held a NaN or an infinity"):
        apart.apply(other, sampler.cohort(3))


def test_a_node_that_is_alone_is_not_asked_for_its_sum(tmp_path):
    """Its sum would have no mask. If no other node has clients in the round, it is the total."""
    algorithm, sampler, nodes, apart = watched(tmp_path, MEAN)
    state, cohort = algorithm.init(jax.random.key(0)), sampler.cohort(0)
    assert np.count_nonzero(cohort.clients % 3 == 2) >= MEAN.minimum
    nodes.dead = {0, 1}
    with pytest.warns(
        UserWarning, match="No update counts in round 1, because of the nodes that have its clients only node 2 is"
    ):
        after, info = apart.apply(state, cohort)
    assert int(info.num_aggregated) == 0
    assert largest_difference(state.params, after.params) == 0
    assert deployment.decode(nodes.replies[2])[0] == []
    (line,) = map(json.loads, (tmp_path / "deliveries.jsonl").read_text().splitlines())
    assert line["answered"] == []
    with pytest.warns(UserWarning, match="no node sent a sum of its 6 clients that counts. Another warning says why"):
        report_problems(algorithm, info, [cohort])
    own = dataclasses.replace(cohort, clients=cohort.clients[cohort.clients % 3 == 2])
    assert int(apart.apply(state, own)[1].num_aggregated) == len(own)


def test_a_worker_with_masks_does_not_end_when_it_is_idle(tmp_path, monkeypatch):
    """Another process would have another key, so the round would fail whose masks the other nodes have agreed on."""
    served = {}
    monkeypatch.setattr(_node, "serve", lambda node, path, *, watched, idle: served.update({path: idle}))
    for aggregator in ("mean", "secure_mean(max_weight=150)"):
        config = RunConfig(dataset="digits(clients=12)", model="digits_logistic", aggregator=aggregator)
        file = tmp_path / "node.json"
        file.write_text(json.dumps(for_nodes(config, Settings(folder="x"), 2, None) | {"folder": str(tmp_path)}))
        assert _node.main([str(file), "0", aggregator, "--idle", "5"]) == 0
    assert served == {"mean": 5, "secure_mean(max_weight=150)": math.inf}


def test_with_a_synchronization_model_masks_are_refused():
    algorithm, sampler = federation("FedAvg", aggregator=MEAN, staleness=fedsim.Staleness(bound=0))
    with pytest.raises(
        ValueError, match="SecureMean cannot be deployed, because with a synchronization model nodes send single"
    ):
        deployment.check_deployable(Experiment(algorithm, sampler, sampler.data), 2)
