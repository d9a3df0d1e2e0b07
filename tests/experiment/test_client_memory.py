"""Client memory in runs: saved, resumed with the same bits, and refused for another algorithm or population."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import federation
import jax
import pytest
from drifting import Drifting, bits

import fedsim
from fedsim.data import FormatError
from fedsim.data import _row_store as row_store
from fedsim.experiment import Checkpoints, restore, run

EXECUTIONS = {
    "streamed": fedsim.Jit(memory="stream"),
    "on the device": fedsim.Jit(memory="resident"),
    "streamed, 2 devices": fedsim.Pmap(devices=2, memory="stream"),
    "debug": fedsim.Debug(),
}


class KilledError(Exception):
    """Simulates that the process is killed."""


def die_after(round):
    def die(line, state):
        if line["round"] >= round:
            raise KilledError

    return [die]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Makes the store reuse rows as soon as no state refers to them."""
    monkeypatch.setattr("fedsim.data._row_store._CHUNK_BYTES", 300)


@pytest.fixture(scope="module")
def algorithms(model):
    return {how: Drifting(model=model, batches=fedsim.Batches(size=4), execution=way) for how, way in EXECUTIONS.items()}


@pytest.fixture(params=EXECUTIONS)
def arguments(request, algorithms, sampler, data):
    return dict(algorithm=algorithms[request.param], sampler=sampler, rounds=12, progress=False, checkpoint_every=2)


@pytest.fixture
def streamed(algorithms, sampler):
    return dict(algorithm=algorithms["streamed"], sampler=sampler, rounds=12, progress=False, checkpoint_every=2)


