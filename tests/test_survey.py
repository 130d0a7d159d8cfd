"""RL-Scope's survey and the figures of all sources: what runs, what is kept, what the page says."""

import os

import figures
import pytest
import run_dirs
import survey
from conftest import ROOT
from fake_runs import config, machine, make_traced_run, read_record


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The frameworks' runs of this machine, in runs/, of which no other is made."""
    for number, (name, command) in enumerate(survey.FRAMEWORKS.items()):
        row = "compile" if name.endswith("compile") else "baseline"
        script = f"{'td3' if 'td3' in name else 'sac'}_continuous_action"
        made_by = config(row, script=script, env_id="Walker2d-v5")
        made_by["command"] = " ".join(survey.whole_command(name, command))
        if name.startswith(survey.LIBRARY):
            made_by["args"]["library"] = survey.LIBRARY
        make_traced_run(tmp_path / "runs", number, made_by)
    called = []
    monkeypatch.setattr(survey, "ROOT", tmp_path)
    monkeypatch.setattr(run_dirs, "this_machine", lambda: config() | machine())
    make_all = survey.processes.make_all
    monkeypatch.setattr(
        survey.processes, "make_all", lambda turns: called.extend(turns) or make_all([])
    )
    return called


def test_frameworks_stand_beside_each_other(made, tmp_path):
    """All are kept; simulation is 1 s of 10 s, so that one for nothing gains 1 / (1 - 0.1)."""
    assert survey.main(["--only", "frameworks", "--out", str(tmp_path / "out")]) == 0
    assert not made
    stem = tmp_path / "out/survey_frameworks"
    bars = {(row["block"], row["bar"]) for row in read_record(stem)["rows"]}
    for block in ("SAC: Walker2d-v5", "TD3: Walker2d-v5"):
        assert {(block, bar) for bar in ("baseline", "compile", survey.LIBRARY)} <= bars
    said = f"SAC: Walker2d-v5, {survey.LIBRARY}: the simulator takes 10%, without it 1.11x"
    assert said in stem.with_suffix(".md").read_text()
    assert stem.with_name(f"{stem.name}_stages.png").exists()


def test_what_is_not_there_is_made(made, tmp_path):
    survey.main(["--only", "algorithms", "--out", str(tmp_path / "out")])
    assert [turn.name for turn in made] == ["ppo", "ppo on worlds", "sac on worlds"]


def test_commands_are_of_scripts_and_traced():
    for commands, *_ in survey.SURVEYS.values():
        for name, command in commands.items():
            assert (ROOT / command[0]).exists(), name
            assert ("worlds" in command[0]) == ("worlds/Walker2d-v5" in command)
            whole = survey.whole_command(name, command)
            assert (whole[-1] == "trace") == (not name.startswith(survey.LIBRARY))
    for figure in figures.FIGURES:
        assert figure.files and all((ROOT / command[0]).exists() for command in figure.commands)


def test_figures_go_on_where_they_stopped(tmp_path, monkeypatch, capsys):
    program = tmp_path / "draw.py"
    program.write_text(
        "import sys; from pathlib import Path; out = Path(sys.argv[-1])\n"
        "(out / 'a.png').touch(); print('drawn'); sys.exit((out / 'fail').exists())"
    )
    figure = figures.Figure("LeanRL: a", [[str(program), "{out}"]], ["a"], "its rows")
    monkeypatch.setattr(figures, "FIGURES", [figure])
    arguments = ["--out", str(tmp_path)]
    assert figures.main([*arguments, "--list"]) == 0 and not (tmp_path / "a.png").exists()
    assert "without a GPU not: its rows" in capsys.readouterr().out
    assert figures.main(arguments) == 0 and "kept" not in capsys.readouterr().out
    assert figures.main(arguments) == 0 and "kept" in capsys.readouterr().out
    os.utime(tmp_path / "a.png", (1, 1))  # older than the scripts
    (tmp_path / "fail").touch()
    assert figures.main(arguments) == 1 and "drawn" in capsys.readouterr().err
