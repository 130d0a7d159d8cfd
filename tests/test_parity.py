"""Baseline and variant are one algorithm: equal weights, data and noise in, equal updates out."""

import difflib
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, read_checkpoint
from pairs import (
    OBS,
    PAIRS,
    A,
    Pair,
    assert_runs_agree,
    assert_same_weights,
    others_than,
    params,
    run_updates,
)

from leanrl import sac_continuous_action_torchcompile

COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
EVERY = pytest.mark.parametrize("pair", params())
ALONE = pytest.mark.parametrize("pair", others_than("ppo_multigpu"))  # without other processes
pytestmark = pytest.mark.usefixtures("one_thread", "alone")


@pytest.fixture
def alone(monkeypatch):
    """Processes that share their work are one."""
    if importlib.util.find_spec("envpool"):
        for name in ("", "_torchcompile"):
            module = importlib.import_module(f"leanrl.ppo_atari_envpool_multigpu{name}")
            none = SimpleNamespace(all_reduce=lambda tensor: None)
            monkeypatch.setattr(module, "dist", none)


def graphs() -> int:
    """How often Dynamo has compiled."""
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@EVERY
def test_ten_updates_agree(pair, float64):
    run_updates(pair, *pair.make_both(), 10)


@pytest.mark.parametrize("pair", params("ppo_atari", "ppo_multigpu", "pqn_atari"))
def test_channels_last_computes_the_same(pair, float64):
    run_updates(pair, *pair.make_both(channels_last=True), 2)


def test_cartpoles_minibatch_may_be_cut_in_pieces(float64, monkeypatch):
    """Advantages are normalized over all of them."""
    pair = PAIRS["ppo_cartpole"]
    monkeypatch.setattr(pair.variant, "CACHED_ROWS", 16)
    run_updates(pair, *pair.make_both(), 10)


@pytest.mark.usefixtures("backend", "float64")
@EVERY
def test_compiled_updates_agree(pair):
    """They compile once, once more when numbers change, and then only for bounds."""
    reference, agent = pair.make_both()
    pair.variant.compile_agent(agent)
    run_updates(pair, reference, agent, 1)
    first = graphs()
    run_updates(pair, reference, agent, 3)
    assert graphs() == first > 0
    found = []
    for numbers in zip(*pair.annealed.values(), strict=True):
        for each in (reference, agent):
            vars(each.args).update(zip(pair.annealed, numbers, strict=True))
        run_updates(pair, reference, agent, 1)
        found.append(graphs())
    assert len(set(found)) == 1, "compiled for each number"
    for name, values in pair.bounds.items():
        for value in values:
            for each in (reference, agent):
                setattr(each.args, name, value)
            run_updates(pair, reference, agent, 1)


def test_compiled_code_follows_shapes_and_args():
    """With few guards it still compiles again for other shapes and other args."""

    class Agent(torch.nn.Module):
        def act(self, obs):
            return self.args.gain * len(obs) + obs * (2 if len(obs) > 4 else 1)

    torch._dynamo.reset()
    agent = Agent()
    agent.args = SimpleNamespace(gain=2.0)
    options = {"guard_filter_fn": PAIRS["sac"].variant.kept_guards}
    act = torch.compile(agent.act, fullgraph=True, backend="eager", options=options)
    for gain, size in ((2.0, 3), (2.0, 4), (2.0, 5), (3.0, 3), (4.0, 6)):
        agent.args.gain = gain
        expected = gain * size + (2 if size > 4 else 1)
        assert act(torch.ones(size)).tolist() == size * [expected]


@pytest.mark.parametrize("pair", params("sac", "td3", "sac_worlds"))
def test_every_compiled_method_has_few_guards(pair, monkeypatch):
    """torch.compile takes the filter out of its options, as this one does."""
    found = []

    def compile(method, fullgraph, options):
        found.append(options.pop("guard_filter_fn"))
        return method

    monkeypatch.setattr(torch, "compile", compile)
    pair.variant.compile_agent(pair.make(pair.variant))
    assert set(found) == {pair.variant.kept_guards} and len(found) > 1


@pytest.mark.parametrize("pair", params("sac", "td3", "sac_worlds"))
def test_stacked_weights_lie_as_their_gradients(pair):
    agent = pair.make(pair.variant)
    batch, *_ = pair.draw(pair, agent, CPU)
    weights = list(agent.qf.parameters())[:4:2]  # of the hidden layers
    gradients = torch.autograd.grad(agent.qf(batch.obs, batch.actions).sum(), weights)
    averages = agent.q_optimizer.exp_avgs[:4:2]
    targets = list(agent.qf_target.parameters())[:4:2]
    for tensors in (gradients, averages, targets):
        assert [x.stride() for x in tensors] == [x.stride() for x in weights]


