"""TD3, both scripts: mathematics, parity, delayed updates, whole runs, resuming and learning.

What TD3 shares with SAC to the letter is tested there; that it is shared is tested here. Where a
test of SAC's asks nothing that only SAC has, TD3 is put through the same test.
"""

import ast
import itertools
import math
import sys
from functools import cache
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import test_resume
import test_sac
import test_sac_parity
import torch
from conftest import ROOT
from test_resume import SMALL, assert_same, in_tmp_path, same_precision, train  # noqa: F401
from test_sac_parity import ACTION_SPACE, CPU, OBS, A, B, random_batch, stack_twins, transitions

from leanrl import sac_continuous_action as sac
from leanrl import td3_continuous_action as baseline
from leanrl import td3_continuous_action_torchcompile as variant

BASELINE, VARIANT = baseline.SCRIPT, variant.SCRIPT
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
LOW, HIGH = (-1.0, 2.0), (3.0, 2.5)  # a box neither centred nor of unit size


@pytest.fixture
def sac_tests_on_td3(monkeypatch):
    """SAC's tests that name the scripts themselves find TD3's."""
    for tests in (test_sac_parity, test_resume):
        monkeypatch.setattr(tests, "baseline", baseline)
        monkeypatch.setattr(tests, "variant", variant)


# Mathematics


def make_agent(module, **flags):
    """An agent in float64 whose target networks are not the networks themselves."""
    torch.manual_seed(0)
    space = gym.spaces.Box(np.float32(LOW), np.float32(HIGH))
    agent = module.TD3(module.Args(**flags), 3, space, CPU)
    for part in (agent.actor, agent.actor_target, agent.qf, agent.qf_target):
        part.double()
    with torch.no_grad():
        for target in agent.target_parameters:
            target.add_(0.02 * torch.randn_like(target))
    agent.q_optimizer = module.Adam(agent.q_parameters, lr=1e-3)
    agent.actor_optimizer = module.Adam(agent.actor_parameters, lr=1e-3)
    return agent


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make_batch():
    """5 transitions, two of which end their episode."""
    terminated = torch.tensor([0, 1, 0, 0, 1], dtype=torch.float64)
    return baseline.Batch(normal(5, 3), normal(5, 2), normal(5, 3), normal(5), terminated)


def perturbed_by_hand(actor, obs, noise):
    """The definition in plain numbers: a list of actions, and how many of them met each bound."""
    layers = [
        (layer.weight.detach().numpy(), layer.bias.detach().numpy())
        for layer in (actor.fc1, actor.fc2, actor.fc_mu)
    ]
    actions, bounded = [], [0, 0]
    for x, noise_row in zip(obs.numpy(), noise.tolist(), strict=True):
        for weight, bias in layers[:2]:
            x = np.maximum(weight @ x + bias, 0)
        action = []
        x = layers[2][0] @ x + layers[2][1]
        for mu, n, low, high in zip(x, noise_row, LOW, HIGH, strict=True):
            half = (high - low) / 2
            free = low + half + half * math.tanh(mu) + half * n
            action.append(min(max(free, low), high))
            bounded = [bounded[0] + (free < low), bounded[1] + (free > high)]
        actions.append(action)
    return actions, bounded


@SCRIPTS
def test_noise_counts_in_half_ranges_and_actions_stay_in_the_box(module):
    actor = make_agent(module).actor
    obs, noise = normal(50, 3), normal(50, 2)
    expected, bounded = perturbed_by_hand(actor, obs, noise)
    assert min(bounded) > 5 and sum(bounded) < 50, "not a test of both bounds and of the inside"
    assert actor.perturbed(obs, noise).tolist() == [pytest.approx(row) for row in expected]
    expected, _ = perturbed_by_hand(actor, obs, torch.zeros(50, 2))
    assert actor(obs).tolist() == [pytest.approx(row) for row in expected]


@SCRIPTS
def test_acting_explores_as_much_as_the_flag_says(module):
    agent = make_agent(module, exploration_noise=0.3)
    obs, noise = normal(50, 3), normal(50, 2)
    expected, _ = perturbed_by_hand(agent.actor, obs, 0.3 * noise)
    actions = agent.act(obs, noise)
    assert actions.tolist() == [pytest.approx(row) for row in expected]
    assert not actions.requires_grad


