"""Baseline and variant are one algorithm: equal weights, batch and noise in, equal updates out."""

import difflib
import functools
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, read_checkpoint, read_scalars

from leanrl import sac_continuous_action as baseline
from leanrl import sac_continuous_action_torchcompile as variant

OBS, A, B = 17, 6, 256  # HalfCheetah-v5 and CleanRL's batch
ACTION_SPACE = gym.spaces.Box(-1, 1, (A,), np.float32)
OPTIMIZERS = ("q_optimizer", "actor_optimizer", "alpha_optimizer")


pytestmark = pytest.mark.usefixtures("one_thread")  # small batches are not worth more


def random_batch(generator: torch.Generator, device: torch.device) -> variant.Batch:
    """B transitions, columns of one tensor as in the variant's replay buffer."""
    rows = torch.randn(B, 2 * OBS + A + 2, generator=generator).to(device)
    obs, actions, next_obs, rewards, terminated = rows.split((OBS, A, OBS, 1, 1), dim=1)
    actions.tanh_()
    terminated.copy_(terminated > 1.3)  # one in ten
    return variant.Batch(obs, actions, next_obs, rewards.squeeze(1), terminated.squeeze(1))


def stack_twins(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Both networks' tensors, one network after the other, to the variant's stacked ones."""
    half = len(parameters) // 2
    return [torch.stack(pair) for pair in zip(parameters[:half], parameters[half:], strict=True)]


def tensors(agent) -> dict[str, list[torch.Tensor]]:
    """Everything that an update changes, in the variant's layout."""
    stacked = isinstance(agent, variant.SAC)
    twins = list if stacked else stack_twins
    state = {
        "actor": list(agent.actor.parameters()),
        "critic": twins(list(agent.qf.parameters())),
        "target": twins(list(agent.qf_target.parameters())),
        "log_alpha": [agent.log_alpha],
    }
    for name, optimizer in zip(OPTIMIZERS, agent.optimizers, strict=True):
        assert optimizer is getattr(agent, name)
        if stacked:
            moments = optimizer.exp_avgs, optimizer.exp_avg_sqs
        else:
            states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
            moments = [[s[key] for s in states] for key in ("exp_avg", "exp_avg_sq")]
            if name == "q_optimizer":
                moments = [stack_twins(moment) for moment in moments]
        state[f"{name}.exp_avg"], state[f"{name}.exp_avg_sq"] = map(list, moments)
    return {key: [tensor.detach() for tensor in value] for key, value in state.items()}


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
WITHOUT_OR_COMPILED = pytest.mark.parametrize("backend", [None, *BACKENDS], indirect=True)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """What runs compiled functions: the operations that were traced, or code generated for them.

    Generating it takes half a minute of the compiler's time for a script.
    """
    if request.param:
        compiler = functools.partial(torch.compile, backend=request.param)
        monkeypatch.setattr(torch, "compile", compiler)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return request.param


def make_pair(device=CPU, updates=3):
    """A baseline agent that has learned a little, and a variant agent with the same state."""
    torch.manual_seed(0)
    reference = baseline.SAC(baseline.Args(), OBS, ACTION_SPACE, device)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        noise = torch.randn(B, A, generator=generator).to(device)
        batch = random_batch(generator, device)
        reference.update_critic(batch, noise)
        reference.update_actor(batch.obs, noise)
        reference.update_target()
    agent = variant.SAC(variant.Args(), OBS, ACTION_SPACE, device)
    with torch.no_grad():
        for mine, theirs in zip(tensors(agent).items(), tensors(reference).items(), strict=True):
            for to, source in zip(mine[1], theirs[1], strict=True):
                to.copy_(source)
        for optimizer in agent.optimizers:
            for power, beta in zip(optimizer.beta_powers, optimizer.betas, strict=True):
                power.fill_(beta**updates)
    return reference, agent


def assert_same_state(reference, agent, tolerance):
    for (name, expected), actual in zip(
        tensors(reference).items(), tensors(agent).values(), strict=True
    ):
        for i, (x, y) in enumerate(zip(expected, actual, strict=True)):
            error = (x - y).abs().max().item()
            assert error <= tolerance, f"{name}[{i}] differs by {error:.1e}"


def run_updates(reference, agent, count, tolerance, device=CPU):
    """The same `count` updates on both; every loss and, at the end, every tensor must agree."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        batch = random_batch(generator, device)
        noise1, noise2 = (torch.randn(B, A, generator=generator).to(device) for _ in range(2))
        metrics = []
        for each in (reference, agent):
            found = each.update_critic(batch, noise1) | each.update_actor(batch.obs, noise2)
            each.update_target()
            metrics.append({tag: value.clone() for tag, value in found.items()})
        assert len(metrics[0]) == 9
        torch.testing.assert_close(metrics[0], metrics[1], atol=tolerance, rtol=tolerance)
    assert_same_state(reference, agent, tolerance)


def run_captured(variant, reference, agent, draw, dues, compiled, monkeypatch):
    """Updates on a buffer's batch, captured, of each kind in `dues`; every loss must agree."""
    device = next(agent.parameters()).device
    generator = torch.Generator().manual_seed(2)
    batch = draw(generator, device)
    sizes = batch.obs.shape[1], batch.actions.shape[1]
    rb = variant.ReplayBuffer(variant.Args(buffer_size=1000), *sizes, device)
    if compiled:
        variant.compile_agent(agent)
    variant.capture_agent(agent, rb)
    noise = torch.zeros_like(rb.batch.actions)  # which the graphs read
    monkeypatch.setattr(torch, "randn_like", lambda x: noise * 1)
    for due in dues:
        for to, new in zip(rb.batch, draw(generator, device), strict=True):
            to.copy_(new)
        noise.copy_(torch.randn(noise.shape, generator=generator))
        expected = reference.update(rb.batch, *due)
        found = agent.update(rb.batch, *due)
        for tag, value in expected.items():
            torch.testing.assert_close(found[tag], value, atol=1e-9, rtol=1e-9)


def test_one_update_agrees():
    reference, agent = make_pair()
    assert_same_state(reference, agent, 0.0)
    run_updates(reference, agent, 1, 1e-5)


def test_compiled_agents_agree():
    """One graph per method, and nothing compiles again while the replay buffer fills."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    reference, agent = make_pair()
    variant.compile_agent(agent)  # fullgraph=True: a graph break is an error
    obs, noise = torch.randn(1, OBS), torch.randn(1, A)
    expected = reference.act(obs, noise)
    torch.testing.assert_close(expected, agent.act(obs, noise), atol=1e-6, rtol=0)
    run_updates(reference, agent, 1, 1e-5)
    assert counters["stats"]["unique_graphs"] == 3
    rb = variant.ReplayBuffer(variant.Args(buffer_size=1000), OBS, A, CPU)
    for step in transitions(60, 1):
        rb.add(step)
        batch = rb.sample()
        agent.update_critic(batch, torch.randn_like(batch.actions))
        agent.update_actor(batch.obs, torch.randn_like(batch.actions))
        agent.update_target()
        agent.act(torch.randn(1, OBS), torch.randn(1, A))
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]


@pytest.mark.usefixtures("backend")
def test_compiled_updates_of_one_agent_are_not_anothers():
    """Of which tensors a graph belongs to is decided when it is traced."""
    _, first = make_pair()
    variant.compile_agent(first)
    batch, noise = random_batch(torch.Generator().manual_seed(3), CPU), torch.randn(B, A)
    first.update_critic(batch, noise)
    first.update_actor(batch.obs, noise)
    before = [parameter.clone() for parameter in first.parameters()]
    reference, second = make_pair(updates=5)
    variant.compile_agent(second)
    run_updates(reference, second, 1, 1e-5)
    assert all(map(torch.equal, before, first.parameters()))


@pytest.mark.usefixtures("backend")
def test_a_number_that_a_copy_anneals_counts_in_compiled_code():
    """Each update has another discount: it compiles once more, then the number is an input."""
    reference, agent = make_pair()
    variant.compile_agent(agent)
    for count, gamma in enumerate((0.99, 0.9, 0.8, 0.5), start=1):
        reference.args.gamma = agent.args.gamma = gamma
        run_updates(reference, agent, 1, 1e-5)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == min(count + 1, 3), "the critic's update, twice, and the actor's"


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_a_hundred_updates_agree(compiled, float64):
    reference, agent = make_pair()
    if compiled:
        variant.compile_agent(agent)
    run_updates(reference, agent, 100, 1e-9)


class Smooth(gym.Env):
    """HalfCheetah's shapes and no chaos: what two runs differ by does not grow.

    Episodes of 7 steps, which are truncated and terminated in turns.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float64)
    action_space, episodes = ACTION_SPACE, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.episodes = 0, self.episodes + 1
        self.state = self.np_random.normal(size=OBS)
        return self.state, {}

    def step(self, action):
        self.steps += 1
        self.state = 0.9 * self.state + 0.1 * np.resize(action, OBS)
        end, odd = self.steps == 7, self.episodes % 2 == 1
        return self.state, -float(np.square(self.state).mean()), end and odd, end and not odd, {}


