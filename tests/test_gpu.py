"""What a machine with a GPU runs in one go: the steps, the page, and the whole of it rehearsed."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import gpu
import kernels
import pytest
import torch
import torch._dynamo.convert_frame as frames
import tqdm
from conftest import ROOT

SAC = "sac_continuous_action"


def record(gpu_name, **speeds):
    """A speed-up record: {row: (steps/s, the least of them, speed-up)}."""
    rows = []
    for row, (mean, least, speedup) in speeds.items():
        row = row.replace("_", "+")
        steady = {"mean": mean, "min": least}
        rows.append({"script": "sac", "row": row, "sps_steady": steady, "speedup": speedup})
    rows.append({"script": "sac", "row": "eager", "skipped": "no finished run"})
    return {"machine": {"gpu": gpu_name}, "rows": rows}


def read(tmp_path, name, content):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(content))
    return gpu.read_speedups(path)


def test_a_row_falls_short_of_the_same_gpu_or_of_a_cpus_gain(tmp_path):
    on_cpu = read(tmp_path, "cpu", record(None, baseline=(100, 90, 1.0), compile=(150, 140, 1.5)))
    before = read(tmp_path, "before", record("H100", baseline=(200, 180, 1.0)))
    slow = {"baseline": (170, 170, 1.0), "compile": (238, 238, 1.4)}
    mine = read(tmp_path, "mine", record("H100", **slow, compile_cudagraphs=(500, 500, 3.0)))
    assert gpu.shortfalls(mine, [on_cpu, before]) == [
        "sac, baseline: 170 steps/s, was 180 or more",
        "sac, compile: 1.40x, on a CPU 1.50x",
    ]
    other = mine | {"gpu": "H200"}  # of which nothing is known
    assert gpu.shortfalls(other, [on_cpu, before]) == ["sac, compile: 1.40x, on a CPU 1.50x"]
    good = read(tmp_path, "good", record("H100", baseline=(180, 180, 1.0)))
    assert gpu.shortfalls(good, [on_cpu, before]) == []


def test_a_step_that_fails_stops_none_after_it_and_is_on_the_page(tmp_path, monkeypatch, capsys):
    fail = "print('1 failed, 2 passed in 3 s'); raise SystemExit(4)"
    steps = [
        gpu.Step("tests", ["-c", fail], [], r"^(.*\d failed.*)$", writes=False),
        gpu.Step("study", ["-c", "print('fine')"], [], r"^(never)$"),
    ]
    monkeypatch.setattr(gpu, "STEPS", steps)
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--out", str(tmp_path)])
    assert "no CUDA device for torch" in capsys.readouterr().err
    assert gpu.main(["--rehearse", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "A rehearsal: no number counts" in page and "1 failed, 2 passed" in page
    found = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert [(step["step"], step["status"]) for step in found] == [("tests", 4), ("study", 0)]


def test_what_cuda_would_refuse_in_a_child_is_on_the_page(tmp_path, monkeypatch):
    refused = "import torch; torch.ones(2, device='cuda').numpy()"
    monkeypatch.setattr(gpu, "STEPS", [gpu.Step("study", ["-c", refused], [], r"^(never)$")])
    assert gpu.main(["--rehearse", "--out", str(tmp_path)]) == 1
    assert "CUDA would refuse: -c" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_all_of_it_is_rehearsed(tmp_path):
    command = [sys.executable, "plots/measure/gpu.py", "--rehearse", "--out", tmp_path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    page = (tmp_path / "gpu.md").read_text()
    for step in gpu.STEPS:
        assert f"| {step.name} |" in page
    assert "CUDA would refuse" not in page


def test_the_table_of_kernels_adds_up(tmp_path, monkeypatch):
    """4 + 2 + 1.5 launches, 1 replay with 2 copies and 0.5 beside it; 3.35 MB take 1 us."""
    counted = {
        "launches": {"Inductor": 4, "products": 2, "others": 1.5, "bytes": 3.35e6}
        | {"replays": 1, "copies": 2, "outside": 0.5},
        "transfers": {"uploads": 1, "downloads": 0.5, "waits": 0.25},
    }
    counted |= {f"peer-{work}": counts for work, counts in counted.items()}
    monkeypatch.setattr(kernels, "call_worker", lambda work, *_: counted[work])
    peer = ["--peer", "a peer", "1 /somewhere/python /somewhere/sac.py --compile"]
    assert kernels.main(["--only", SAC, *peer, "--out", str(tmp_path)]) == 0
    row, other = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert (row["in all"], row["with graphs"]) == (7.5, 3.5)
    assert row["us on an H100"] == pytest.approx([7.5 * 2 + 1, 7.5 * 3 + 1])
    assert (other["script"], other["in all"]) == ("a peer", 7.5)
    assert other["command"] == "1 sac.py --compile"
    table = (tmp_path / "kernels.md").read_text()
    assert table.count("| 7.5 | 3.5 | 3.4 | 16-24 | 1.00 | 0.50 | 0.25 |") == 2


def test_a_peer_without_an_interpreter_is_one_line(tmp_path, capfd):
    peer = ["--peer", "a peer", "1 /nowhere/python sac.py --compile"]
    assert kernels.main(["--only", *peer, "--out", str(tmp_path)]) == 1
    said = capfd.readouterr().err
    assert "kernels-a-peer failed: there is no interpreter /nowhere/python" in said


def test_a_peer_is_counted_per_turn_of_its_bar(tmp_path, monkeypatch):
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
    assert found == {"waits": 2 / 4} and counts == {"waits": 16}


def test_kernels_are_counted_outside_of_compiled_code(monkeypatch):
    """A product, an addition in place, no view; then both again in a graph of two inputs."""
    launches = []
    tuner = SimpleNamespace(run=lambda *args: launches.append(args))
    monkeypatch.setitem(sys.modules, "triton_on_cpu", SimpleNamespace(CachingAutotuner=tuner))
    monkeypatch.setattr(frames, "_compile", frames._compile)  # which counting replaces
    counting = kernels.Counting()
    ones, twos = torch.ones(2, 2), torch.full((2, 2), 2.0)

    def work(x, y):
        product = x @ y
        product.view(4).add_(y[0, 0])
        tuner.run("a kernel", product)

    with counting.operators():
        work(ones, twos)
        assert counting.counts == {
            **{"products": 1, "others": 1, "Inductor": 1, "outside": 3},
            "bytes": 3 * 16 + (16 + 4) + 16,
        }
        counting.captured(work)(ones, twos)
    assert len(launches) == 2 and counting.counts["products"] == counting.counts["others"] == 2
    assert (counting.counts["outside"], counting.counts["replays"]) == (3, 1)
    assert counting.counts["copies"] == 1, "two inputs of a type"


def test_counts_are_per_step_of_all_environments():
    found = [(0, Counter()), (16, Counter(waits=2)), (48, Counter(waits=6, uploads=4))]
    assert kernels.per_step(found, (1, 2), num_envs=8) == {"waits": 1, "uploads": 1}
    assert kernels.per_step(found, (1, 2))["waits"] == 4 / 32
