"""Tests that `fuzz.py` detects readers that fail in other ways than by a `FormatError`."""

import dataclasses
import json

import numpy as np
import pytest
from fuzz import assert_only_format_errors, mutations

import fedsim
from fedsim.experiment import RunConfig, Settings, read_config, read_sweep
from fedsim.experiment.driving import stored_run
from fedsim.reproductions._record import read as read_record

ONE_CLIENT = "fedsim.FederatedData.from_arrays({'x': numpy.zeros(1)}, sizes=[1])"


class Reader:
    """A picklable function of ``path``, given as source code that is evaluated for damaged files."""

    def __init__(self, on_damage):
        imports = "fedsim, numpy, os, time = map(__import__, ('fedsim', 'numpy', 'os', 'time'))"
        self.source = f"exec({imports!r}, globals()) or (lambda p: {ONE_CLIENT} if p.read_bytes() == b'whole' else {on_damage})"

    def __reduce__(self):
        return eval, (self.source,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_damage", "message"),
    [
        ("os.abort()", "mutation 0 of seed 0: -6"),
        ("{}['key']", "KeyError"),
        ("fedsim.data.FederatedData({'x': numpy.empty(10**13)}, [0], ['a'])", "MemoryError"),
        ("(_ for _ in ()).throw(fedsim.data.FormatError('something is wrong'))", "does not name the file"),
    ],
)
def test_a_reader_that_fails_otherwise_is_detected(on_damage, message):
    with pytest.raises(AssertionError, match=message):
        assert_only_format_errors(Reader(on_damage), b"whole", ".x", 3)


@pytest.mark.slow
def test_a_reader_that_raises_format_errors_passes():
    empty = "fedsim.data.ClientStream(lambda: iter([]), source=p).load()"
    assert_only_format_errors(Reader(empty), b"whole", ".x", 3)


def test_mutations_are_of_many_kinds_and_repeatable():
    original = bytes(range(256)) * 40
    first = list(mutations(original, 1, 200))
    assert first == list(mutations(original, 1, 200))
    assert len(set(first)) > 190
    assert {len(m) < len(original) for m in first} == {True, False}
    assert any(len(m) > len(original) for m in first)


_TRACES = "client,online,seconds_per_step,upload_rate\na,0-60 90-120,0.5,10\nb,,2,\n"
_CONFIG = {"dataset": "digits", "algorithm": "fedprox", "clip": 1.5, "rounds": 3, "hyperparameters": {"mu": 0.1}}
_RUN = {"config": _CONFIG, "settings": {"lanes": 2, "progress": True}}
_SWEEP = {**_RUN, "varied": {"client_learning_rate": [0.1, 1.0]}, "seeds": [0, 1], "how": "devices"}
_TWO = fedsim.FederatedData.from_arrays({"x": np.zeros(2)}, clients=["ann", "bob"])
# The readers of text files that hold no population, each with a file: (name, content, reader of its path).
TEXT_READERS = [
    ("traces.csv", _TRACES, fedsim.systems.Traces.read),
    ("traces.jsonl", '{"client": "a", "online": [[0, 60]], "upload_rate": 5}\n{"client": "b"}\n', fedsim.systems.Traces.read),
    ("faults.json", '{"faults": [{"dispatch": 3, "failure": 0.5}], "outages": [[1, 2]]}', fedsim.systems.FaultSchedule.read),
    ("rounds.csv", "ann,bob\nbob\n", lambda path: fedsim.samplers.ScheduleSampler.from_file(_TWO, path, seed=0)),
    ("rounds.jsonl", '["ann", "bob"]\n["bob"]\n', lambda path: fedsim.samplers.ScheduleSampler.from_file(_TWO, path, seed=0)),
    ("party.csv", "id,y,x\n7,1,0.5\n3,0,-2\n", lambda path: fedsim.vertical.Party.from_csv(path, labels="y")),
    ("edges.txt", "0 1 0.25\n1 2 0.25\n2 0 0.25\n", fedsim.decentralized.edge_list),
    ("word_count", "the 12\nto 7\na 5\n", lambda path: fedsim.text.vocabulary_from_counts(path, 2)),
    ("tag_count", '{"the": 12, "to": 7, "a": 5}', lambda path: fedsim.text.vocabulary_from_counts(path, 2)),
    ("config.json", json.dumps(_RUN), lambda path: stored_run(path.parent, read_config(path.parent))),
    ("sweep.json", json.dumps(_SWEEP, indent=2), lambda path: stored_run(path.parent, read_sweep(path.parent))),
    ("record.json", '{"name": "a", "rows": []}', read_record),
]


@pytest.mark.parametrize(("name", "content", "reader"), TEXT_READERS, ids=[name for name, *_ in TEXT_READERS])
def test_damaged_text_files_raise_only_errors_that_name_the_file(name, content, reader, tmp_path):
    path = tmp_path / "here" / name
    path.parent.mkdir()
    path.write_text(content)
    reader(path)
    messages = []
    for damaged in [*mutations(content.encode(), seed=0, count=200), b"", b"[]", b"null", b"\xff", b"[" * 100_000]:
        path.write_bytes(damaged)
        try:
            reader(path)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 60 and [message for message in messages if "here" not in message] == []


@pytest.mark.parametrize("name", ["config.json", "sweep.json"])
def test_a_value_of_another_type_in_a_stored_configuration_is_named(name, tmp_path):
    """Every value is replaced by every other type. What is accepted can be compared and written again."""
    reader = next(reader for other, _, reader in TEXT_READERS if other == name)
    defaults = dataclasses.asdict(RunConfig(hyperparameters={"mu": 0.1}))
    whole = {**_SWEEP, "config": defaults, "settings": dataclasses.asdict(Settings())}
    refused = set()
    for part in ("config", "settings"):
        for field in whole[part]:
            for value in ([], {}, ["x"], {"x": {}}, "there is none", -1.5, True, None):
                (tmp_path / name).write_text(json.dumps({**whole, part: {**whole[part], field: value}}))
                message = ""
                try:
                    reader(tmp_path / name)
                except (ValueError, FileNotFoundError) as error:
                    message = str(error)
                    refused.add(field)
                names_file = field in ("init_from", "faults", "client_traces", "deliveries") and str(value) in message
                named = field in message or field.replace("_", " ") in message
                assert not message or named or names_file, (field, value, message)
            assert field in refused
