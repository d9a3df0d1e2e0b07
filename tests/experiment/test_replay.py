"""`replay`: one client's round alone, against what the compiled rounds of the run did."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from drifting import Drifting
from federation import assert_trees_close

import fedsim
from fedsim import systems
from fedsim.commands import main
from fedsim.configuration import scheduled
from fedsim.experiment import replay, run


def trained(algorithm, sampler, folder, rounds):
    """Runs rounds one by one, with a checkpoint after every second one; returns the states before and after each."""
    states = [algorithm.with_memory(algorithm.init(fedsim.rng.stream(sampler.cohort(0).key, "init")), sampler.cohort(0).data)]

    def keep(line, state):
        if "num_examples" in line:
            states.append(state)

    run(
        algorithm, sampler, rounds=rounds, folder=folder, callbacks=[keep], rounds_per_dispatch=1, checkpoint_every=2,
        progress=False,
    )  # fmt: skip
    assert len(states) == rounds + 1
    return [fedsim.rounds._state.server_state(state) for state in states]


def plain(make_algorithm, **fields):
    return make_algorithm(**{"server_optimizer": optax.sgd(1.0), "execution": fedsim.Jit(), **fields})


def content(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def moved(before, after):
    return jax.tree.map(np.subtract, before.params, after.params)


@pytest.mark.slow
def test_a_single_client_moves_the_server_by_its_update(make_algorithm, data, tmp_path, capsys):
    algorithm, sampler = plain(make_algorithm), fedsim.UniformSampler(data, clients=1, seed=7)
    states = trained(algorithm, sampler, tmp_path / "r", rounds=6)
    before = content(tmp_path / "r")
    assert fedsim.experiment.Checkpoints(tmp_path / "r/checkpoints").rounds() == [4, 6]
    starts = {3: "the initial state, and running rounds 1 to 2 again.", 5: "the checkpoint after round 4."}
    for round, start in starts.items():
        cohort = sampler.cohort(round - 1)
        found = replay(tmp_path / "r", round=round, client=cohort.client_ids[0], algorithm=algorithm, sampler=sampler)
        assert_trees_close(found.update, moved(states[round - 1], states[round]))
        norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(moved(states[round - 1], states[round]))))
        assert found.norm == pytest.approx(norm, rel=1e-4) == pytest.approx(found.norm_received, rel=1e-4)
        assert (found.num_examples, found.num_steps) == (cohort.sizes[0], cohort.sizes[0] // 4)
        assert found.version == round - 1 and found.staleness is None and found.finite and not found.dropped
        assert capsys.readouterr().err == f"Starting from {start}\n"
    assert content(tmp_path / "r") == before


def test_a_stale_client_starts_from_its_own_version(make_algorithm, data, tmp_path):
    simple = plain(make_algorithm)
    made = scheduled(
        simple, fedsim.UniformSampler(data, clients=3, seed=7), rounds=6,
        synchronization=systems.Buffered(size=1, concurrency=4), devices=systems.Devices(systems.LogNormal(sigma=1.0)),
        faults=None,
    )  # fmt: skip
    states = trained(made.algorithm, made.sampler, tmp_path / "r", rounds=6)
    updates = made.schedule.updates
    assert updates.staleness[5] >= 2
    round = 6
    client, version = int(updates.client[round - 1]), int(updates.version[round - 1])
    found = replay(tmp_path / "r", round=round, client=client, algorithm=made.algorithm, sampler=made.sampler)
    assert (found.version, found.staleness) == (version, updates.staleness[round - 1])
    alone = fedsim.Cohort(data, np.array([client]), int(updates.round[round - 1]), made.sampler.key)
    assert_trees_close(found.update, moved(states[version], simple.apply(states[version], alone)[0]))
    assert_trees_close(found.received, moved(states[round - 1], states[round]))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["stream", "resident"])
def test_a_client_has_its_memory(model, data, tmp_path, memory):
    """A tenth of the client's previous update is added to its gradients, so its memory determines where the server moves."""
    algorithm = Drifting(model=model, batches=fedsim.Batches(size=4), execution=fedsim.Jit(memory=memory))
    sampler = fedsim.samplers.ScheduleSampler(data, [["0"], ["1"], ["0"], ["0"]], seed=7)
    states = trained(algorithm, sampler, tmp_path / "r", rounds=4)
    before = content(tmp_path / "r")
    for round in (3, 4):
        found = replay(tmp_path / "r", round=round, client="0", algorithm=algorithm, sampler=sampler)
        assert_trees_close(found.update, moved(states[round - 1], states[round]))
        without_memory = algorithm.apply(states[round - 1], sampler.cohort(round - 1))[0]
        first = jax.tree.leaves(moved(states[round - 1], fedsim.rounds._state.server_state(without_memory)))[0]
        assert not np.allclose(jax.tree.leaves(found.update)[0], first, rtol=1e-3)
    assert content(tmp_path / "r") == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mime", "FedProx"])