@pytest.mark.parametrize(
    ("pair", "flag"),
    [
        pytest.param(*its.values, flag, id=f"{its.id}-{flag}", marks=its.marks)
        for its in params()
        for flag in its.values[0].wrong
    ],
)
def test_a_wrong_update_is_noticed(pair, flag, float64):
    """The comparison itself: a variant with another setting must fail it."""
    reference, agent = pair.make_both(**{flag: pair.wrong[flag]})
    with pytest.raises(AssertionError):
        run_updates(pair, reference, agent, 2)


@pytest.mark.parametrize("pair", params("sac", "td3", "ppo_cartpole", "ppo_worlds", "ppo_atari"))
def test_actions_agree(pair):
    reference, agent = pair.make_both()
    obs = pair.draw(pair, reference, CPU)[0].obs
    actions = pair.space[-1] if isinstance(pair.space[-1], int) else A
    noise = torch.empty(len(obs), actions).exponential_()
    expected, found = (each.act(obs, noise) for each in (reference, agent))
    if pair.script == "ppo_cartpole_gpu":  # whose variant asks its critic later
        found = *found, agent.value(obs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_numpy_acts_as_torch_does():
    """Also with weights that were changed in place, once they are published."""
    pair = PAIRS["ppo"]
    reference, agent = pair.make_both()
    for _ in range(2):
        agent.publish()
        obs, noise = torch.randn(4, OBS), torch.randn(4, A)
        actions, _, values = reference.act(obs, noise)
        found = [agent.act(obs.numpy(), noise.numpy()), agent.value(obs.numpy())]
        torch.testing.assert_close([torch.tensor(x) for x in found], [actions, values])
        value = torch.tensor(agent.value(obs[0].numpy()))
        torch.testing.assert_close(value, reference.value(obs[0]))
        run_updates(pair, reference, agent, 1, 1e-4)


@pytest.mark.parametrize("pair", params("sac", "sac_worlds"))
def test_a_fixed_temperature_stays(pair):
    for module in (pair.baseline, pair.variant):
        agent = pair.make(module, autotune=False, alpha=0.3)
        agent.update(*pair.draw(pair, agent, CPU))
        assert agent.log_alpha.exp().item() == pytest.approx(0.3)


@pytest.mark.parametrize("pair", params("ppo", "ppo_async"))
def test_numpy_refuses_a_network_that_it_does_not_compute(pair, monkeypatch):
    def mlp(inputs, outputs, gain):
        return torch.nn.Sequential(torch.nn.Linear(inputs, 64), torch.nn.Linear(64, outputs))

    monkeypatch.setattr(pair.variant, "mlp", mlp)
    with pytest.raises(AssertionError, match="acting computes another network"):
        pair.make(pair.variant).publish()


@pytest.fixture
def draw_alike(monkeypatch):
    """Both replay buffers draw the same rows, decided by where the next one will be stored."""

    def draw(rb) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rb.position)
        return torch.randint(rb.size, (rb.args.batch_size,), generator=generator)

    def refill(rb) -> None:
        torch.index_select(rb.data, 0, draw(rb), out=rb.rows)

    def patch(pair: Pair) -> None:
        def sample(rb):
            index = draw(rb)
            return pair.baseline.Batch._make(stored[index] for stored in rb.data)

        for module in (pair.baseline, pair.variant):
            monkeypatch.setattr(module, "LOG_EVERY", 5)
        monkeypatch.setattr(pair.baseline.ReplayBuffer, "sample", sample)
        monkeypatch.setattr(pair.variant.ReplayBuffer, "draw", refill)

    return patch


@pytest.mark.parametrize("pair", others_than("ppo_multigpu", "ppo_async"))
def test_whole_runs_agree(pair, backend, smooth, draw_alike, monkeypatch):
    """From flags to checkpoint: acting, storing, what is updated when, logging.

    Compiled, nothing compiles again in the last fifth.
    """
    if pair.update == "update":
        draw_alike(pair)
    counts = []
    tick = pair.variant.Stopwatch.tick

    def counted(watch, env_steps):
        tick(watch, env_steps)
        counts.append(graphs())

    monkeypatch.setattr(pair.variant.Stopwatch, "tick", counted)
    flags = pair.flags | pair.run | {"save_model": True, "cuda": False}
    runs = []
    for module, more in (
        (pair.baseline, {}),
        (pair.variant, {}),
        (pair.variant, {"compile": True}),
    ):
        counts.clear()
        runs.append(module.main(module.Args(**flags, **more, exp_name=f"{len(runs)}")))
    assert counts[4 * len(counts) // 5] == counts[-1] > 0
    assert_runs_agree(runs[0], runs[1])
    assert_runs_agree(runs[0], runs[2])


@EVERY
def test_differing_hunks_are_marked(pair):
    """Each hunk in which the variant differs starts with `# speed:`; only the docstring need not.

    Of the imports it is enough that the first is marked: sorted, they do not stay together.
    """
    texts = []
    for module in (pair.baseline, pair.variant):
        source = Path(module.__file__).read_text()
        texts.append(source[source.index('"""', 3) + 3 :].splitlines())
    hunks = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, *texts, False).get_opcodes():
        lines = [line.strip() for line in texts[1][j1:j2] if line.strip()]
        imports = all(line.startswith(("import ", "from ")) for line in texts[0][i1:i2] + lines)
        if kind != "equal" and not (hunks and imports):
            hunks.append(lines)
    assert len(hunks) > 5
    for lines in hunks:
        assert lines and lines[0].startswith("# speed: "), "\n".join(lines)