@pytest.fixture
def smooth(tmp_path, monkeypatch):
    """The id of `Smooth`, whose runs go to tmp_path."""
    monkeypatch.chdir(tmp_path)
    gym.register("Smooth-v0", entry_point=lambda **_: Smooth())
    yield "Smooth-v0"
    gym.registry.pop("Smooth-v0")


def draw_alike(monkeypatch, baseline, variant):
    """Both replay buffers draw the same rows, decided by where the next one will be stored."""

    def draw(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.position)
        return torch.randint(self.size, (self.args.batch_size,), generator=generator)

    def sample(self) -> baseline.Batch:
        index = draw(self)
        return baseline.Batch._make(stored[index] for stored in self.data)

    def refill(self) -> None:
        torch.index_select(self.data, 0, draw(self), out=self.rows)

    monkeypatch.setattr(baseline.ReplayBuffer, "sample", sample)
    monkeypatch.setattr(variant.ReplayBuffer, "draw", refill)


def test_whole_iterations_agree(smooth, backend, monkeypatch):
    """Both `main`s with the same draws from the replay buffer: every row of metrics, every tensor.

    Acting, storing, what is updated when, logging; the variant eager and compiled.
    """
    draw_alike(monkeypatch, baseline, variant)
    monkeypatch.setattr(baseline, "LOG_EVERY", 5)
    monkeypatch.setattr(variant, "LOG_EVERY", 5)
    flags = {"env_id": smooth, "total_timesteps": 140, "learning_starts": 100, "save_model": True}
    flags |= {"policy_frequency": 3, "target_network_frequency": 2, "buffer_size": 130}
    flags |= {"cuda": False}
    found = []
    for module, more in (baseline, {}), (variant, {}), (variant, {"compile": True}):
        run_dir = module.main(module.Args(**flags, **more, exp_name=str(len(found))))
        found.append((read_checkpoint(run_dir), read_scalars(run_dir)))
    (expected, rows), *others = found
    assert len(rows["losses/qf_loss"]) == 8 and len(rows["charts/episodic_return"]) == 20
    for checkpoint, its_rows in others:
        assert its_rows.keys() == rows.keys()
        for tag in rows.keys() - {"charts/SPS", "charts/cpu_seconds", "charts/gpu_percent"}:
            np.testing.assert_allclose(its_rows[tag], rows[tag], rtol=1e-3, atol=1e-3)
        for part in ("actor", "qf", "qf_target", "log_alpha"):
            theirs, mine = (
                [x for name, x in each["agent"].items() if name.partition(".")[0] == part]
                for each in (expected, checkpoint)
            )
            theirs = stack_twins(theirs) if part.startswith("qf") else theirs
            for x, y in zip(theirs, mine, strict=True):
                error = (x - y).abs().mean().item()  # Adam makes much of the last bit of a tiny
                assert error < 1e-5, f"{part} differs by {error:.1e}"  # gradient, here and there
        fields = [expected["replay"][name].reshape(130, -1) for name in baseline.Batch._fields]
        columns = torch.cat(fields, dim=1)
        torch.testing.assert_close(columns, checkpoint["replay"]["rows"], rtol=0, atol=5e-3)
        assert checkpoint["replay"]["position"] == expected["replay"]["position"] == 10


