"""The command `fedsim replay` of a folder of another user."""

from __future__ import annotations

from fedsim.commands import main


def test_replay_needs_trust_for_the_code_of_another_user(custom_run, custom, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache of another user"))
    assert main(["replay", str(custom_run), "--round", "1"]) == 2
    assert f"{custom}:Shrinking" in capsys.readouterr().err and not (tmp_path / "ran").exists()
    assert main(["replay", str(custom_run), "--round", "1", "--trust"]) == 0
    assert (tmp_path / "ran").exists()
