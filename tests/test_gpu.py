"""What a machine with a GPU runs in one go: the steps, the page, and the whole of it rehearsed."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import gpu
import kernels
import metas_leanrl
import pytest
import torch
import torch._dynamo.convert_frame as frames
import tqdm
from conftest import ROOT


def rehearse(monkeypatch, tmp_path, **programs):
    """All steps of which one fails -> the page, and the status of each step."""
    steps = []
    for name, program in programs.items():
        shows = r"^(.*\d failed.*)$"
        steps.append(gpu.Step(name, 0.5, ["-c", program], [], shows, writes=False))
    monkeypatch.setattr(gpu, "STEPS", steps)
    assert gpu.main(["--rehearse", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    return (tmp_path / "gpu.md").read_text(), {step["step"]: step["status"] for step in found}


def test_failed_step_stops_none(tmp_path, monkeypatch):
    fail = "print('1 failed, 2 passed in 3 s'); raise SystemExit(4)"
    page, status = rehearse(monkeypatch, tmp_path, tests=fail, study="print('fine')")
    assert "A rehearsal: no number counts" in page and "1 failed, 2 passed" in page
    assert status == {"tests": 4, "study": 0}


def test_refusal_in_a_child_is_on_the_page(tmp_path, monkeypatch):
    refused = "import torch; torch.ones(2, device='cuda').numpy()"
    page, _ = rehearse(monkeypatch, tmp_path, study=refused)
    assert "CUDA would refuse: -c" in page


def test_goes_on_from_where_its_time_was_up(tmp_path, monkeypatch, capsys):
    """A step that has no time is not begun, one that is done is not repeated."""
    steps = []
    for name, minutes in ("a", 1), ("b", 1), ("c", 3):
        steps.append(gpu.Step(name, minutes, ["-c", f"print('{name}')"], [], writes=False))
    steps[1] = steps[1]._replace(needs="a_package_that_is_missing")
    monkeypatch.setattr(gpu, "STEPS", steps)
    command = ["--rehearse", "--out", str(tmp_path), "--minutes"]
    assert gpu.main([*command, "2"]) == 0
    said = capsys.readouterr().out
    assert "4.0 min at most in all" in said and "skipped: no a_package_that_is_missing" in said
    assert "no time for c: the same command goes on from there" in said
    assert gpu.main([*command, "4"]) == 0
    said = capsys.readouterr().out
    assert "a  done" in said and "c: -c" in said and "a: -c" not in said
    found = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert [step["step"] for step in found] == ["a", "c"]


def test_bars_of_metas_leanrl_are_read(tmp_path, monkeypatch):
    """The median of the later half of what a bar shows; a script that fails says why."""
    bar = "import time\nfor x in (9, 50, 60, 70):\n print(f'\\r{x}.5 sps, ', flush=True)\n"
    (tmp_path / "leanrl").mkdir()
    for name, text in ("sac", bar + " time.sleep(1.2)"), ("ppo", "raise SystemExit('no tensors')"):
        (tmp_path / f"leanrl/{name}_torchcompile.py").write_text(text)
    monkeypatch.setattr(metas_leanrl, "FLAGS", {"sac": [], "ppo": []})
    out = tmp_path / "out"
    command = [sys.executable, str(tmp_path), "--seconds", "4.5", "--out", str(out)]
    assert metas_leanrl.main(command) == 0
    rows = json.loads((out / "metas_leanrl.json").read_text())["rows"]
    assert [row["script"] for row in rows] == ["sac", "ppo"] * 2
    assert rows[0]["sps_steady"] in (60.5, 65.5, 70.5) and rows[1]["skipped"] == "no tensors"


def test_a_lease_is_half_an_hour():
    """Without LeanRL, whose environment a machine without a network does not have."""
    assert sum(step.minutes for step in gpu.STEPS) <= 30
    assert max(step.minutes for step in gpu.STEPS) < 10


@pytest.mark.slow
def test_all_of_it_is_rehearsed(tmp_path):
    command = [sys.executable, "plots/measure/gpu.py", "--rehearse", "--out", tmp_path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    page = (tmp_path / "gpu.md").read_text()
    for step in gpu.STEPS:
        assert f"| {step.name} |" in page
    assert "CUDA would refuse" not in page
    rows = json.loads((tmp_path / "speedup.json").read_text())["rows"]
    assert len({row["script"] for row in rows}) == 7


def test_table_of_kernels_adds_up(tmp_path, monkeypatch):
    """4 + 2 + 1.5 launches, 3.5 with graphs; 3.35 MB take 1 us."""
    counted = {
        "launches": {"Inductor": 4, "products": 2, "others": 1.5, "bytes": 3.35e6},
        "transfers": {"launches": 3.5, "uploads": 1, "downloads": 0.5, "waits": 0.25},
    }
    monkeypatch.setattr(
        kernels, "call_worker", lambda work, *_: counted[work.removeprefix("peer-")]
    )
    peer = ["--peer", "a peer", "1 /somewhere/python /somewhere/sac.py --compile"]
    command = ["--only", "sac_continuous_action", *peer, "--out", str(tmp_path)]
    assert kernels.main(command) == 0
    row, other = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert (row["in all"], row["launches"]) == (7.5, 3.5)
    assert row["us on an H100"] == pytest.approx([7.5 * 2 + 1, 7.5 * 3 + 1])
    assert (other["script"], other["command"]) == ("a peer", "1 sac.py --compile")
    table = (tmp_path / "kernels.md").read_text()
    assert table.count("| 7.5 | 3.4 | 16-24 | 3.50 | 1.00 | 0.50 | 0.25 |") == 2


def test_peer_is_counted_per_turn_of_its_bar(tmp_path, monkeypatch):
    """8 turns of 4 steps, in each of which it waits twice."""
    script = tmp_path / "peer.py"
    script.write_text(
        "import sys\n"
        "from peer_counts import counts\n"
        "from tqdm import tqdm\n"
        "for turn in tqdm(range(int(sys.argv[1]))):\n"
        "    counts['waits'] += 2\n"
    )
    counts = Counter()
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(tqdm, "tqdm", tqdm.tqdm)  # which is replaced by a bar that counts
    monkeypatch.setitem(sys.modules, "peer_counts", SimpleNamespace(counts=counts))
    found = kernels.run_peer(4, (str(script), "8"), counts, nullcontext())
    assert found == {"waits": 2 / 4}


def test_kernels_are_counted(monkeypatch):
    """A product, an addition in place, no view, and a kernel of Triton."""
    tuner = SimpleNamespace(run=lambda *args: None)
    monkeypatch.setitem(sys.modules, "triton_on_cpu", SimpleNamespace(CachingAutotuner=tuner))
    monkeypatch.setattr(frames, "_compile", frames._compile)  # which counting replaces
    counting = kernels.Counting()
    ones, twos = torch.ones(2, 2), torch.full((2, 2), 2.0)

    def work(x, y):
        product = x @ y
        product.view(4).add_(y[0, 0])
        tuner.run("a kernel", product)

    once = {"products": 1, "others": 1, "Inductor": 1, "bytes": 3 * 16 + (16 + 4) + 16}
    with counting.operators():
        work(ones, twos)
    assert counting.counts == once


def test_counts_are_per_step_of_all_environments():
    found = [(0, Counter()), (16, Counter(waits=2)), (48, Counter(waits=6, uploads=4))]
    assert kernels.per_step(found, (1, 2), num_envs=8) == {"waits": 1, "uploads": 1}
    assert kernels.per_step(found, (1, 2))["waits"] == 4 / 32