def critic_losses_by_hand(agent, batch, noise, gamma):
    """Algorithm 1 with plain loops over the batch; `noise` in half ranges, clipped."""
    expected = [0.0, 0.0]
    for i in range(5):
        row = slice(i, i + 1)
        next_actions, _ = perturbed_by_hand(agent.actor_target, batch.next_obs[row], noise[row])
        next_actions = torch.tensor(next_actions, dtype=torch.float64)
        goal = batch.rewards[i].item()
        if not batch.terminated[i]:
            goal += gamma * min(agent.qf_target(batch.next_obs[row], next_actions)[:, 0].tolist())
        for k, value in enumerate(agent.qf(batch.obs[row], batch.actions[row])[:, 0].tolist()):
            expected[k] += (value - goal) ** 2 / 5
    return expected


@SCRIPTS
def test_critic_losses_match_the_paper(module):
    agent, batch = make_agent(module), make_batch()
    noise = 0.4 * normal(5, 2)
    expected = critic_losses_by_hand(agent, batch, noise, 0.9)
    losses, values = module.critic_loss(
        agent.qf, agent.qf_target, agent.actor_target, batch, noise, 0.9
    )
    assert losses.tolist() == pytest.approx(expected) and abs(expected[0] - expected[1]) > 1e-3
    torch.testing.assert_close(values, agent.qf(batch.obs, batch.actions))


@SCRIPTS
def test_smoothing_noise_is_clipped(module):
    """`update_critic` makes it from standard normal noise: scaled first, then clipped."""
    agent = make_agent(module, policy_noise=0.4, noise_clip=0.3, gamma=0.9)
    batch, noise = make_batch(), normal(5, 2)
    clipped = [[min(max(0.4 * n, -0.3), 0.3) for n in row] for row in noise.tolist()]
    share = np.mean(np.abs(clipped) == 0.3)
    assert 0 < share < 1, "not a test of the clipped and of the others"
    expected = critic_losses_by_hand(agent, batch, torch.tensor(clipped), 0.9)
    values = agent.qf(batch.obs, batch.actions).mean(dim=1).tolist()
    assert agent.update_critic(batch, noise).tolist() == pytest.approx(expected + values)


def network(agent, k):
    """The tensors of the k-th Q-network."""
    if isinstance(agent, variant.TD3):
        return [parameter[k] for parameter in agent.q_parameters]
    return list(agent.qf.qfs[k].parameters())


@SCRIPTS
def test_actor_loss_is_minus_the_first_network_value(module):
    agent, obs = make_agent(module), normal(5, 3)

    def by_hand():
        actions, _ = perturbed_by_hand(agent.actor, obs, torch.zeros(5, 2))
        values = agent.qf(obs, torch.tensor(actions, dtype=torch.float64))[0]
        return -sum(values.tolist()) / 5

    losses = [module.actor_loss(agent.actor, agent.qf, obs).item()]
    assert losses[0] == pytest.approx(by_hand())
    for k in (1, 0):  # the second network does not matter, the first does
        with torch.no_grad():
            for tensor in network(agent, k):
                tensor.add_(0.1)
        losses.append(module.actor_loss(agent.actor, agent.qf, obs).item())
        assert losses[-1] == pytest.approx(by_hand())
    assert losses[0] == losses[1] != losses[2]


@SCRIPTS
def test_each_update_moves_its_own_networks(module):
    agent, batch = make_agent(module, tau=0.1), make_batch()
    groups = {"actor": agent.actor_parameters, "critic": agent.q_parameters}
    groups["targets"] = agent.target_parameters

    def moved(update, *inputs):
        """The groups of which every tensor changed; no group may change in part."""
        before = {name: [tensor.detach().clone() for tensor in groups[name]] for name in groups}
        update(*inputs)
        changed = {
            name: {torch.equal(x, y) for x, y in zip(before[name], groups[name], strict=True)}
            for name in groups
        }
        assert all(len(equal) == 1 for equal in changed.values()), changed
        return before, [name for name in groups if changed[name] == {False}]

    assert moved(agent.update_critic, batch, normal(5, 2))[1] == ["critic"]
    loss = module.actor_loss(agent.actor, agent.qf, batch.obs).item()
    assert moved(agent.update_actor, batch.obs)[1] == ["actor"]
    assert module.actor_loss(agent.actor, agent.qf, batch.obs).item() < loss
    before, changed = moved(agent.update_target)
    assert changed == ["targets"]
    networks = [*agent.actor.parameters(), *agent.qf.parameters()]
    targets = [*agent.actor_target.parameters(), *agent.qf_target.parameters()]
    for old, source, new in zip(before["targets"], networks, targets, strict=True):
        torch.testing.assert_close(new.detach(), 0.9 * old + 0.1 * source.detach())


