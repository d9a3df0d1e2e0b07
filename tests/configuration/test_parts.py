"""Parts of a model by the options of a run."""

import json

import jax
import numpy as np
import pytest

from fedsim.commands import main
from fedsim.configuration import RunConfig, Settings, build


def test_parts_of_a_model_are_chosen_by_names():
    algorithm, *_ = build(
        RunConfig(algorithm="scaffold", model="digits_dense", frozen="linear/*,linear_1/b", kept="linear_2/*"), Settings()
    )
    parts = jax.eval_shape(algorithm.model_parts, jax.random.key(0))
    names = [sorted(f"{m}/{n}" for m, of in part.items() for n, x in of.items() if x is not None) for part in parts[:2]]
    assert names == [["linear/b", "linear/w", "linear_1/b"], ["linear_2/b", "linear_2/w"]]
    with pytest.raises(ValueError, match="no parameter 'lin/w' to be frozen"):
        build(RunConfig(frozen="lin/w"), Settings())


@pytest.mark.slow
def test_a_run_with_heads_of_clients_reports_personal_models(tmp_path, capsys):
    arguments = ["--rounds", "2", "--clients", "3", "--model", "digits_dense", "--kept", "linear_2/*"]
    assert main(["run", *arguments, "--folder", str(tmp_path / "run"), "--no-progress"]) == 0
    assert "personal" in capsys.readouterr().out
    assert main(["resume", str(tmp_path / "run"), "--rounds", "3", "--no-progress"]) == 0
    whole = ["run", *arguments, "--rounds", "3", "--folder", str(tmp_path / "whole"), "--no-progress"]
    assert main(whole) == 0
    scores = []
    for name in ("run", "whole"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        scores.append(
            [line["test_personal_accuracy"] for line in map(json.loads, lines) if "test_personal_accuracy" in line][-1]
        )
    assert scores[0] == scores[1] and np.isfinite(scores[0])