def killed(arguments, folder, round):
    with pytest.raises(KilledError):
        run(**arguments, folder=folder, callbacks=die_after(round), rounds_per_dispatch=1)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_bits_of_an_unbroken_one(arguments, tmp_path):
    arguments |= {"checkpoint_every": 3, "rounds": 8}
    unbroken = bits(run(**arguments).state)
    for death in (2, 5, 7):
        killed(arguments, tmp_path / "r", death)
    result = run(**arguments, folder=tmp_path / "r")
    assert result.round == 8 and bits(result.state) == unbroken
    assert (
        bits(run(**arguments, folder=tmp_path / "r").state) == unbroken
    )  # the run is finished, so this returns the saved state
    restored, round = restore(tmp_path / "r", arguments["algorithm"])
    assert round == 8 and bits(restored) == unbroken
    assert len(jax.tree.leaves(restored.clients)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("streamed", "on the device"), ("on the device", "streamed"), ("debug", "streamed")]
)
def test_the_execution_may_change_when_a_run_is_resumed(algorithms, streamed, before, after, tmp_path):
    unbroken = run(**streamed).state
    killed(streamed | {"algorithm": algorithms[before]}, tmp_path / "r", 5)
    for death in (7, 9):
        killed(streamed | {"algorithm": algorithms[after]}, tmp_path / "r", death)
    result = run(**streamed | {"algorithm": algorithms[before]}, folder=tmp_path / "r")
    federation.assert_trees_close(federation.plain(result.state), federation.plain(unbroken), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_every_kept_checkpoint_can_be_restored(streamed, tmp_path):
    """The best checkpoint is that of round 2, whose rows would otherwise be reused many times, also after a restart."""
    seen = {}

    def evaluate(state):
        seen[int(state.server.round)] = bits(state)
        return {"accuracy": 0.9 if int(state.server.round) == 2 else 0.5}

    arguments = streamed | dict(evaluate=evaluate, evaluate_every=1, rounds=40)
    for death in (7, 15, 30):
        killed(arguments, tmp_path / "r", death)
    run(**arguments, folder=tmp_path / "r")
    best, round = restore(tmp_path / "r", streamed["algorithm"], "best")
    assert round == 2 and bits(best) == seen[2]
    last, round = restore(tmp_path / "r", streamed["algorithm"])
    assert round == 40 and bits(last) == seen[40]
    checkpoints = Checkpoints(tmp_path / "r/checkpoints")
    assert checkpoints.rounds() == [2, 38, 40]
    row = last.clients.store.row_bytes
    # Rows of all 12 clients, of the 6 clients up to round 2, and of 3 clients per round since the second-last checkpoint.
    max_rows = 1.25 * (12 + 6 + 7 * 3) + 1 + 300 // row
    assert (tmp_path / "r/checkpoints/clients.rows").stat().st_size <= 4096 + row * max_rows


def test_using_a_restored_state_does_not_change_the_run(streamed, tmp_path):
    killed(streamed, tmp_path / "r", 7)
    file = tmp_path / "r/checkpoints/clients.rows"
    before = file.read_bytes()
    state, round = restore(tmp_path / "r", streamed["algorithm"])
    kept = bits(state)
    for offset in range(20):
        after, _ = streamed["algorithm"].apply(state, streamed["sampler"].cohort(round + offset))
    assert file.read_bytes() == before and bits(state) == kept != bits(after)
    file.write_bytes(b"")
    assert bits(state) == kept


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_restored_row_is_read_once(streamed, which, tmp_path, monkeypatch):
    """Only rows of the restored checkpoint are read, and each row is compared with its checksum."""
    run(**streamed, folder=tmp_path / "r", evaluate=lambda state: {"accuracy": 0.5}, evaluate_every=2)
    file = tmp_path / "r/checkpoints/clients.rows"
    calls, bytes_of = [], []

    def counted(file, views, at, whole=row_store._preadv):
        calls.append(at)
        bytes_of.append(sum(view.nbytes for view in views))
        return whole(file, views, at)

    read = Checkpoints._read
    monkeypatch.setattr("fedsim.data._row_store._preadv", counted)
    monkeypatch.setattr(Checkpoints, "_read", lambda self, round: calls.append(f"round {round}") or read(self, round))
    state, round = restore(tmp_path / "r", streamed["algorithm"], which)
    rows = state.clients
    assert calls[0] == f"round {round}" and len(set(calls)) == len(calls) == 1 + len(rows)
    assert sum(bytes_of) == len(rows) * rows.store.row_bytes
    (place, *_) = calls[1:]
    damage(file, place)
    with pytest.warns(UserWarning, match="damaged") if which == "last" else pytest.raises(FormatError, match="is not what was"):
        restore(tmp_path / "r", streamed["algorithm"], which)


def test_a_damaged_row_is_reported_and_an_older_checkpoint_is_used(streamed, tmp_path):
    unbroken = bits(run(**streamed).state)
    killed(streamed, tmp_path / "r", 9)
    checkpoints = Checkpoints(tmp_path / "r/checkpoints")
    older, newer = checkpoints.rounds()
    index = {}
    for round in (older, newer):
        like = streamed["algorithm"].with_memory(streamed["algorithm"].init(jax.random.key(0)), streamed["sampler"].data)
        index[round] = Checkpoints(tmp_path / "r/checkpoints").load(round, like).clients.index
        row_bytes = like.clients.store.row_bytes
    row = (set(index[newer].tolist()) - set(index[older].tolist())).pop()
    damage(tmp_path / "r/checkpoints/clients.rows", 4096 + row * row_bytes)
    with pytest.warns(
        UserWarning, match=f"checkpoint of round {newer} is damaged and skipped.*row {row} is not what was written"
    ):
        result = run(**streamed, folder=tmp_path / "r")
    assert bits(result.state) == unbroken
    assert checkpoints.rounds()[-1] == 12 and bits(restore(tmp_path / "r", streamed["algorithm"])[0]) == unbroken


def damage(file, byte):
    whole = bytearray(file.read_bytes())
    whole[byte] ^= 1
    file.write_bytes(whole)


def test_a_damaged_or_missing_row_file_is_an_error(streamed, tmp_path):
    killed(streamed, tmp_path / "r", 9)
    file = tmp_path / "r/checkpoints/clients.rows"
    whole = file.read_bytes()
    file.write_bytes(whole[:4096])
    with pytest.warns(UserWarning, match="clients.rows is truncated"), pytest.raises(ValueError, match="All checkpoints in"):
        run(**streamed, folder=tmp_path / "r")
    file.write_bytes(b"something else" * 1000)
    with pytest.raises(ValueError, match=r"clients.rows \(14000 bytes\) is of another format"):
        run(**streamed, folder=tmp_path / "r")
    file.unlink()
    with pytest.warns(UserWarning, match="clients.rows is missing"), pytest.raises(ValueError, match="All checkpoints in"):
        run(**streamed, folder=tmp_path / "r")
    file.write_bytes(whole)
    assert run(**streamed, folder=tmp_path / "r").round == 12


@pytest.mark.parametrize("how", ["streamed", "on the device"])
def test_another_population_s_rows_are_refused_before_the_first_round(streamed, algorithms, how, tmp_path):
    """The other population differs only in its client ids. It is also refused before there is a checkpoint."""
    arguments = streamed | {"algorithm": algorithms[how]}
    data = arguments["sampler"].data
    other = fedsim.FederatedData(data.columns, data.offsets, [f"x{i}" for i in range(data.num_clients)])
    for round, folder in ((5, tmp_path / "a"), (1, tmp_path / "b")):
        killed(arguments, folder, round)
        theirs = arguments | {"sampler": fedsim.UniformSampler(other, clients=3, seed=7), "folder": folder}
        with pytest.raises(ValueError, match=r"population, client ids and sizes \(hash\): .* in this run, .* in the folder"):
            run(**theirs)
        (folder / "config.json").unlink()  # the row file also records the client ids
        with pytest.raises(
            ValueError, match=r"(?s)clients.rows holds.*client ids \(hash\): \w+ in the file, \w+ here.*another folder"
        ):
            run(**theirs)


def test_another_algorithm_s_rows_are_refused_before_the_first_round(streamed, model, tmp_path):
    class Renamed(Drifting):
        pass

    streamed["config"] = {}
    killed(streamed, tmp_path / "r", 5)
    renamed = Renamed(model=model, batches=fedsim.Batches(size=4))
    with pytest.raises(ValueError, match="algorithm: Drifting in the file, Renamed here"):
        run(**streamed | {"algorithm": renamed}, folder=tmp_path / "r")
    with pytest.raises(ValueError, match="algorithm: Drifting in the file, Renamed here"):
        restore(tmp_path / "r", renamed)


def test_a_full_disk_ends_the_run_without_loss_of_data(streamed, tmp_path, monkeypatch):
    unbroken, calls, whole = bits(run(**streamed).state), [], os.pwritev

    def full(fd, views, at):
        calls.append(at)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(fd, views, at)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", full)
        with pytest.raises(OSError, match=r"clients.rows: No space left.*then continue after round 6 with: the same call"):
            run(**streamed, folder=tmp_path / "r", rounds_per_dispatch=1)
    assert Checkpoints(tmp_path / "r/checkpoints").rounds()[-1] == 6
    assert bits(run(**streamed, folder=tmp_path / "r").state) == unbroken


def test_a_folder_without_its_checkpoints_starts_again(streamed, tmp_path):
    killed(streamed, tmp_path / "r", 9)
    shutil.rmtree(tmp_path / "r/checkpoints")
    assert bits(run(**streamed, folder=tmp_path / "r").state) == bits(run(**streamed).state)


def test_without_orbax_client_memory_is_not_in_a_file(streamed, tmp_path, monkeypatch):
    expected = bits(run(**streamed).state)
    monkeypatch.setattr(Checkpoints, "available", staticmethod(lambda: False))
    with pytest.warns(UserWarning, match="No checkpoints will be written"):
        result = run(**streamed, folder=tmp_path / "r")
    assert bits(result.state) == expected and not (tmp_path / "r/checkpoints").exists()


@pytest.mark.slow
def test_scaffold_over_342_477_clients_stays_within_its_budgets(tmp_path):
    """A smaller version of `python -m benchmarks --only memory`: fewer rounds, 64 kB per client, resumed once."""
    arguments = {"clients": 342_477, "floats": 2**14, "cohort": 10, "rounds": 24, "chunk_bytes": 2**20}
    command = [sys.executable, "-m", "benchmarks.populations", "client_memories", json.dumps(arguments)]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], env=environment, timeout=600)
    figures = json.loads(done.stdout)
    assert 230 < figures["seen"] <= 240 and figures["row_mb"] == 2**16 / 1e6
    assert figures["peak_mb"] < 2000
    assert figures["seen"] * figures["row_mb"] <= figures["disk_mb"] <= figures["budget_mb"] < 40