@SCRIPTS
def test_evaluation_acts_without_noise(module):
    """Against a loop over single environments without any of the script's machinery."""
    args = module.Args(**SMALL, eval_episodes=2, seed=4, exploration_noise=9.0)
    torch.manual_seed(0)
    actor = module.Actor(3, gym.spaces.Box(-2, 2, (1,), np.float32))
    returns = []
    for episode in range(2):
        env = gym.make("Pendulum-v1")
        obs, _ = env.reset(seed=4 + module.EVAL_SEED + episode)
        total, truncated = 0.0, False
        while not truncated:
            action = actor(torch.tensor(obs)[None])[0].detach().numpy()
            obs, reward, _, truncated, _ = env.step(action)
            total += reward
        returns.append(total)
    found = module.evaluate(actor, args, torch.device("cpu"), None)
    assert found == pytest.approx(np.mean(returns), rel=1e-4)


# Parity: equal weights, batch and noise in, equal updates out


def tensors(agent) -> dict[str, list[torch.Tensor]]:
    """Everything that an update changes, in the variant's layout."""
    stacked, actor_size = isinstance(agent, variant.TD3), len(agent.actor_parameters)
    twins = list if stacked else stack_twins
    state = {
        "actor": agent.actor_parameters,
        "critic": twins(agent.q_parameters),
        "actor_target": agent.target_parameters[:actor_size],
        "critic_target": twins(agent.target_parameters[actor_size:]),
    }
    for name, layout in (("q_optimizer", twins), ("actor_optimizer", list)):
        optimizer = getattr(agent, name)
        if stacked:
            moments = optimizer.exp_avgs, optimizer.exp_avg_sqs
        else:
            states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
            moments = [layout([s[key] for s in states]) for key in ("exp_avg", "exp_avg_sq")]
        state[f"{name}.exp_avg"], state[f"{name}.exp_avg_sq"] = map(list, moments)
    return {key: [tensor.detach() for tensor in value] for key, value in state.items()}


def make_pair(device=CPU, updates=3):
    """A baseline agent that has learned a little, and a variant agent with the same state."""
    torch.manual_seed(0)
    reference = baseline.TD3(baseline.Args(), OBS, ACTION_SPACE, device)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        batch = random_batch(generator, device)
        reference.update_critic(batch, torch.randn(B, A, generator=generator).to(device))
        reference.update_actor(batch.obs)
        reference.update_target()
    agent = variant.TD3(variant.Args(), OBS, ACTION_SPACE, device)
    with torch.no_grad():
        for target in reference.target_parameters:  # else nearly the networks: a mix-up would hide
            target.add_(0.01 * torch.randn_like(target))
        for mine, theirs in zip(tensors(agent).items(), tensors(reference).items(), strict=True):
            for to, source in zip(mine[1], theirs[1], strict=True):
                to.copy_(source)
        for optimizer in (agent.q_optimizer, agent.actor_optimizer):
            for power, beta in zip(optimizer.beta_powers, optimizer.betas, strict=True):
                power.fill_(beta**updates)
    return reference, agent


def compile_agent(agent):
    torch._dynamo.reset()
    variant.compile_agent(agent)
    return agent


def run_updates(reference, agent, count, tolerance, device=CPU):
    """The same updates on both; every loss and, at the end, every tensor must agree."""
    generator = torch.Generator().manual_seed(2)
    for update in range(1, count + 1):
        batch = random_batch(generator, device)
        noise = torch.randn(B, A, generator=generator).to(device)
        metrics = [each.update_critic(batch, noise).clone() for each in (reference, agent)]
        torch.testing.assert_close(*metrics, atol=tolerance, rtol=tolerance)
        if update % 2 == 0 or update == count:
            metrics = [each.update_actor(batch.obs).clone() for each in (reference, agent)]
            torch.testing.assert_close(*metrics, atol=tolerance, rtol=tolerance)
            for each in (reference, agent):
                each.update_target()
    assert_same(tensors(reference), tensors(agent), "agent", tolerance)


@COMPILED
def test_one_update_agrees(compiled):
    reference, agent = make_pair()
    assert_same(tensors(reference), tensors(agent), "agent")
    run_updates(reference, compile_agent(agent) if compiled else agent, 1, 1e-5)