def test_adam_matches_torch():
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    theirs = [torch.nn.Parameter(p.detach().double()) for p in mine]
    adam = sac_continuous_action_torchcompile.Adam(mine, lr=1e-2)
    reference = torch.optim.Adam(theirs, lr=1e-2)
    for _ in range(500):
        gradients = [torch.randn_like(p) * torch.rand(()) for p in mine]
        adam.step(gradients)
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.double()
        reference.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p.double(), q, atol=1e-4, rtol=0)


# CUDA graphs


def captured(pair: Pair, device, compiled: bool) -> tuple:
    """Both agents, the variant's captured, and the replay buffer whose batch its graphs read."""
    reference, agent = pair.make_both(device)
    rb = None
    if compiled:
        pair.variant.compile_agent(agent)
    if pair.update == "update":
        rb = pair.variant.ReplayBuffer(agent.args, OBS, A, device)
        rb.rows.zero_()
        rb.draw = lambda: None  # the test fills the batch
        acting = () if pair.script.endswith("worlds") else (lambda: None,)
        pair.variant.capture_agent(agent, rb, *acting)
    else:
        pair.variant.capture_agent(agent)
    return reference, agent, rb


@ALONE
@pytest.mark.filterwarnings("ignore:This module is instantiated on a machine without CUDA")
def test_graphs_refuse_other_args(pair):
    """They would go on with the numbers that they were captured with."""
    reference, agent, rb = captured(pair, CPU, compiled=False)
    inputs = pair.draw(pair, reference, CPU)
    if rb:
        with pytest.raises(AssertionError, match="CUDA graphs read rb.batch"):
            agent.update(*inputs)
        inputs = rb.batch, *inputs[1:]
    getattr(agent, pair.update)(*inputs)
    agent.args.max_grad_norm = 1e3
    with pytest.raises(AssertionError, match="CUDA graphs keep args"):
        getattr(agent, pair.update)(*inputs)


@pytest.mark.gpu
@ALONE
@COMPILED
def test_captured_updates_agree(pair, compiled, float64, monkeypatch):
    """Warm-up, capture, replays."""
    device = torch.device("cuda")
    reference, agent, rb = captured(pair, device, compiled)
    noise = torch.zeros(len(rb.rows) if rb else 1, A, device=device)  # which the graphs read
    monkeypatch.setattr(torch, "randn_like", lambda x: noise * 1)
    for number in range(10):
        torch.manual_seed(number)
        noise.normal_()
        batch, *rest = pair.draw(pair, reference, device)
        if rb:
            for to, new in zip(rb.batch, batch, strict=True):
                to.copy_(new[: len(to)])
            batch = rb.batch
        expected, found = (getattr(each, pair.update)(batch, *rest) for each in (reference, agent))
        for tag, value in expected.items():
            torch.testing.assert_close(found[tag], value, atol=1e-9, rtol=1e-9)
    assert_same_weights(reference, agent, 1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pair", params("ppo", "ppo_cartpole", "ppo_worlds", "ppo_atari", "pqn_atari")
)
@COMPILED
def test_graphed_runs_learn_like_eager_ones(pair, compiled, smooth):
    """Rollouts before, at and after the capture of every graph: random numbers must go on."""
    flags = pair.flags | pair.run | {"save_model": True}
    agents = []
    for more in (
        {"learning_rate": 0.0},
        {"compile": compiled},
        {"compile": compiled, "cudagraphs": True},
    ):
        run_dir = pair.variant.main(pair.variant.Args(**flags | more, exp_name=f"{len(agents)}"))
        agents.append(read_checkpoint(run_dir)["agent"])
    start, eager, graphed = agents
    moves = []
    for agent in (eager, graphed):
        names = [name for name, _ in pair.make(pair.variant).named_parameters()]
        moves.append(torch.cat([(agent[name] - start[name]).flatten() for name in names]))
    assert torch.cosine_similarity(*moves, dim=0) > 0.9
    assert 0.8 < (moves[1].norm() / moves[0].norm()).item() < 1.25
