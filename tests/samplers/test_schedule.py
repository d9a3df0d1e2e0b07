"""Schedules from lists and from files."""

import json

import numpy as np
import pytest

from fedsim.data import FederatedData
from fedsim.samplers import ScheduleSampler

DATA = FederatedData.from_clients({name: {"x": np.zeros(1)} for name in ("ann", "bob", "c,d", "eve")})
SCHEDULE = [["bob", "ann"], [], ["c,d"], ["eve", "bob", "ann"]]


def names(sampler, rounds):
    return [cohort.client_ids for cohort in sampler.rounds(rounds)]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("s.csv", 'bob,ann\n\n"c,d"\neve, bob ,ann\n'),
        ("s.txt", '\ufeffbob,ann\r\n\r\n"c,d"\r\neve,bob,ann'),
        ("s.jsonl", "\n".join(map(json.dumps, SCHEDULE)) + "\n"),
        ("s.json", "\n".join(map(json.dumps, SCHEDULE))),
        ("s.json", json.dumps(SCHEDULE, indent=1)),
    ],
)
def test_a_file_is_followed_line_by_line(file, text, tmp_path):
    (tmp_path / file).write_text(text, encoding="utf-8", newline="")
    sampler = ScheduleSampler.from_file(DATA, tmp_path / file, seed=0)
    assert names(sampler, 4) == SCHEDULE
    assert sampler.clients == 3


def test_a_round_beyond_the_schedule_is_an_error_or_starts_again():
    with pytest.raises(
        ValueError, match="has 4 rounds, counted from 0, so there is no round 4: run fewer rounds, or give repeat=True"
    ):
        ScheduleSampler(DATA, SCHEDULE, seed=0).cohort(4)
    assert names(ScheduleSampler(DATA, SCHEDULE, seed=0, repeat=True), 9) == [*SCHEDULE, *SCHEDULE, SCHEDULE[0]]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("s.csv", "ann\nbob,zoe\n", r"s.csv, line 2 names client 'zoe', which is not among the 4"),
        ("s.csv", "ann\n\nbob,bob\n", r"s.csv, line 3 names client 'bob' more than once"),
        ("s.csv", "ann,,bob\n", r"s.csv, line 1 has an empty client id"),
        ("s.csv", 'ann\n"bob\n', r"s.csv, line 2 is not CSV"),
        ("s.jsonl", '["ann"]\n["bob"\n', r"s.jsonl, line 2 is not JSON"),
        ("s.jsonl", '["ann"]\n[3]\n', r"s.jsonl, line 2 is not a list of client ids"),
        ("s.jsonl", '["ann"]\n"bob"\n', r"s.jsonl, line 2 is not a list of client ids"),
        ("s.json", '[["ann"], ["zoe"]]', r"s.json, entry 2 names client 'zoe'"),
        ("s.json", '{"rounds": 3}', r"s.json, line 1 is not a list of client ids"),
        ("s.jsonl", "[" * 100_000, r"s.jsonl, line 1 is not JSON"),
        ("s.json", f"[{'1' * 5000}]", r"s.json, line 1 is not JSON"),
        ("S.JSON", "ann", r"S.JSON, line 1 is not JSON"),
        ("s.csv", "", "names no clients"),
        ("s.jsonl", "[]\n[]\n", "names no clients"),
    ],
)
def test_bad_lines_are_named(file, text, message, tmp_path):
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        ScheduleSampler.from_file(DATA, tmp_path / file, seed=0)


def test_text_that_is_not_utf_8_is_named_with_its_line(tmp_path):
    (tmp_path / "s.csv").write_bytes(b"ann\nb\xffb\n")
    with pytest.raises(ValueError, match=r"s.csv, line 2 is not UTF-8"):
        ScheduleSampler.from_file(DATA, tmp_path / "s.csv", seed=0)


def test_a_missing_file_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        ScheduleSampler.from_file(DATA, tmp_path / "none.csv", seed=0)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([["ann"], ["bob", "bob"]], "Round 1 of the schedule names client 'bob' more than once"),
        ([["zoe"]], "Round 0 of the schedule names client 'zoe'"),
        (["ann"], "Round 0 of the schedule is the string 'ann': expected a list"),
        ([], "names no clients"),
    ],
)
def test_bad_schedules_are_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        ScheduleSampler(DATA, schedule, seed=0)