@COMPILED
def test_a_hundred_updates_agree(compiled, float64):
    reference, agent = make_pair()
    run_updates(reference, compile_agent(agent) if compiled else agent, 100, 1e-9)


@pytest.mark.parametrize(
    ("flag", "value"), [("gamma", 0.9), ("tau", 0.01), ("policy_noise", 0.3), ("noise_clip", 0.3)]
)
def test_a_wrong_update_is_noticed(flag, value):
    """The comparison itself: a variant with another setting must fail it."""
    reference, agent = make_pair()
    setattr(agent.args, flag, value)
    with pytest.raises(AssertionError):
        run_updates(reference, agent, 1, 1e-5)


def test_no_graph_break_and_no_recompilation():
    """One graph per function, and nothing compiles again after each has been called once."""
    reference, agent = make_pair()
    torch._dynamo.utils.counters.clear()
    compile_agent(agent)  # fullgraph=True: a graph break is an error
    rb, counts = variant.ReplayBuffer(1000, 1, OBS, A, B, CPU), []
    for step in itertools.islice(transitions(60, 1), 40):
        rb.add(*step)
        batch = rb.sample()
        agent.update_critic(batch, torch.randn_like(batch.actions))
        agent.update_actor(batch.obs)
        agent.update_target()
        obs, noise = torch.randn(1, OBS), torch.randn(1, A)
        actions = agent.act(obs, noise)
        counters = torch._dynamo.utils.counters
        counts.append((counters["stats"]["unique_graphs"], len(counters["graph_break"])))
    assert counts[0] == (3, 0), counts[0]
    assert counts[-1] == counts[0], "compiled again after the first call"
    reference.actor.load_state_dict(agent.actor.state_dict())
    torch.testing.assert_close(actions, reference.act(obs, noise), atol=1e-6, rtol=0)


@pytest.mark.gpu
@COMPILED
def test_graphed_updates_agree_with_eager(compiled, float64):
    from tensordict.nn import CudaGraphModule

    device = torch.device("cuda")
    reference, agent = make_pair(device)
    if compiled:
        compile_agent(agent)
    for name in ("update_critic", "update_actor", "update_target"):
        setattr(agent, name, CudaGraphModule(getattr(agent, name), warmup=3))
    run_updates(reference, agent, 10, 1e-9, device)  # warm-up, capture, replays
    run_updates(reference, agent, 100, 1e-9, device)


# What `main` does with them


@pytest.fixture
def calls(request, monkeypatch):
    """What `main` calls of TD3, in order: (name, inputs)."""
    td3, made = request.getfixturevalue("module").TD3, []

    def recorded(name, function):
        def call(self, *inputs):
            made.append((name, inputs))
            return function(self, *inputs)

        return call

    for name in ("act", "update_critic", "update_actor", "update_target"):
        monkeypatch.setattr(td3, name, recorded(name, getattr(td3, name)))
    return made


@SCRIPTS
@pytest.mark.parametrize(
    ("num_envs", "utd_ratio", "policy_frequency", "updates"),
    [(1, 1.0, 2, 160), (4, 1.0, 2, 160), (4, 0.25, 2, 40), (1, 2.0, 2, 320), (1, 1.0, 3, 160)],
)
def test_policy_and_targets_are_delayed(
    module, calls, num_envs, utd_ratio, policy_frequency, updates
):
    """Updates = steps after the random phase x ratio; every n-th has one of policy and targets."""
    flags = {"num_envs": num_envs, "utd_ratio": utd_ratio, "policy_frequency": policy_frequency}
    train(module, **flags, total_timesteps=260)
    names = [name for name, _ in calls if name != "act"]
    expected = []
    for number in range(1, updates + 1):
        expected.append("update_critic")
        if number % policy_frequency == 0:
            expected += ["update_actor", "update_target"]
    assert names == expected


@SCRIPTS
def test_noise_is_standard_normal_and_fresh(module, calls):
    train(module, total_timesteps=300, num_envs=2)
    for name, count in (("act", 100), ("update_critic", 200)):
        noise = torch.stack([inputs[1].flatten() for call, inputs in calls if call == name])
        assert len(noise) == count
        assert len(noise.unique()) > 0.99 * noise.numel(), "shared, or there before"
        error = 4 / noise.numel() ** 0.5
        assert abs(noise.mean()) < error and abs(noise.std() - 1) < error / 2**0.5