def test_the_updates_of_a_round_s_clients_have_its_mean(model, sampler, data, tmp_path, name):
    """Mime calls its clients twice, so that the second call needs the results of all."""
    algorithm = getattr(fedsim.algorithms, name)(
        model=model, client_optimizer=optax.sgd(0.1, momentum=0.5 if name == "Mime" else None), batches=fedsim.Batches(size=4),
        execution=fedsim.Jit(),
    )  # fmt: skip
    states = trained(algorithm, sampler, tmp_path / "r", rounds=2)
    found = [
        replay(tmp_path / "r", round=2, client=client, algorithm=algorithm, sampler=sampler)
        for client in sampler.cohort(1).client_ids
    ]
    weights = np.array([client.weight for client in found]) / sum(client.weight for client in found)
    updates = [client.update.params if hasattr(client.update, "params") else client.update for client in found]
    mean = jax.tree.map(lambda *xs: sum(w * x for w, x in zip(weights, xs, strict=True)), *updates)
    assert_trees_close(mean, moved(states[1], states[2]))


def test_an_update_that_is_not_finite_is_dropped(make_algorithm, data, tmp_path):
    sampler = fedsim.UniformSampler(data, clients=1, seed=7)
    good = plain(make_algorithm)
    run(good, sampler, rounds=1, folder=tmp_path / "r", progress=False)
    exploding = plain(make_algorithm, client_optimizer=optax.sgd(1e30))
    position = int(sampler.cohort(0).clients[0])
    found = replay(tmp_path / "r", round=1, client=position, algorithm=exploding, sampler=sampler)
    # The numbers are finite, and their squares are not.
    assert found.dropped and found.finite and found.norm > 1e25 and found.weight == found.norm_received == 0
    assert "finite" in str(found) and "yes: its squared norm, its weight or its memory is not finite" in str(found)
    endless = plain(make_algorithm, client_optimizer=optax.chain(optax.sgd(0.1), optax.scale(float("inf"))))
    found = replay(tmp_path / "r", round=1, client=position, algorithm=endless, sampler=sampler)
    assert found.dropped and not found.finite and not np.isfinite(found.norm)


@pytest.fixture
def finished(algorithm, sampler, tmp_path):
    run(algorithm, sampler, rounds=2, folder=tmp_path / "r", progress=False)
    return tmp_path / "r"


def test_what_cannot_be_replayed_says_why(algorithm, sampler, finished, tmp_path):
    made = {"algorithm": algorithm, "sampler": sampler}

    def refused(match, folder=finished, round=1, client="0", **changes):
        with pytest.raises(ValueError, match=match):
            replay(folder, round=round, client=client, **{**made, **changes})

    ids = sampler.cohort(0).client_ids
    absent = next(client for client in sampler.data.client_ids if client not in ids)
    refused(f"'{absent}' did not take part in round 1. The clients of round 1 are: {', '.join(ids)}", client=absent)
    refused("Client 12 is not in the population", client=12)
    refused("Client 'bob' is not in the population", client="bob")
    for round in (0, 3):
        refused(f"1 <= round <= 2, got round={round}: rounds count from 1", round=round)
    refused("There is no run in", folder=tmp_path / "nothing")
    refused("started in Python: pass its algorithm and its sampler", algorithm=None, sampler=None)
    refused("algorithm and sampler, or neither", sampler=None)

    class Whole(fedsim.algorithms.FedAvg):
        def apply(self, state, cohort):
            return state, {}

    refused(
        "Whole overrides apply", algorithm=Whole(**{f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)})
    )


ARGUMENTS = ["--model", "digits_logistic", "--rounds", "2", "--clients", "3", "--execution", "jit", "--no-progress"]


@pytest.mark.slow
def test_the_command_lists_clients_and_shows_one(tmp_path, capsys, monkeypatch):
    stops = []
    monkeypatch.setattr("sys.breakpointhook", lambda: stops.append(1))
    (tmp_path / "mine.py").write_text(
        "import fedsim, dataclasses\n"
        "@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)\n"
        "class Mine(fedsim.algorithms.FedAvg):\n"
        "    def client_update(self, shared, client):\n"
        "        breakpoint()\n"
        "        print('training', client.num_examples)\n"
        "        return super().client_update(shared, client)\n"
    )
    folder = str(tmp_path / "r")
    assert main(["run", *ARGUMENTS, "--algorithm", f"{tmp_path}/mine.py:Mine", "--folder", folder]) == 0
    capsys.readouterr()
    assert main(["replay", folder, "--round", "2"]) == 0
    names, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert names == ["client", "position", "examples", "steps"] and len(rows) == 3
    client, _, examples, steps = rows[1]
    stops.clear()
    assert main(["replay", folder, "--round", "2", "--client", client]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"training {examples}\nclient {client} in round 2\n") and len(stops) == 1
    assert err == "Starting from the initial state, and running round 1 again.\n"
    shown = dict(line.split(maxsplit=1) for line in out.splitlines() if line.startswith("  "))
    assert (shown["examples"], shown["steps"], shown["dropped"]) == (examples, steps, "no") and float(shown["loss"]) > 0


def test_the_runs_of_a_sweep_are_named(tmp_path, capsys):
    for name in ("seed=0", "seed=1"):
        (tmp_path / "s" / name).mkdir(parents=True)
        (tmp_path / "s" / name / "config.json").write_text("{}")
    (tmp_path / "s/sweep.json").write_text("{}")
    assert main(["replay", str(tmp_path / "s"), "--round", "1"]) == 2
    assert (
        f"holds a sweep: give the folder of one of its runs, in {tmp_path / 's'}: seed=0, seed=1.\n" in capsys.readouterr().err
    )
    assert main(["replay"]) == 2 and "usage: fedsim replay FOLDER --round R" in capsys.readouterr().out