def test_fixed_temperature_stays():
    obs = random_batch(torch.Generator().manual_seed(3), CPU).obs
    for script in (baseline, variant):
        agent = script.SAC(script.Args(autotune=False, alpha=0.3), OBS, ACTION_SPACE, CPU)
        agent.update_actor(obs, torch.zeros(B, A))
        assert agent.log_alpha.exp().item() == pytest.approx(0.3)


def test_actions_agree():
    reference, agent = make_pair()
    obs, noise = torch.randn(1, OBS), torch.randn(1, A)
    expected = reference.act(obs, noise)
    torch.testing.assert_close(expected, agent.act(obs, noise), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:This module is instantiated on a machine without CUDA")
def test_graphs_refuse_another_batch_and_other_args():
    """They would learn from the buffer's batch, by the numbers they were captured with."""
    args = variant.Args(buffer_size=1000)
    agent = variant.SAC(args, OBS, ACTION_SPACE, CPU)
    rb = variant.ReplayBuffer(args, OBS, A, CPU)
    rb.data.zero_()  # nothing has been stored: it would be whatever was in memory
    variant.capture_agent(agent, rb)
    batch = rb.sample()
    assert agent.update(batch, True, True)["losses/qf_loss"].isfinite()
    with pytest.raises(AssertionError, match="CUDA graphs read rb.batch"):
        agent.update(batch._replace(rewards=batch.rewards + 1), True, True)
    args.gamma = 0.5
    with pytest.raises(AssertionError, match="CUDA graphs keep args"):
        agent.update(batch, True, True)


def test_a_wrong_update_is_noticed():
    """The comparison itself: a variant with another discount or target rate must fail it."""
    for flag, value in (("gamma", 0.9), ("tau", 0.01)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_updates(reference, agent, 1, 1e-5)


def test_adam_matches_torch():
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    theirs = [torch.nn.Parameter(p.detach().double()) for p in mine]
    adam, reference = variant.Adam(mine, lr=1e-2), torch.optim.Adam(theirs, lr=1e-2)
    for _ in range(500):
        gradients = [torch.randn_like(p) * torch.rand(()) for p in mine]
        adam.step(gradients)
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.double()
        reference.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p.double(), q, atol=1e-4, rtol=0)


def transitions(count, num_envs, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield baseline.Batch(
            obs=rng.normal(size=(num_envs, OBS)),
            actions=rng.uniform(-1, 1, size=(num_envs, A)).astype(np.float32),
            next_obs=rng.normal(size=(num_envs, OBS)),
            rewards=rng.normal(size=num_envs),
            terminated=rng.random(num_envs) < 0.2,
        )


@pytest.mark.parametrize("script", [baseline, variant], ids=["baseline", "variant"])
def test_replay_returns_what_was_stored(script):
    args = script.Args(buffer_size=50, num_envs=4, batch_size=48)  # 48 rows, filled 1.25 times
    rb = script.ReplayBuffer(args, OBS, A, CPU)
    stored = {}
    for i, step in enumerate(transitions(15, 4)):
        rb.add(step)
        for n in range(4):
            stored[(i * 4 + n) % 48] = [np.float32(part[n]) for part in step]
    rewards = {float(parts[3]): parts for parts in stored.values()}
    seen = set()
    for _ in range(50):
        batch = rb.sample()
        for row in range(48):
            expected = rewards[batch.rewards[row].item()]  # KeyError: overwritten or never stored
            for part, value in zip(batch, expected, strict=True):
                np.testing.assert_array_equal(part[row].numpy(), value)
            seen.add(batch.rewards[row].item())
    assert len(seen) == 48
    other = script.ReplayBuffer(args, OBS, A, CPU)
    other.load_state_dict(rb.state_dict())
    for step in transitions(3, 4, seed=1):
        rb.add(step)
        other.add(step)
    torch.manual_seed(0)
    expected = rb.sample().obs.clone()
    torch.manual_seed(0)
    assert torch.equal(other.sample().obs, expected)
    steps = list(transitions(3, 4, seed=2))  # of a ring that is not full
    part = script.ReplayBuffer(args, OBS, A, CPU)
    for step in steps:
        part.add(step)
    grown = script.ReplayBuffer(replace(args, batch_size=1000), OBS, A, CPU)
    grown.load_state_dict(part.state_dict())
    known = {float(np.float32(reward)) for step in steps for reward in step.rewards}
    assert set(grown.sample().rewards.tolist()) == known
    for buffer_size in (44, 52):  # a ring of another length would lose transitions or mix them up
        other = script.ReplayBuffer(replace(args, buffer_size=buffer_size), OBS, A, CPU)
        with pytest.raises(ValueError, match="^--buffer-size: the checkpoint has 48$"):
            other.load_state_dict(rb.state_dict())


@pytest.mark.parametrize("script", [baseline, variant], ids=["baseline", "variant"])
def test_replay_samples_uniformly_while_it_grows(script):
    torch.manual_seed(0)
    rb = script.ReplayBuffer(script.Args(buffer_size=1000, batch_size=B), OBS, A, CPU)
    steps = list(transitions(40, 1))
    for size in (10, 40):  # the size must not freeze at the first draw
        for i, step in enumerate(steps[size - 30 if size == 40 else 0 : size]):
            number = i + (10 if size == 40 else 0)
            rb.add(step._replace(rewards=np.array([number])))
        counts = torch.zeros(size)
        for _ in range(100):
            counts += torch.bincount(rb.sample().rewards.long(), minlength=size)
        expected = 100 * B / size
        assert ((counts - expected).abs() < 6 * expected**0.5).all(), counts


@pytest.mark.parametrize("script", [baseline, variant], ids=["baseline", "variant"])
def test_replay_memory(script):
    """1 M transitions of HalfCheetah: at most 170 MB, float32, no second copy."""
    rb = script.ReplayBuffer(script.Args(), OBS, A, CPU)
    storages = {}
    for value in vars(rb).values():
        for tensor in value if isinstance(value, tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert 4 * 42 * 1_000_000 <= sum(storages.values()) <= 170e6


def assert_hunks_are_marked(baseline, variant):
    """Each hunk in which the variant differs starts with `# speed:`; only the docstring need not.

    Of the imports it is enough that the first is marked: sorted, they do not stay together.
    """
    texts = []
    for script in (baseline, variant):
        source = Path(script.__file__).read_text()
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


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_graphed_updates_agree_with_eager(compiled, float64):
    from tensordict.nn import CudaGraphModule

    device = torch.device("cuda")
    reference, agent = make_pair(device)
    if compiled:
        variant.compile_agent(agent)
    for name in ("update_critic", "update_actor", "update_target"):
        setattr(agent, name, CudaGraphModule(getattr(agent, name), warmup=3))
    run_updates(reference, agent, 10, 1e-4, device)  # warm-up, capture, replays
    run_updates(reference, agent, 100, 1e-3, device)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_captured_updates_agree(compiled, float64, monkeypatch):
    """As the script captures them: a graph per kind of update, which reads the buffer's batch."""
    dues = [(number % 2 == 0, number % 3 == 0) for number in range(1, 41)]
    pair = make_pair(torch.device("cuda"))
    run_captured(variant, *pair, random_batch, dues, compiled, monkeypatch)
    assert_same_state(*pair, 1e-9)


@pytest.mark.gpu
def test_graphed_draws_differ_and_cover_a_growing_buffer():
    from tensordict.nn import CudaGraphModule

    rb = variant.ReplayBuffer(variant.Args(buffer_size=1000), OBS, A, torch.device("cuda"))
    rb.draw = CudaGraphModule(rb.draw, warmup=3)
    batches = []
    for i, step in enumerate(transitions(500, 1)):
        rb.add(step._replace(rewards=np.array([float(i)])))
        batches.append(rb.sample().rewards.clone())
    drawn = torch.stack(batches[100:])
    assert not torch.equal(drawn[-1], drawn[-2])
    assert drawn[-1].max() > 400, "the size froze at capture"
    share = drawn / torch.arange(101, 501, device="cuda")[:, None]
    assert abs(share.mean().item() - 0.5) < 0.01