@SCRIPTS
def test_truncated_episodes_bootstrap_from_their_final_observation(module, tmp_path, monkeypatch):
    test_sac.test_truncated_episodes_bootstrap_from_their_final_observation(
        module, tmp_path, monkeypatch
    )


# Whole runs


@pytest.mark.parametrize(
    "command",
    [(BASELINE,), (VARIANT,), (VARIANT, "--compile")],
    ids=["baseline", "eager", "compile"],
)
def test_run_from_end_to_end(command, tmp_path):
    result = test_sac.run(tmp_path, *command, *test_sac.SMALL, "--total-timesteps", "500")
    run_dir, config, stages, scalars = test_sac.read_run(tmp_path)
    assert str(run_dir.name) in result.stdout
    assert config["args"].get("compile", False) == ("--compile" in command)
    assert stages["sps_steady"] > 0 and stages["warmup_seconds"] > 0
    assert stages["stages"]["backpropagation"]["count"] == 200  # steady from step 300 to 500
    assert [step for step, _ in scalars["charts/episodic_length"]] == [200, 400]
    assert all(math.isfinite(value) for _, value in scalars["charts/episodic_return"])
    losses = {tag: values for tag, values in scalars.items() if tag.startswith("losses/")}
    names = "qf1_loss", "qf2_loss", "qf1_values", "qf2_values", "actor_loss"
    assert losses.keys() == {f"losses/{name}" for name in names}
    for tag, rows in losses.items():
        assert [step for step, _ in rows] == [300, 400, 500]
        assert all(math.isfinite(value) for _, value in rows)
        assert len({value for _, value in rows}) == 3, f"{tag} stayed: no update happened"


@SCRIPTS
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--exploration-noise", "-1"), "--exploration-noise must not be negative, got -1"),
        (("--policy-noise", "-1"), "--policy-noise must not be negative, got -1"),
        (("--noise-clip", "-1"), "--noise-clip must not be negative, got -1"),
        (("--policy-frequency", "0"), "--policy-frequency must be positive, got 0"),
        (("--env-id", "CartPole-v1"), "TD3 needs a bounded continuous action space; CartPole-v1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(module, flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module.SCRIPT, *flags, "--total-timesteps", "1"])
    with pytest.raises(SystemExit) as stopped:
        module.main(module.parse_args())
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith(f"error: {message}")
    assert not Path("runs").exists()  # no work was started


# Resuming


@SCRIPTS
def test_a_resumed_run_is_the_uninterrupted_run(module):
    """Bitwise, stopped within an episode and after an odd update: the delay must go on as well."""
    test_resume.test_a_resumed_run_is_the_uninterrupted_run(module, 250, {})


@pytest.mark.gpu
@COMPILED
def test_a_graphed_run_resumes_like_an_eager_one(compiled, sac_tests_on_td3):
    test_resume.test_a_graphed_run_resumes_like_an_eager_one(compiled)


@SCRIPTS
def test_a_checkpoint_of_sac_is_refused_by_both_names(module, monkeypatch, capsys):
    part = train(sac, total_timesteps=120, save_model=True)
    monkeypatch.setattr(sys, "argv", [module.SCRIPT, "--resume", str(part)])
    capsys.readouterr()
    for start in (module.parse_args, lambda: module.main(module.Args(resume=str(part)))):
        with pytest.raises(SystemExit) as stopped:
            start()
        (line,) = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2 and line.startswith("error: ")
        assert line.endswith(f"was written by {sac.SCRIPT}, not by {module.SCRIPT}")


# What is the same


def test_differing_hunks_are_marked():
    test_sac_parity.assert_hunks_are_marked(baseline, variant)


@cache
def definitions(pattern):
    """{name: {file name: source}} of the functions and classes in leanrl/ at top level."""
    found = {}
    for path in sorted((ROOT / "leanrl").glob(pattern)):
        source = path.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_source_segment(source, node)
                found.setdefault(node.name, {})[path.name] = text
    return found


def assert_same_source(sources):
    assert len(sources) > 1, "defined in less than two scripts: nothing is shared"
    (first, expected), *others = sources.items()
    for name, source in others:
        assert source == expected, f"differs between {first} and {name}"


@pytest.mark.parametrize(
    "name",
    [
        "fail",
        "run_config",
        "Repeatable",
        "can_render",
        "track",
        "get_rng_states",
        "set_rng_states",
        "repeat_episodes",
        "save_checkpoint",
        "load_checkpoint",
        "resumed_dir",
        "print_unless_raised_again",
        "parse_args",
    ],
)
def test_what_scripts_share_is_the_same_to_the_letter(name):
    """A repair in one script must reach all others: every script that has it joins by itself."""
    assert_same_source(definitions("*_*.py")[name])


@pytest.mark.parametrize("suffix", ["", "_torchcompile"], ids=["baseline", "variant"])
def test_replay_and_optimizer_are_those_that_sac_tests(suffix):
    """Why the tests of SAC's replay buffer, Adam and precision need no repetition here."""
    found = definitions(f"[st][ad][c3]_continuous_action{suffix}.py")
    names = ["Batch", "ReplayBuffer", "QNetwork", "gradient_step"]
    for name in names + (["Adam", "keeps_float32"] if suffix else []):
        assert_same_source(found[name])


@pytest.mark.parametrize("suffix", ["", "_torchcompile"], ids=["baseline", "variant"])
def test_ppo_is_one_algorithm(suffix):
    """Why the tests of PPO's advantages, losses and Adam need no repetition for each task."""
    found, on_cartpole = definitions("ppo_*.py"), f"ppo_cartpole_gpu{suffix}.py"
    on_pendulum = f"ppo_pendulum_gpu{suffix}.py"
    for function in ("layer_init", "compute_gae", "policy_loss", "value_loss"):
        same_kind = [name for name in found[function] if ("_torchcompile" in name) == bool(suffix)]
        assert len(same_kind) >= 3
        assert_same_source({name: found[function][name] for name in same_kind})
    for function in ("sample", "ppo_loss"):  # of a categorical policy
        names = f"ppo_atari_envpool{suffix}.py", on_cartpole
        assert_same_source({name: found[function][name] for name in names})
    functions = ["Batch", "gaussian_log_prob", "ppo_loss"]  # of a Gaussian one
    for function in functions + (["ActorCritic"] if not suffix else []):
        names = f"ppo_continuous_action{suffix}.py", on_pendulum
        assert_same_source({name: found[function][name] for name in names})
    functions = ["check_args", "free_bytes", "make_envs"]  # with environments on the device
    for function in functions + (
        ["build_kernel", "run", "pieces", "compile_agent"] if suffix else []
    ):
        assert_same_source({name: found[function][name] for name in (on_cartpole, on_pendulum)})
    if suffix:
        names = f"ppo_atari_envpool{suffix}.py", on_cartpole, on_pendulum
        adam = definitions("sac_*.py")["Adam"]
        assert_same_source(adam | {name: found["Adam"][name] for name in names})


@pytest.mark.parametrize("suffix", ["", "_torchcompile"], ids=["baseline", "variant"])
@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (
            "ppo_continuous_action",
            "ppo_continuous_action_async",
            "make_envs RunningMeanStd Normalizer ActorCritic gaussian_log_prob evaluate",
        ),
        (
            "ppo_atari_envpool",
            "ppo_atari_envpool_multigpu",
            "AtariEnvs ActorCritic Batch Rollout sample evaluate film",
        ),
    ],
    ids=["asynchronous", "several GPUs"],
)
def test_more_processes_change_no_more_than_they_must(one, other, names, suffix):
    """Why the tests of the script of one process need no repetition."""
    names = names.split()
    if suffix:
        names += ["Adam", *(["LeanVectorEnv"] if "async" in other else ["Group"])]
    for name in names:
        sources = definitions("ppo_*.py")[name]
        assert_same_source(
            {file: sources[file] for file in (f"{x}{suffix}.py" for x in (one, other))}
        )


# Learning


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [(BASELINE,), (VARIANT, "--compile")], ids=["baseline", "variant"]
)
def test_pendulum_is_learned(command, tmp_path):
    """A random policy gets about -1,200 per episode of Pendulum-v1, a solved one about -150."""
    flags = ("--env-id", "Pendulum-v1", "--total-timesteps", "10000", "--learning-starts", "1000")
    test_sac.run(tmp_path, *command, *flags)
    returns = [value for _, value in test_sac.read_run(tmp_path)[3]["charts/episodic_return"]]
    assert len(returns) == 50
    assert np.mean(returns[:5]) < -800, "not a task that starts unsolved"
    assert np.mean(returns[-10:]) > -250, returns
