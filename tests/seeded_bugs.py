"""Do the tests still bite? Bugs that were put in on purpose, each with the test that must fail.

    python tests/seeded_bugs.py                     all of them, one after the other
    python tests/seeded_bugs.py --jobs 2            two at a time
    python tests/seeded_bugs.py --only ppo_atari    those of files, tests or texts that match *GLOB*
    python tests/seeded_bugs.py --all-tests         by all test files that name the script
    python tests/seeded_bugs.py --table BUGS.json   others than those below

Each bug is written into every file that shares its text, in a copy of the repository: that twins
differ cannot show it, only what the code does. First all named tests run without a bug, because a
test that fails anyway shows nothing. Then each bug has a process of its own, in which its test runs
until the first failure. A line says what came of it:

    caught       by that test, with the error
    not caught   the test passes, was skipped here, did not end, or the script cannot be imported
    stale        the old text is not found as often as said: whoever changed it mends the entry

The exit status is 0 if all are caught and 1 otherwise. Who changes a script runs this with --only;
who adds a test adds the bug that it catches to the table below, seen to fail.
"""

import argparse
import ast
import fnmatch
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# what compares texts, which a bug in all files at once does not touch or touches trivially
TEXT_TESTS = "test_shared.py", "test_seeded_bugs.py"
TEXT_NAMES = "differing_hunks", "carries_the_region", "to_the_letter"
LIMIT = 600  # seconds for a test, however busy the machine
IMPORTS = "gymnasium matplotlib.pyplot mujoco pytest tensordict.nn torch torch._dynamo"
IMPORTS += " torch.utils.tensorboard tqdm tyro"


class Bug(NamedTuple):
    """A change of `old` to `new` in all `files`, which `test` must notice."""

    files: str  # patterns below the repository, separated by spaces
    old: str
    new: str
    test: str  # pytest's name of it below tests/
    times: int = 1  # how often the old text stands in each of the files

    def paths(self, root: Path = ROOT) -> list[Path]:
        return [path for pattern in self.files.split() for path in sorted(root.glob(pattern))]


# where a text stands that several scripts share
REGION = "leanrl/stopwatch.py leanrl/*_*_*.py"
SAC = "leanrl/sac_*.py"
TD3 = "leanrl/td3_*.py"
OFF_POLICY = f"{SAC} {TD3}"
PPO = "leanrl/ppo_*.py"
CONTINUOUS = "leanrl/ppo_continuous_*.py"
PPO_GYMNASIUM = "leanrl/ppo_continuous_action.py leanrl/ppo_continuous_action_torchcompile.py"
ASYNC = "leanrl/ppo_*_async*.py"
ATARI = "leanrl/ppo_atari_*.py"
CARTPOLE = "leanrl/ppo_cartpole_*.py"
GAMES = f"{ATARI} {CARTPOLE}"
WORLDS = "leanrl/*_mujoco_*.py"
PPO_WORLDS = "leanrl/ppo_mujoco_*.py"
MUJOCO = "leanrl/mujoco_worlds.py"
VARIANTS = "leanrl/*_torchcompile.py"
WITH_ADAM = "leanrl/[!p]*_torchcompile.py leanrl/ppo_*_torchcompile.py"  # PQN has RAdam
SWEEP = "leanrl/sweep.py"

BUGS = [
    # Losses of SAC and TD3
    Bug(
        SAC,
        "next_values = next_q.amin(dim=0) - agent.log_alpha",
        "next_values = next_q.mean(dim=0) - agent.log_alpha",
        "test_sac.py::test_losses_match_the_paper",
    ),
    Bug(
        SAC,
        "values = agent.qf(obs, actions).amin(dim=0)",
        "values = agent.qf(obs, actions)[0]",
        "test_sac.py::test_losses_match_the_paper",
    ),
    Bug(
        "leanrl/sac_*.py",
        "(log_probs.detach() + target_entropy)",
        "(log_probs.detach() - target_entropy)",
        "test_sac.py::test_losses_match_the_paper",
    ),
    Bug(
        SAC,
        "- 2 * (math.log(2) - x - F.softplus(-2 * x))",
        "- 2 * (math.log(2) - x - F.softplus(-x))",
        "test_sac.py::test_log_probs_match_the_density",
    ),
    Bug(
        SAC,
        "LOG_STD_MIN = -5.0",
        "LOG_STD_MIN = -20.0",
        "test_sac.py::test_log_probs_match_the_density",
    ),
    Bug(
        TD3,
        "next_values = next_q.amin(dim=0)\n",
        "next_values = next_q.amax(dim=0)\n",
        "test_td3.py::test_critic_losses_match_the_paper",
    ),
    Bug(
        TD3,
        "actions = self(obs) + noise * self.action_scale",
        "actions = self(obs) + noise",
        "test_td3.py::test_noise_counts_in_half_ranges_and_actions_stay_in_the_box",
    ),
    Bug(
        TD3,
        "low = self.action_bias - self.action_scale",
        "low = -self.action_scale",
        "test_td3.py::test_noise_counts_in_half_ranges_and_actions_stay_in_the_box",
    ),
    Bug(
        TD3,
        "targets = [*self.actor_target.parameters(), *self.qf_target.parameters()]\n"
        "        parameters = [*self.actor.parameters(), *self.qf.parameters()]",
        "targets = [*self.qf_target.parameters()]\n        parameters = [*self.qf.parameters()]",
        "test_td3.py::test_each_update_moves_its_own_networks",
    ),
    # SAC and TD3: the agent and its replay buffer
    Bug(
        SAC,
        "self.target_entropy = -float(action_dim)",
        "self.target_entropy = -0.5 * action_dim",
        "test_sac.py::test_an_agent_begins_as_it_is_told_and_each_update_moves_its_own_networks",
    ),
    Bug(
        SAC,
        "if self.args.autotune:",
        "if self.args.alpha:",
        "test_sac_parity.py::test_fixed_temperature_stays",
    ),
    Bug(
        OFF_POLICY,
        "self.size = max(self.size, end)",
        "self.size = end",
        "test_sac_parity.py::test_replay_returns_what_was_stored",
    ),
    Bug(
        OFF_POLICY,
        "self.position = end % self.capacity",
        "self.position = end % (self.capacity - 1)",
        "test_sac_parity.py::test_replay_returns_what_was_stored",
    ),
    Bug(
        "leanrl/sac_*_torchcompile.py leanrl/td3_*_torchcompile.py",
        "index = (uniform * self.device_size).long()",
        "index = (uniform * self.device_size - 1).long()",
        "test_sac_parity.py::test_replay_samples_uniformly_while_it_grows",
    ),
    Bug(
        "leanrl/sac_*_torchcompile.py leanrl/td3_*_torchcompile.py",
        "self.device_size.fill_(self.size)",
        "self.device_size.fill_(self.capacity)",
        "test_sac_parity.py::test_replay_returns_what_was_stored",
    ),
    Bug(
        WITH_ADAM,
        "torch._foreach_mul_(denominators, (1 - beta2_power).rsqrt())",
        "torch._foreach_mul_(denominators, (1 - beta2_power).sqrt())",
        "test_sac_parity.py::test_adam_matches_torch",
    ),
    Bug(
        VARIANTS,
        "torch._foreach_lerp_(self.exp_avgs, gradients, 1 - beta1)",
        "torch._foreach_lerp_(self.exp_avgs, gradients, beta1)",
        "test_sac_parity.py::test_adam_matches_torch",
    ),
    Bug(
        VARIANTS,
        "assert vars(agent.args) == recorded,",
        "assert agent.args,",
        "test_cartpole.py::test_a_captured_epoch_refuses_other_args",
    ),
    # SAC and TD3: main
    Bug(
        f"{TD3} leanrl/sac_continuous_*.py",
        'real_next_obs[i] = infos["final_obs"][i]',
        "real_next_obs[i] = next_obs[i]",
        "test_sac.py::test_truncated_episodes_bootstrap_from_their_final_observation",
    ),
    Bug(
        "leanrl/td3_*.py leanrl/sac_continuous_*.py",
        "real_next_obs, rewards, terminated))",
        "real_next_obs, rewards, ended))",
        "test_sac.py::test_truncated_episodes_bootstrap_from_their_final_observation",
    ),
    Bug(
        "leanrl/sac_*.py leanrl/td3_*.py",
        "due_updates = int((run.step + args.num_envs - args.learning_starts) * args.utd_ratio)",
        "due_updates = int((run.step - args.learning_starts) * args.utd_ratio)",
        "test_sac.py::test_update_to_data_ratio",
    ),
    Bug(
        "leanrl/sac_*.py leanrl/td3_*.py",
        "due_updates = int((run.step + args.num_envs - args.learning_starts) * args.utd_ratio)",
        "due_updates = int((run.step + args.num_envs) * args.utd_ratio)",
        "test_resume.py::test_a_resumed_run_goes_on_from_all_it_had[growing-baseline]",
    ),
    Bug(
        OFF_POLICY,
        "actor_due = num_updates % args.policy_frequency == 0",
        "actor_due = num_updates % 2 == 0",
        "test_td3.py::test_policy_and_targets_are_delayed",
    ),
    Bug(
        "leanrl/sac_continuous_*.py",
        "for _ in range(self.args.policy_frequency):",
        "for _ in range(1):",
        "test_sac.py::test_update_to_data_ratio",
    ),
    Bug(
        "leanrl/sac_*.py leanrl/td3_*.py",
        "num_updates = int(max(run.start_step - args.learning_starts, 0) * args.utd_ratio)",
        "num_updates = 0",
        "test_resume.py::test_a_resumed_run_goes_on_from_all_it_had",
    ),
    Bug(
        f"{OFF_POLICY} {ATARI}",
        "args.seed + run.start_step",
        "args.seed",
        "test_resume.py::test_a_resumed_run_goes_on_from_all_it_had",
    ),
    Bug(
        "leanrl/sac_*.py leanrl/td3_*.py",
        'rb.load_state_dict(run.restore(agent)["replay"])',
        "run.restore(agent)",
        "test_resume.py::test_a_resumed_run_goes_on_from_all_it_had",
    ),
    Bug(
        "leanrl/sac_continuous_*.py leanrl/td3_*.py",
        "if run.step < args.learning_starts:",
        "if run.step <= args.learning_starts:",
        "test_sac.py::test_the_loop_acts_learns_and_stores_as_it_says",
    ),
    # Evaluation
    Bug(
        f"leanrl/sac_continuous_*.py {TD3} {CONTINUOUS} {CARTPOLE}",
        "np.random.SeedSequence(args.seed).generate_state(args.eval_episodes) >> 1",
        "args.seed + np.arange(args.eval_episodes)",
        "test_sac.py::test_evaluation_is_the_mean_action_in_fixed_episodes",
    ),
    Bug(
        WORLDS,
        "np.random.SeedSequence(args.seed).generate_state(args.eval_episodes) >> 1",
        "args.seed + np.arange(args.eval_episodes)",
        "test_mujoco_runs.py::test_evaluation_is_the_mean_action_in_whole_episodes",
    ),
    Bug(
        f"{PPO} {OFF_POLICY}",
        "returns += running * rewards",
        "returns += rewards",
        "test_sac.py::test_every_episode_of_an_evaluation_counts_once",
    ),
    Bug(
        f"{CONTINUOUS} {PPO_WORLDS} {CARTPOLE} {OFF_POLICY}",
        "running &= ~(terminated | truncated)",
        "running &= ~terminated",
        "test_ppo.py::test_an_evaluation_is_the_mean_action_under_frozen_statistics",
    ),
    Bug(
        CONTINUOUS,
        "inputs = (torch.as_tensor(obs) - mean) / std",
        "inputs = torch.as_tensor(obs) / std - mean",
        "test_ppo.py::test_an_evaluation_is_the_mean_action_under_frozen_statistics",
    ),
    Bug(
        CONTINUOUS,
        'means = statistics["obs_rms_mean"]  # (N, O)\n    mean = means.mean(dim=0)',
        'means = statistics["obs_rms_mean"]  # (N, O)\n    mean = means[0]',
        "test_ppo.py::test_an_evaluation_is_the_mean_action_under_frozen_statistics",
    ),
    # PPO: losses and agent
    Bug(
        PPO,
        "weights = gamma * lam * (1 - ended)",
        "weights = gamma * lam * torch.ones_like(ended)",
        "test_ppo.py::test_advantages_match_a_loop_in_float64",
    ),
    Bug(
        "leanrl/ppo_*_torchcompile.py",
        "more = weights[: len(begin)] * x[distance:]",
        "more = weights[: len(begin)] * x[-len(begin) :] * 0.999",
        "test_ppo.py::test_advantages_match_a_loop_in_float64",
    ),
    Bug(
        f"{GAMES} {CONTINUOUS}",
        "errors = torch.max(errors, clipped_errors)",
        "errors = clipped_errors",
        "test_ppo.py::test_losses_match_plain_loops",
    ),
    Bug(
        f"{GAMES} {CONTINUOUS}",
        "change = (values - batch.values).clamp(-clip_coef, clip_coef)",
        "change = (values - batch.returns).clamp(-clip_coef, clip_coef)",
        "test_ppo.py::test_losses_match_plain_loops",
    ),
    Bug(
        "leanrl/ppo_*.py",
        "loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss",
        "loss = pg_loss + args.ent_coef * entropy + args.vf_coef * v_loss",
        "test_atari.py::test_losses_match_plain_loops",
    ),
    Bug(
        f"{GAMES} {CONTINUOUS}",
        "clip_coef if args.clip_vloss else None",
        "clip_coef",
        "test_ppo.py::test_losses_match_plain_loops",
    ),
    Bug(
        PPO,
        "(ratios - 1).abs() > args.clip_coef",
        "(ratios - 1) > args.clip_coef",
        "test_atari.py::test_metrics_of_updates_and_target_kl",
    ),
    Bug(
        f"{ATARI} {PPO_GYMNASIUM}",
        "returns=advantages + rollout.values,",
        "returns=advantages + next_values,",
        "test_ppo.py::test_an_iteration_is_that_of_stable_baselines3",
    ),
    Bug(
        f"{ATARI} {PPO_GYMNASIUM}",
        "next_values = torch.where(rollout.ended.bool(), rollout.final_values, next_values)",
        "next_values = next_values + rollout.final_values",
        "test_ppo.py::test_an_iteration_is_that_of_stable_baselines3",
    ),
    # PPO: environments and main
    Bug(
        "leanrl/ppo_continuous_*_torchcompile.py",
        "        centered = x - mean\n        var += (delta * centered - var) / count",
        "        centered = x - mean\n        var += (delta * delta - var) / count",
        "test_ppo.py::test_the_variants_environments_are_those_of_gymnasiums_wrappers",
    ),
    Bug(
        "leanrl/ppo_continuous_*_torchcompile.py",
        "discounted[i] *= 0 if terminated[i] else",
        "discounted[i] *= 0 if terminated[i] or truncated[i] else",
        "test_ppo.py::test_the_variants_environments_are_those_of_gymnasiums_wrappers",
    ),
    Bug(
        PPO_GYMNASIUM,
        "rollout.final_values[t, i] = 0 if terminated[i] else agent.value(final_obs)",
        "rollout.final_values[t, i] = agent.value(final_obs)",
        "test_ppo.py::test_only_a_truncation_bootstraps_from_its_final_observation",
    ),
    Bug(
        PPO_GYMNASIUM,
        "learning_rate *= 1 - run.step / run.total_steps",
        "pass",
        "test_ppo.py::test_run_from_end_to_end",
    ),
    Bug(
        PPO,
        'row["losses/clipfrac"] = torch.cat(clipfracs).mean()',
        'row["losses/clipfrac"] = clipfracs[-1].mean()',
        "test_atari.py::test_metrics_of_updates_and_target_kl",
    ),
    Bug(
        "leanrl/ppo_atari_*.py leanrl/ppo_cartpole_*.py leanrl/ppo_continuous_*.py",
        'if args.target_kl is not None and metrics["losses/approx_kl"][-1] > args.target_kl:',
        'if args.target_kl is not None and metrics["losses/approx_kl"][0] > args.target_kl:',
        "test_atari.py::test_metrics_of_updates_and_target_kl",
    ),
    Bug(
        "leanrl/ppo_continuous_action.py leanrl/ppo_continuous_action_torchcompile.py",
        'set_statistics(envs, run.restore(agent)["statistics"])',
        "run.restore(agent)",
        "test_ppo.py::test_a_resumed_run_goes_on_from_what_was_saved",
    ),
    Bug(
        f"{PPO_GYMNASIUM} {CARTPOLE}",
        "    obs, _ = envs.reset(seed=seed)\n",
        "    obs, _ = envs.reset(seed=args.seed)\n",
        "test_cartpole.py::test_a_resumed_run_takes_up_what_was_saved",
    ),
    Bug(
        PPO_WORLDS,
        "    obs, _ = envs.reset(seed=seed, options=",
        "    obs, _ = envs.reset(seed=args.seed, options=",
        "test_mujoco_runs.py::test_a_resumed_ppo_goes_on_from_all_it_had",
    ),
    Bug(
        f"{CONTINUOUS} {CARTPOLE} {PPO_WORLDS}",
        "gains = math.sqrt(2), math.sqrt(2), gain",
        "gains = math.sqrt(2), 1.0, gain",
        "test_cartpole.py::test_networks_have_two_layers_of_tanh_and_orthogonal_weights_at_first",
    ),
    Bug(
        CONTINUOUS,
        "returns += running * rewards",
        "returns += rewards",
        "test_ppo.py::test_every_episode_of_an_evaluation_counts_once",
    ),
    Bug(
        CONTINUOUS,
        "running &= ~(terminated | truncated)",
        "running &= ~truncated",
        "test_ppo.py::test_every_episode_of_an_evaluation_counts_once",
    ),
    Bug(
        CONTINUOUS,
        "running &= ~(terminated | truncated)",
        "running &= ~terminated",
        "test_ppo.py::test_every_episode_of_an_evaluation_counts_once",
    ),
    Bug(
        CONTINUOUS,
        "if not running.any():",
        "if not running.all():",
        "test_ppo.py::test_every_episode_of_an_evaluation_counts_once",
    ),
    Bug(
        CONTINUOUS,
        "return float(returns.mean())",
        "return float(np.median(returns))",
        "test_ppo.py::test_every_episode_of_an_evaluation_counts_once",
    ),
    # Asynchronous PPO
    Bug(
        ASYNC,
        "importance = (log_probs - rollout.log_probs).exp()",
        "importance = (rollout.log_probs - log_probs).exp()",
        "test_async.py::test_a_stale_rollout_is_corrected",
    ),
    Bug(
        ASYNC,
        '                        truncations.append((t, n, infos["final_obs"][n]))',
        "                        truncations.append((t, n, next_obs[n]))",
        "test_async.py::test_sync_is_the_synchronous_script",
    ),
    Bug(
        ASYNC,
        "slot = slots[version % len(slots)]",
        "slot = slots[0]",
        "test_async.py::test_acting_lags_by_so_many_updates_and_nothing_else_differs",
    ),
    Bug(
        "leanrl/ppo_continuous_action_async.py",
        "batch = agent.prepare(rollout, stale=staleness > 0)",
        "batch = agent.prepare(rollout, stale=staleness > 1)",
        "test_async.py::test_acting_lags_by_so_many_updates_and_nothing_else_differs",
    ),
    Bug(
        ASYNC,
        "                    episodes.append((step, row))",
        "                    episodes.append((step - args.num_envs, row))",
        "test_async.py::test_sync_is_the_synchronous_script",
    ),
    # Atari and CartPole: environments
    Bug(
        ATARI,
        "        truncated &= ~over\n",
        "",
        "test_atari.py::test_lives_games_and_limits_may_end_at_once",
    ),
    Bug(
        ATARI,
        'self.returns += infos["reward"]  # not clipped',
        "self.returns += rewards",
        "test_atari.py::test_lives_games_and_limits_may_end_at_once",
    ),
    Bug(
        ATARI,
        "self.lengths[whole] = 0",
        "self.lengths[over] = 0",
        "test_atari.py::test_lives_games_and_limits_may_end_at_once",
    ),
    Bug(
        GAMES,
        "entropies = -(log_policy.exp() * log_policy).sum(dim=1)",
        "entropies = -(log_policy.exp() * log_policy).mean(dim=1)",
        "test_atari.py::test_losses_match_plain_loops",
    ),
    Bug(
        GAMES,
        "actions = (log_policy - noise.log()).argmax(dim=1)",
        "actions = (log_policy + noise.log()).argmax(dim=1)",
        "test_atari.py::test_actions_are_drawn_as_the_policy_says",
    ),
    Bug(
        CARTPOLE,
        "length = self.half_length * (4 / 3 - self.pole_mass * cos.square() / self.total_mass)",
        "length = self.half_length * (4 / 3 - self.pole_mass * cos / self.total_mass)",
        "test_cartpole.py::test_a_step_is_gymnasiums",
    ),
    Bug(
        CARTPOLE,
        "theta_limit = math.radians(12)",
        "theta_limit = math.radians(13)",
        "test_cartpole.py::test_a_step_is_gymnasiums",
    ),
    Bug(
        CARTPOLE,
        "    max_steps = 500\n",
        "    max_steps = 501\n",
        "test_cartpole.py::test_the_limit_truncates_whether_the_pole_stands_or_falls",
    ),
    Bug(
        CARTPOLE,
        "self.state.uniform_(-0.05, 0.05, generator=generator)",
        "self.state.uniform_(0, 0.05, generator=generator)",
        "test_cartpole.py::test_resets_are_uniform_and_independent",
    ),
    Bug(
        "leanrl/ppo_cartpole_gpu_torchcompile.py",
        "while len(index) % count:",
        "while count > 3:",
        "test_cartpole.py::test_a_minibatch_is_cut_into_as_many_equal_pieces_as_fit",
    ),
    # MuJoCo's worlds: tasks
    Bug(
        MUJOCO,
        "return s.speed - 0.1 * sum_squares(s.actions)",
        "return s.speed - 0.05 * sum_squares(s.actions)",
        "test_mujoco.py::test_steps_are_gymnasiums[HalfCheetah-v5-c]",
    ),
    Bug(
        MUJOCO,
        "upright = (height > 0.7) & (angle.abs() < 0.2)",
        "upright = (height > 0.7) & (angle < 0.2)",
        "test_mujoco.py::test_steps_are_gymnasiums[Hopper-v5-c]",
    ),
    Bug(
        MUJOCO,
        "s.qvel.clamp(-10, 10)",
        "s.qvel.clamp(-5, 5)",
        "test_mujoco.py::test_steps_are_gymnasiums[Hopper-v5-c]",
    ),
    Bug(
        MUJOCO,
        "(angle.abs() >= 1)",
        "(angle.abs() >= 1.1)",
        "test_mujoco.py::test_steps_are_gymnasiums[Walker2d-v5-c]",
    ),
    Bug(
        MUJOCO,
        "return (height < 0.2) | (height > 1)",
        "return height < 0.2",
        "test_mujoco.py::test_steps_are_gymnasiums[Ant-v5-c]",
    ),
    Bug(
        MUJOCO,
        "            s.cvel[:, 1:],",
        "            s.cvel[:, :-1],",
        "test_mujoco.py::test_steps_are_gymnasiums[Humanoid-v5-c]",
    ),
    Bug(
        MUJOCO,
        "return s.qpos[:, 1].abs() > 0.2",
        "return s.qpos[:, 1].abs() > 0.25",
        "test_mujoco.py::test_steps_are_gymnasiums[InvertedPendulum-v5-c]",
    ),
    Bug(
        MUJOCO,
        "costs = 0.01 * x.square() + (y - 2).square()",
        "costs = 0.01 * x.abs() + (y - 2).square()",
        "test_mujoco.py::test_steps_are_gymnasiums[InvertedDoublePendulum-v5-c]",
    ),
    Bug(
        MUJOCO,
        "5e-3 * upper.square()",
        "1e-3 * upper.square()",
        "test_mujoco.py::test_steps_are_gymnasiums[InvertedDoublePendulum-v5-c]",
    ),
    Bug(
        MUJOCO,
        "return ~(upright & (others.abs() < 100).all(1))",
        "return ~upright",
        "test_mujoco.py::test_health_and_costs_are_gymnasiums_on_both_sides_of_each_bound",
    ),
    Bug(
        MUJOCO,
        "return (height <= 0.8) | (height >= 2) |",
        "return (height <= 0.8) |",
        "test_mujoco.py::test_health_and_costs_are_gymnasiums_on_both_sides_of_each_bound",
    ),
    Bug(
        MUJOCO,
        "return 0.1 * sum_squares(s.actions) + contact_costs.clamp(max=10)",
        "return 0.1 * sum_squares(s.actions) + contact_costs",
        "test_mujoco.py::test_health_and_costs_are_gymnasiums_on_both_sides_of_each_bound",
    ),
    Bug(
        MUJOCO,
        "self.returns.masked_fill_(mask & (late > 0), math.nan)",
        "self.returns.masked_fill_(mask & (late > 0), 0)",
        "test_mujoco.py::test_an_episode_begins_without_what_came_before",
    ),
    Bug(
        MUJOCO,
        "self.batch.reset(ids, stage=mujoco.mjtStage.mjSTAGE_NONE)",
        "pass",
        "test_mujoco.py::test_an_episode_begins_without_what_came_before",
    ),
    # MuJoCo's worlds: environment and physics
    Bug(
        MUJOCO,
        "torch.empty_like(x).normal_(generator=generator)",
        "torch.empty_like(x).normal_(std=0.5, generator=generator)",
        "test_mujoco.py::test_resets_are_gymnasiums_and_seeds_decide",
    ),
    Bug(
        MUJOCO,
        "late = worlds * self.max_steps // self.num_envs",
        "late = 0 * worlds",
        "test_mujoco.py::test_resets_are_gymnasiums_and_seeds_decide",
    ),
    Bug(
        MUJOCO,
        "s.actions.copy_(actions.clamp(self.low, self.high))",
        "s.actions.copy_(actions.clamp(self.low - 9, self.high + 9))",
        "test_mujoco.py::test_more_than_their_space_is_clipped_and_wrong_shapes_fail",
    ),
    Bug(
        MUJOCO,
        "terminated = ~sane | s.terminated",
        "terminated = s.terminated & sane",
        "test_mujoco.py::test_ends_limits_and_returns",
    ),
    Bug(
        CARTPOLE,
        "truncated = self.lengths >= self.max_steps",
        "truncated = self.lengths > self.max_steps",
        "test_cartpole.py::test_the_limit_truncates_whether_the_pole_stands_or_falls",
    ),
    Bug(
        MUJOCO,
        "truncated = s.steps >= self.max_steps",
        "truncated = s.steps > self.max_steps",
        "test_mujoco.py::test_ends_limits_and_returns",
    ),
    Bug(
        MUJOCO,
        "rewards = rewards.where(sane, 0)",
        "rewards = rewards.nan_to_num(1)",
        "test_mujoco.py::test_ends_limits_and_returns",
    ),
    Bug(
        MUJOCO,
        "mujoco.mj_rnePostConstraint(self.model, self.data)",
        "pass",
        "test_mujoco.py::test_steps_are_gymnasiums[Ant-v5-c]",
    ),
    Bug(
        MUJOCO,
        "noise = 0.005",
        "noise = 0.01",
        "test_mujoco.py::test_resets_are_gymnasiums_and_seeds_decide",
    ),
    Bug(
        MUJOCO,
        "area.abs().sqrt()",
        "area.abs()",
        "test_mujoco.py::test_resets_are_gymnasiums_and_seeds_decide",
    ),
    Bug(
        MUJOCO,
        "distance <= 0.17",
        "distance <= 0.1",
        "test_mujoco.py::test_resets_are_gymnasiums_and_seeds_decide",
    ),
    Bug(
        MUJOCO,
        "        self.batch.set_const()\n",
        "",
        "test_mujoco.py::test_each_world_has_a_model_of_its_own",
    ),
    Bug(
        MUJOCO,
        '"body_mass": ["body_inertia"]',
        '"body_mass": []',
        "test_mujoco.py::test_each_world_has_a_model_of_its_own",
    ),
    Bug(
        MUJOCO,
        "s.speed.copy_((position - self.position) / self.dt)",
        "s.speed.copy_(position / self.dt)",
        "test_docs.py::test_a_task_of_your_own_is_what_mujoco_says_and_can_be_learned[c]",
    ),
    Bug(
        MUJOCO,
        "self.position.copy_(position.where(ended, self.position))",
        "pass",
        "test_mujoco.py::test_far_from_the_origin_rewards_are_gymnasiums",
    ),
    Bug(
        MUJOCO,
        'options.get("reset_mask", True)',
        "True",
        "test_mujoco.py::test_episodes_begin_by_a_mask",
    ),
    Bug(
        MUJOCO,
        "            obs = obs.clone()\n",
        "            pass\n",
        "test_mujoco.py::test_observations_are_copies",
    ),
    Bug(
        MUJOCO,
        "            self.starts = []\n            for",
        "            for",
        "test_mujoco.py::test_resets_are_gymnasiums_and_seeds_decide",
    ),
    Bug(
        MUJOCO,
        "        mujoco.mj_setConst(env.model, env.data)\n",
        "",
        "test_mujoco.py::test_fields_and_their_ranges_are_chosen_and_evaluations_have_them",
    ),
    Bug(
        MUJOCO,
        "span = 1 - randomize, 1 + randomize",
        "span = 1 - randomize / 2, 1 + randomize / 2",
        "test_mujoco.py::test_each_world_has_a_model_of_its_own",
    ),
    Bug(
        MUJOCO,
        'getattr(mujoco, f"set_{name}")(callback)',
        "pass",
        "test_mujoco.py::test_callbacks_of_the_host_program_stay",
    ),
    Bug(
        MUJOCO,
        'rows = 1 if name == "geom_friction" else len(',
        "rows = len(",
        "test_mujoco.py::test_fields_and_their_ranges_are_chosen_and_evaluations_have_them",
    ),
    Bug(
        MUJOCO,
        '"actuator_gainprm": ["actuator_biasprm"]',
        '"actuator_gainprm": []',
        "test_mujoco.py::test_servos_of_other_strength_reach_the_same_place",
    ),
    Bug(
        MUJOCO,
        "getattr(s, name).masked_fill_(ended[:, None], 0)",
        "pass",
        "test_mujoco.py::test_a_task_remembers_from_step_to_step",
    ),
    Bug(
        MUJOCO,
        "            rewards = self.judge()\n            self.task.advance(s, self.generator)\n",
        "            self.task.advance(s, self.generator)\n            rewards = self.judge()\n",
        "test_mujoco.py::test_a_task_remembers_from_step_to_step",
    ),
    Bug(
        MUJOCO,
        'path = Path(getattr(module, "__file__", ".")).parent / task.model',
        "path = Path(task.model)",
        "test_mujoco.py::test_a_model_is_found_beside_its_task",
    ),
    # The region: the stopwatch
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "self.seconds[self.current] += now - self.last",
        "self.seconds[name] += now - self.last",
        "test_stopwatch.py::test_a_stage_lasts_until_the_next_one_or_the_tick",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "if self.warmup_seconds is None and steps >= self.warmup_steps:",
        "if self.warmup_seconds is None and steps > self.warmup_steps:",
        "test_stopwatch.py::test_the_steady_window_leaves_out_warm_up_and_evaluation",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        'seconds = self.last - self.start - self.seconds["evaluation"]',
        "seconds = self.last - self.start",
        "test_stopwatch.py::test_the_steady_window_leaves_out_warm_up_and_evaluation",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "steps = self.steps - self.first_step",
        "steps = self.steps",
        "test_stopwatch.py::test_the_steady_window_leaves_out_warm_up_and_evaluation",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "            torch.cuda.synchronize()  # what is still queued belongs to it",
        "            pass",
        "test_stopwatch.py::test_the_clock_is_read_when_the_device_has_done_its_work",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "self.on_gpu and self.iterations % 61 == 0",
        "self.on_gpu and self.iterations % 60 == 0",
        "test_stopwatch.py::test_every_61st_iteration_is_a_sample_and_no_event_is_kept",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "begin.elapsed_time(end) / 1e3",
        "begin.elapsed_time(end)",
        "test_stopwatch.py::test_every_61st_iteration_is_a_sample_and_no_event_is_kept",
    ),
    Bug(
        REGION,
        "and self.iterations == self.trace_after:",
        "and self.iterations > self.trace_after:",
        "test_stopwatch.py::test_a_trace_holds_whole_iterations",
    ),
    # The region: the run
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "        if self.ending:\n            return at_end or every > 0",
        "        if self.ending:\n            return every > 0",
        "test_stopwatch.py::test_what_is_due_is_due_once_per_multiple",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "self.watch.tick(self.step - self.start_step)",
        "self.watch.tick(self.step)",
        "test_resume.py::test_a_resumed_run_goes_on_from_all_it_had",
    ),
    Bug(
        REGION,
        "self.writer.add_scalar(tag, value, step or self.step)",
        "self.writer.add_scalar(tag, value, self.step)",
        "test_async.py::test_sync_is_the_synchronous_script",
    ),
    Bug(
        REGION,
        "torch.set_rng_state(cpu_state)\n",
        "pass\n",
        "test_resume.py::test_a_resumed_run_goes_on_from_all_it_had",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        'state |= {"args": self.flags,',
        'state |= {"args": vars(self),',
        "test_resume.py::test_what_a_copy_adds_and_anneals",
    ),
    Bug(
        REGION,
        "self.flags = json.loads(json.dumps(vars(args), default=np.generic.item))",
        "self.flags = vars(args)",
        "test_resume.py::test_what_a_copy_adds_and_anneals",
    ),
    Bug(
        "leanrl/[st]*_torchcompile.py",
        "torch.set_flush_denormal(True)",
        "torch.set_flush_denormal(False)",
        "test_sac.py::test_denormal_numbers_are_zero_in_every_thread",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "purge_step=self.step + 1",
        "purge_step=None",
        "test_resume.py::test_what_came_after_the_checkpoint_is_not_drawn_any_more",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        'warmup_steps = max(getattr(args, "learning_starts", 0) - self.step, 0) + steady_after',
        'warmup_steps = getattr(args, "learning_starts", 0) + steady_after',
        "test_resume.py::test_the_random_steps_of_before_are_no_warm_up_again",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "for second in count(int(time.time())):",
        "for second in [int(time.time())]:",
        "test_resume.py::test_two_runs_of_one_second_have_a_directory_each",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "        if self.stopped:\n            raise SystemExit",
        "        if False:\n            raise SystemExit",
        "test_resume.py::test_the_first_signal_ends_a_run_after_its_iteration_with_all_records",
    ),
    Bug(
        "leanrl/td3_*.py leanrl/sac_continuous_*.py",
        "if not torch.as_tensor(value).isfinite().all():",
        "if False:",
        "test_resume.py::test_a_number_that_is_not_finite_is_not_saved_while_actions_are_random",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "torch.save(state, partial)",
        'torch.save(state, self.dir / "checkpoint.pt")',
        "test_resume.py::test_a_full_disk_leaves_the_last_checkpoint",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "            if not math.isfinite(value):\n",
        "            if math.isnan(value):\n",
        "test_resume.py::test_losses_and_weights_that_are_not_finite_end_the_run",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "            signal.signal(number, handler)\n",
        "            pass\n",
        "test_resume.py::test_the_first_signal_ends_a_run_after_its_iteration_with_all_records",
    ),
    Bug(
        REGION,
        "self.total_steps = args.total_timesteps // steps_per_iteration * steps_per_iteration",
        "self.total_steps = args.total_timesteps",
        "test_resume.py::test_a_resumed_run_goes_on_from_all_it_had",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "signal.signal(number, signal.SIG_DFL)",
        "pass",
        "test_resume.py::test_a_second_signal_ends_the_process",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "self.ending = self.stopped or self.step >= self.total_steps",
        "self.ending = self.step >= self.total_steps",
        "test_resume.py::test_the_first_signal_ends_a_run_after_its_iteration_with_all_records",
    ),
    Bug(
        "leanrl/stopwatch.py leanrl/*_*_*.py",
        "checkpoint, self.checkpoint = self.checkpoint, None",
        "checkpoint = self.checkpoint",
        "test_resume.py::test_the_checkpoint_is_let_go_when_it_has_been_restored",
    ),
    # CUDA graphs, rehearsed without a GPU
    Bug(
        "leanrl/sac_*_torchcompile.py",
        "        graphs[due]()\n",
        "        graphs[False, False]()\n",
        "test_rehearsal.py::test_a_script_on_cuda_computes_what_it_computes_on_the_cpu[fast-SAC]",
    ),
    Bug(
        "leanrl/sac_*_torchcompile.py leanrl/td3_*_torchcompile.py",
        "self.device_size.clamp_(min=end)",
        "self.device_size = self.device_size.clamp(min=end)",
        "test_rehearsal.py::test_a_script_on_cuda_computes_what_it_computes_on_the_cpu[fast-TD3]",
    ),
    Bug(
        "leanrl/ppo_continuous_action_torchcompile.py",
        "agent.optimizer.lr.fill_(learning_rate)",
        "agent.optimizer.lr = torch.tensor(learning_rate, device=device)",
        "test_rehearsal.py::test_a_script_on_cuda_computes_what_it_computes_on_the_cpu[fast-PPO]",
    ),
    # sweep.py
    Bug(
        SWEEP,
        "text = json.dumps([script, sorted(params.items())])",
        "text = json.dumps([script, list(params.items())])",
        "test_sweep.py::test_a_variant_is_known_by_script_and_parameters",
    ),
    Bug(
        SWEEP,
        "if repr(value) in seen:",
        "if value in map(eval, seen):",
        "test_sweep.py::test_true_and_one_are_two_values",
    ),
    Bug(
        SWEEP,
        'over = {"finished", "failed"}',
        'over = {"finished"}',
        "test_sweep.py::test_a_failure_stops_no_other_and_is_named",
    ),
    Bug(
        SWEEP,
        'return int(set(states) != {"finished"})',
        'return int("failed" in states)',
        "test_sweep.py::test_jobs_and_logs_and_stop",
    ),
    Bug(
        SWEEP,
        "threads = max(1, len(os.sched_getaffinity(0)) // len(shares))",
        "threads = max(1, len(os.sched_getaffinity(0)))",
        "test_sweep.py::test_cores_and_gpus_are_shared_out",
    ),
    Bug(
        SWEEP,
        '    state = "failed" if status else "finished"',
        '    state = "failed" if status > 0 else "finished"',
        "test_sweep.py::test_a_run_that_a_signal_killed_has_failed",
    ),
    Bug(
        SWEEP,
        'inherited.pop("RAY_AUTH_TOKEN", None)',
        'inherited.pop("RAY_TOKEN", None)',
        "test_sweep.py::test_what_a_variant_leaves",
    ),
    Bug(
        SWEEP,
        'return answer.strip().lower() in ("", "y", "yes")',
        'return answer.strip().lower()[:1] != "n"',
        "test_sweep.py::test_jobs_and_logs_and_stop",
    ),
    Bug(
        SWEEP,
        'shares = [",".join(found[i : i + size]) for i in starts]',
        'shares = [",".join(found[i : i + 1]) for i in starts]',
        "test_sweep.py::test_cores_and_gpus_are_shared_out",
    ),
    Bug(
        SWEEP,
        "mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)",
        "mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())",
        "test_sweep.py::test_a_stop_during_a_start_is_heard",
    ),
    Bug(
        SWEEP,
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)",
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, ())",
        "test_sweep.py::test_a_stop_during_a_start_is_heard",
    ),
    # plots/
    Bug(
        "plots/curves.py",
        "    cut = count // 4\n",
        "    cut = count // 5\n",
        "test_figures.py::test_interquartile_mean_is_of_the_middle_half",
    ),
    Bug(
        "plots/curves.py",
        "return tuple(np.percentile(means, (2.5, 97.5)))",
        "return tuple(np.percentile(means, (25, 75)))",
        "test_figures.py::test_the_stratified_bootstrap_draws_within_each_task",
    ),
    Bug(
        "plots/curves.py",
        "enough = (~np.isnan(values)).sum(0) > 1",
        "enough = (~np.isnan(values)).sum(0) > 0",
        "test_figures.py::test_where_one_seed_is_left_there_is_a_mean_and_no_interval",
    ),
    Bug(
        "plots/curves.py",
        "reached = x[y >= target]",
        "reached = x[y > target]",
        "test_figures.py::test_scores_count_who_never_arrives",
    ),
    Bug(
        "plots/curves.py",
        "return np.sort(np.concatenate([grid, middles]))",
        "return grid",
        "test_figures.py::test_no_line_joins_two_runs_with_a_gap_between_them",
    ),
    Bug(
        "plots/run_dirs.py",
        'pattern = "runs/*" if (path / "variant.json").exists() else "[!.]*"',
        'pattern = "[!.]*"',
        "test_figures.py::test_a_folder_of_runs_is_searched_for_runs",
    ),
    Bug(
        "plots/record.py",
        "statistics.fmean(series[RETURN].values[-10:])",
        "statistics.fmean(series[RETURN].values)",
        "test_figures.py::test_a_record_takes_this_machine_for_that_of_a_run_if_it_can_be",
    ),
    Bug(
        "plots/traces.py",
        'waits = re.search("Synchronize|Memcpy(?!.*Async)", name)',
        'waits = re.search("Synchronize|Memcpy", name)',
        "test_profile.py::test_synchronizations_and_blocking_copies_are_waits",
    ),
    Bug(
        "plots/measure/speedup.py",
        '"warmup_seconds": {"first": warmups[0], "best": min(warmups)}',
        '"warmup_seconds": {"first": max(warmups), "best": min(warmups)}',
        "test_speedup.py::test_the_first_warm_up_is_that_of_the_first_run",
    ),
    Bug(
        "plots/measure/env_kernel.py",
        "s[3] += tau * theta_acc;",
        "s[3] += tau * x_acc;",
        "test_env_kernel.py::test_kernel_and_tensors_agree_for_whole_episodes",
    ),
    Bug(
        "plots/measure/env_kernel.py",
        "return (mix(mix(mix(seed) + i) + 4 * episode + k) >> 40) / 16777216.0f;",
        "return (mix(mix(mix(seed) + i) + episode + k) >> 40) / 16777216.0f;",
        "test_env_kernel.py::test_what_holds_for_tensors_holds_for_the_kernel",
    ),
    Bug(
        "plots/measure/env_scaling.py",
        "found[device] = 2 * 4 * 2**26 / min(copies)",
        "found[device] = 4 * 2**26 / min(copies)",
        "test_env_scaling.py::test_a_copy_reads_and_writes_and_the_best_one_counts",
    ),
    # plots/measure/ and what reads its records
    Bug(
        "plots/measure/rounds.py",
        "ratios.append(speed / other)",
        "ratios.append(other / speed)",
        "test_house.py::test_devices_are_compared_within_a_round",
    ),
    Bug(
        "plots/measure/rounds.py",
        "worths.append(1e6 / speed - 1e6 / other)",
        "worths.append(1e6 / other - 1e6 / speed)",
        "test_house.py::test_worth_is_measured_within_a_round",
    ),
    Bug(
        "plots/env_report.py",
        "turning = float(flat / per_env) if flat and per_env else None",
        "turning = float(per_env / flat) if flat and per_env else None",
        "test_env_scaling.py::test_the_turning_point_is_found",
    ),
    Bug(
        "plots/env_report.py",
        'found[row["num_envs"]] = statistics.median(row["seconds"])',
        'found[row["num_envs"]] = min(row["seconds"])',
        "test_env_scaling.py::test_the_table_says_what_the_record_says",
    ),
    Bug(
        "plots/measure/processes.py",
        'found[-1] if found else (0, b"")',
        'found[0] if found else (0, b"")',
        "test_speedup.py::test_progress_and_last_lines_of_a_log",
    ),
    Bug(
        "plots/breakdown.py",
        '"cpu_share": 1 - gpu_alone / total if on_gpu else None',
        '"cpu_share": gpu_alone / total if on_gpu else None',
        "test_figures.py::test_breakdown_on_a_gpu",
    ),
    Bug(
        "plots/traces.py",
        '"gpu_busy": total["gpu_overlap_s"] / (cpu + total["overhead"])',
        '"gpu_busy": total["gpu_s"] / (cpu + total["overhead"])',
        "test_profile.py::test_overlapping_streams_count_as_a_union",
    ),
    Bug(
        "plots/measure/processes.py",
        'if same and changed < (run.path / "config.json").stat().st_mtime:',
        "if same:",
        "test_speedup.py::test_the_full_protocol_goes_on_where_it_stopped",
    ),
    Bug(
        "plots/run_dirs.py",
        "seconds=times[tag] - start - paused,",
        "seconds=times[tag] - paused,",
        "test_figures.py::test_a_record_takes_this_machine_for_that_of_a_run_if_it_can_be",
    ),
    Bug(
        "plots/run_dirs.py",
        "seconds=times[tag] - start - paused,",
        "seconds=times[tag] - start,",
        "test_figures.py::test_a_pause_before_a_run_is_resumed_is_none_of_its_seconds",
    ),
    # Atari
    Bug(
        ATARI,
        'over = infos["terminated"] == 1',
        "over = terminated.copy()",
        "test_atari.py::test_lives_games_and_limits_may_end_at_once[baseline]",
    ),
    Bug(
        ATARI,
        "self.returns[whole] = 0",
        "self.returns[ended] = 0",
        "test_atari.py::test_lives_games_and_limits_may_end_at_once[baseline]",
    ),
    Bug(
        ATARI,
        "            obs = obs.copy()\n",
        "",
        "test_atari.py::test_lives_games_and_limits_may_end_at_once[baseline]",
    ),
    Bug(
        ATARI,
        'running &= ~infos["whole"]',
        "running &= ~infos['whole'][::-1]",
        "test_atari.py::test_main_does_what_it_says[baseline]",
    ),
    Bug(
        ATARI,
        '{"final_obs": obs, "whole": whole, "games": games}',
        '{"final_obs": obs[::-1], "whole": whole, "games": games}',
        "test_atari.py::test_lives_games_and_limits_may_end_at_once[baseline]",
    ),
    Bug(
        ATARI,
        "obs[index] = first_obs",
        "obs[index[::-1]] = first_obs",
        "test_atari.py::test_lives_games_and_limits_may_end_at_once[baseline]",
    ),
    Bug(
        ATARI,
        "terminated |= over  # EnvPool says",
        "pass  # EnvPool says",
        "test_atari.py::test_lives_games_and_limits_may_end_at_once[baseline]",
    ),
    Bug(
        ATARI,
        "obs / 255.0",
        "obs / 256.0",
        "test_atari.py::test_images_become_probabilities_and_values_as_in_mnihs_network",
    ),
    Bug(
        ATARI,
        "layer_init(nn.Linear(512, num_actions), gain=0.01)",
        "layer_init(nn.Linear(512, num_actions), gain=1.0)",
        "test_atari.py::test_images_become_probabilities_and_values_as_in_mnihs_network",
    ),
    Bug(
        ATARI,
        "gain: float = math.sqrt(2)",
        "gain: float = 1.0",
        "test_atari.py::test_images_become_probabilities_and_values_as_in_mnihs_network",
    ),
    Bug(
        ATARI,
        "torch.cat([rollout.values[1:], last_values[None]])",
        "torch.cat([rollout.values[1:], rollout.values[-1:]])",
        "test_atari.py::test_main_does_what_it_says[baseline]",
    ),
    Bug(
        ATARI,
        "self.args.gamma,\n            self.args.gae_lambda,",
        "self.args.gae_lambda,\n            self.args.gamma,",
        "test_atari.py::test_main_does_what_it_says[baseline]",
    ),
    # CartPole
    Bug(
        CARTPOLE,
        "        nn.Tanh(),\n        last",
        "        nn.ReLU(),\n        last",
        "test_cartpole.py::test_networks_have_two_layers_of_tanh_and_orthogonal_weights_at_first",
    ),
    Bug(
        CARTPOLE,
        "mlp(obs_dim, num_actions, gain=0.01)",
        "mlp(obs_dim, num_actions, gain=1.0)",
        "test_cartpole.py::test_networks_have_two_layers_of_tanh_and_orthogonal_weights_at_first",
    ),
    Bug(
        CARTPOLE,
        "mlp(obs_dim, 1, gain=1.0)",
        "mlp(obs_dim, 1, gain=0.01)",
        "test_cartpole.py::test_networks_have_two_layers_of_tanh_and_orthogonal_weights_at_first",
    ),
    # Atari and CartPole
    Bug(
        GAMES,
        "rewards + gamma * next_values - values",
        "rewards + gamma * lam * next_values - values",
        "test_cartpole.py::test_a_rollout_holds_what_happened[baseline]",
    ),
    Bug(
        GAMES,
        "ratios.clamp(1 - clip_coef, 1 + clip_coef)",
        "ratios.clamp(1 - clip_coef, 1 + 2 * clip_coef)",
        "test_atari.py::test_losses_match_plain_loops[True-True-1]",
    ),
    Bug(
        GAMES,
        "return 0.5 * errors.mean()",
        "return errors.mean()",
        "test_atari.py::test_losses_match_plain_loops[True-True-1]",
    ),
    Bug(
        GAMES,
        "-log_ratios.mean()",
        "log_ratios.mean()",
        "test_atari.py::test_losses_match_plain_loops[True-True-1]",
    ),
    Bug(
        GAMES,
        "(ratios - 1 - log_ratios).mean()",
        "(ratios - 1).mean()",
        "test_atari.py::test_losses_match_plain_loops[True-True-1]",
    ),
    Bug(
        f"{CARTPOLE} leanrl/ppo_atari_envpool.py leanrl/ppo_atari_envpool_torchcompile.py",
        "    if args.norm_adv:\n        advantages = (adv",
        "    if True:\n        advantages = (adv",
        "test_atari.py::test_an_update_is_a_clipped_step_of_adam[baseline]",
    ),
    Bug(
        GAMES,
        "lr=args.learning_rate, eps=1e-5",
        "lr=args.learning_rate, eps=1e-8",
        "test_atari.py::test_an_update_is_a_clipped_step_of_adam[baseline]",
    ),
    # PQN
    Bug(
        "leanrl/pqn_*.py",
        "obs / 255.0",
        "obs / 25.5",
        "test_pqn.py::test_images_become_values_as_in_the_paper",
    ),
    Bug(
        "leanrl/pqn_*.py",
        "values = values.gather(1, taken).squeeze(1)",
        "values = values.amax(1)",
        "test_pqn.py::test_an_update_is_a_clipped_step_on_the_squared_error",
    ),
    Bug(
        "leanrl/pqn_*.py",
        "run.restore(agent)",
        "pass",
        "test_pqn.py::test_a_resumed_run_takes_up_what_was_saved",
    ),
    Bug(
        "leanrl/pqn_*.py",
        "torch.randperm(batch_size, device=device)",
        "torch.arange(batch_size, device=device)",
        "test_pqn.py::test_main_does_what_it_says",
    ),
    Bug(
        "leanrl/pqn_*.py",
        "generator=generator) < args.end_e",
        "generator=generator) > args.end_e",
        "test_pqn.py::test_main_does_what_it_says",
    ),
    Bug(
        WORLDS,
        "randomize=args.randomize,",
        "randomize=0.0,",
        "test_mujoco_runs.py::test_worlds_are_randomized_also_when_a_run_goes_on",
    ),
    Bug(
        "leanrl/pqn_*.py",
        "torch.where(rollout.ended.bool(), rollout.final_values, next_values)",
        "next_values",
        "test_pqn.py::test_main_does_what_it_says[baseline]",
    ),
    Bug(
        "leanrl/pqn_atari_envpool.py",
        "    weights = lam * (1 - ended)\n",
        "    weights = lam * torch.ones_like(ended)\n",
        "test_pqn.py::test_returns_are_mixtures_of_all_lengths[0.65-13-baseline]",
    ),
    Bug(
        "leanrl/pqn_atari_envpool_torchcompile.py",
        "early = rho <= 5",
        "early = rho <= 4",
        "test_pqn.py::test_the_optimizer_is_pytorchs",
    ),
    Bug(
        "leanrl/pqn_*.py",
        "args.exploration_fraction * args.total_timesteps",
        "args.total_timesteps",
        "test_pqn.py::test_exploration_decays_and_is_random[baseline]",
    ),
    Bug(
        "leanrl/pqn_*.py",
        "torch.where(explores, random_actions, actions)",
        "torch.where(explores, actions, random_actions)",
        "test_pqn.py::test_exploration_decays_and_is_random[baseline]",
    ),
    Bug(
        "leanrl/pqn_atari_envpool_torchcompile.py",
        "self.weight.movedim(0, -1)",
        "self.weight.mT.movedim(0, -1)",
        "test_pqn.py::test_one_update_agrees",
    ),
    Bug(
        "leanrl/pqn_atari_envpool_torchcompile.py",
        "if x.is_contiguous():",
        "if True:",
        "test_pqn.py::test_channels_stay_last",
    ),
    # MuJoCo's worlds: PPO
    Bug(
        PPO_WORLDS,
        "self.value(rollout.final_obs) * ~rollout.terminated",
        "self.value(rollout.final_obs) * ~rollout.ended",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        "leanrl/ppo_mujoco_*.py",
        "        if run.step > batch_size:\n",
        "        if run.step >= batch_size:\n",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        PPO_WORLDS,
        "faster = kl < desired_kl / 2",
        "faster = kl < desired_kl / 4",
        "test_mujoco.py::test_the_rate_follows_the_divergence",
    ),
    Bug(
        PPO_WORLDS,
        "args.desired_kl * remaining",
        "args.desired_kl",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        PPO_WORLDS,
        "min(args.desired_kl, MIN_KL)",
        "MIN_KL",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        PPO_WORLDS,
        'final_obs=infos["final_obs"],',
        "final_obs=next_obs,",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        PPO_WORLDS,
        'ended=infos["_episode"],',
        "ended=terminated,",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        PPO_WORLDS,
        "actions, log_probs = agent.act(obs, noise[t])",
        "actions, log_probs = agent.act(obs, noise[0])",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        PPO_WORLDS,
        "order = torch.randperm(batch_size, device=device)",
        "order = torch.arange(batch_size, device=device)",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        "leanrl/ppo_mujoco_*.py",
        "        agent.model.observe(batch)\n",
        "",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        "leanrl/ppo_mujoco_*.py",
        "row |= {tag: values[-1] for",
        "row |= {tag: values[0] for",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        "leanrl/ppo_mujoco_*.py",
        "(returns - values).var() / returns.var().clamp(min=1e-12)",
        "(returns - values).var()",
        "test_mujoco_runs.py::test_ppo_learns_from_what_happened",
    ),
    Bug(
        PPO_WORLDS,
        "(advantages.std() + 1e-8)",
        "(advantages.var() + 1e-8)",
        "test_mujoco_runs.py::test_an_update_is_the_papers",
    ),
    Bug(
        PPO_WORLDS,
        "actions, _ = agent.model(inputs)",
        "actions, _ = agent.act(inputs, torch.randn(len(inputs), *envs.action_space.shape[1:]))",
        "test_mujoco_runs.py::test_evaluation_is_the_mean_action_in_whole_episodes",
    ),
    Bug(
        PPO_WORLDS,
        "self.model = ActorCritic(obs_dim, envs.actor_dim, action_dim)",
        "self.model = ActorCritic(obs_dim, obs_dim, action_dim)",
        "test_mujoco_runs.py::test_a_policy_does_not_see_what_is_for_its_critic",
    ),
    # MuJoCo's worlds: what PPO and SAC share
    Bug(
        "leanrl/*_mujoco_*.py",
        "    torch.manual_seed(seed)\n",
        "",
        "test_mujoco_runs.py::test_the_seed_decides",
    ),
    Bug(
        WORLDS,
        "run.due(args.checkpoint_every, at_end=args.save_model)",
        "run.due(args.checkpoint_every)",
        "test_mujoco_runs.py::test_what_is_due_is_done",
    ),
    Bug(
        WORLDS,
        "    while running.any():",
        "    while running.all():",
        "test_mujoco_runs.py::test_evaluation_is_the_mean_action_in_whole_episodes",
    ),
    Bug(
        WORLDS,
        "return float(returns.mean())",
        "return float(returns.max())",
        "test_mujoco_runs.py::test_evaluation_is_the_mean_action_in_whole_episodes",
    ),
    Bug(
        WORLDS,
        "randomize=args.randomize)",
        "randomize=0.0)",
        "test_mujoco_runs.py::test_evaluation_is_the_mean_action_in_whole_episodes",
    ),
    # MuJoCo's worlds: SAC
    Bug(
        "leanrl/sac_mujoco_*.py",
        "self.actor = Actor(envs.actor_dim,",
        "self.actor = Actor(obs_dim,",
        "test_mujoco_runs.py::test_a_policy_does_not_see_what_is_for_its_critic",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "noise = torch.zeros(envs.action_space.shape, device=device)",
        "noise = torch.randn(envs.action_space.shape, device=device)",
        "test_mujoco_runs.py::test_evaluation_is_the_mean_action_in_whole_episodes",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        'rb.add(Batch(obs, actions, infos["final_obs"],',
        "rb.add(Batch(obs, actions, next_obs,",
        "test_mujoco_runs.py::test_sac_stores_and_learns_from_what_happened",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        'infos["final_obs"], rewards, terminated))',
        'infos["final_obs"], rewards, infos["_episode"]))',
        "test_mujoco_runs.py::test_sac_stores_and_learns_from_what_happened",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "actions = envs.low.lerp(envs.high, uniform)",
        "actions = envs.low.lerp(envs.high, uniform / 2)",
        "test_mujoco_runs.py::test_sac_stores_and_learns_from_what_happened",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "metrics |= agent.update(batch, actor_due, target_due)",
        "metrics |= agent.update(batch, target_due, actor_due)",
        "test_mujoco_runs.py::test_sac_stores_and_learns_from_what_happened",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "lr=args.policy_lr",
        "lr=args.q_lr",
        "test_mujoco_runs.py::test_sacs_updates_are_those_of_one_environment",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "next_obs=self.normalize(batch.next_obs),",
        "next_obs=batch.next_obs,",
        "test_mujoco_runs.py::test_sacs_updates_are_those_of_one_environment",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "weight = 1 / self.observed",
        "weight = 0.5 / self.observed",
        "test_mujoco_runs.py::test_sac_stores_and_learns_from_what_happened",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        'agent.observe(obs, rewards, infos["_episode"])',
        "agent.observe(next_obs, rewards, terminated)",
        "test_mujoco_runs.py::test_sac_stores_and_learns_from_what_happened",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "self.returns, weight)\n        self.returns.masked_fill_(ended, 0)",
        "self.returns, weight)",
        "test_mujoco_runs.py::test_sac_stores_and_learns_from_what_happened",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "rewards=self.scale(batch.rewards),",
        "rewards=batch.rewards,",
        "test_mujoco_runs.py::test_sacs_updates_are_those_of_one_environment",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "return obs.clamp(-10, 10)",
        "return obs",
        "test_mujoco_runs.py::test_sacs_updates_are_those_of_one_environment",
    ),
    Bug(
        "leanrl/sac_mujoco_*.py",
        "if run.due(LOG_EVERY * args.num_envs):",
        "if run.due(LOG_EVERY):",
        "test_mujoco_runs.py::test_sac_stores_and_learns_from_what_happened",
    ),
    # Updates, as of their papers
    Bug(
        f"{TD3} leanrl/sac_continuous_*.py",
        "envs.action_space.seed(seed)",
        "envs.action_space.seed()",
        "test_resume.py::test_checkpoints_and_evaluations_leave_no_trace_in_training",
    ),
    Bug(
        OFF_POLICY,
        "noise = torch.randn(args.num_envs, action_dim, device=device)",
        "noise = torch.randn(1, action_dim, device=device).expand(args.num_envs, -1)",
        "test_td3.py::test_run_from_end_to_end[baseline]",
    ),
    Bug(
        f"{TD3} leanrl/sac_continuous_*.py",
        "if not running.any():",
        "if not running.all():",
        "test_sac.py::test_every_episode_of_an_evaluation_counts_once",
    ),
    Bug(
        SAC,
        "self.qf_target = copy.deepcopy(self.qf)",
        "self.qf_target = TwinQ([mlp(obs_dim + action_dim, 1) for _ in range(2)])",
        "test_sac.py::test_an_agent_begins_as_it_is_told_and_each_update_moves_its_own_networks[baseline]",
    ),
    Bug(
        SAC,
        "Adam(self.qf.parameters(), lr=args.q_lr",
        "Adam(self.qf.parameters(), lr=args.policy_lr",
        "test_sac.py::test_an_agent_begins_as_it_is_told_and_each_update_moves_its_own_networks[baseline]",
    ),
    Bug(
        SAC,
        "self.update_actor(batch.obs,",
        "self.update_actor(batch.next_obs,",
        "test_sac.py::test_an_update_gives_each_part_what_it_needs[baseline]",
    ),
    Bug(
        SAC,
        "self.update_critic(batch, torch.randn_like(batch.actions))",
        "self.update_critic(batch, torch.zeros_like(batch.actions))",
        "test_sac.py::test_an_update_gives_each_part_what_it_needs[baseline]",
    ),
    Bug(
        SAC,
        '"losses/qf_loss": losses.mean()',
        '"losses/qf_loss": losses.sum()',
        "test_sac.py::test_an_agent_begins_as_it_is_told_and_each_update_moves_its_own_networks[baseline]",
    ),
    Bug(
        SAC,
        '"losses/qf2_loss": losses[1]',
        '"losses/qf2_loss": losses[0]',
        "test_sac.py::test_an_agent_begins_as_it_is_told_and_each_update_moves_its_own_networks[baseline]",
    ),
    Bug(
        TD3,
        "            self.update_target()\n        return metrics",
        "        self.update_target()\n        return metrics",
        "test_td3.py::test_policy_and_targets_are_delayed[baseline-4-1.0-2-60]",
    ),
    Bug(
        TD3,
        "lr=args.learning_rate",
        "lr=args.learning_rate / 3",
        "test_td3.py::test_each_update_moves_its_own_networks[baseline]",
        times=2,
    ),
]


def stale(bug: Bug, root: Path = ROOT) -> str | None:
    """Why the table does not describe the files any more, or None if it does."""
    if bug.old == bug.new:
        return "old and new are the same"
    paths = bug.paths(root)
    if not paths:
        return f"no file is called {bug.files}"
    for path in paths:
        count = path.read_text().count(bug.old)
        if count != bug.times:
            return f"{path.name} has the old text {count} times, not {bug.times}"
    file, _, name = bug.test.partition("::")
    if file in TEXT_TESTS or any(part in name for part in TEXT_NAMES):
        return f"{bug.test} compares texts"
    if name.partition("[")[0] not in tests_in(root / "tests" / file):
        return f"there is no test {bug.test}"
    return None


def matches(bug: Bug, glob: str) -> bool:
    """Whether a file, a text or the test of `bug` does."""
    names = [str(path.relative_to(ROOT)) for path in bug.paths()]
    return any(fnmatch.fnmatchcase(text, glob) for text in (*names, *bug[1:4]))


@cache
def tests_in(path: Path) -> list[str]:
    """The names of the tests in a file."""
    if not path.exists():
        return []
    body = ast.parse(path.read_text()).body
    return [node.name for node in body if isinstance(node, ast.FunctionDef)]


def related(bug: Bug, root: Path = ROOT) -> list[str]:
    """The test files that name one of the bug's files."""
    stems = "|".join(path.stem for path in bug.paths(root))
    found = []
    for path in sorted((root / "tests").glob("test_*.py")):
        if path.name not in TEXT_TESTS and re.search(rf"\b({stems})\b", path.read_text()):
            found.append(path.name)
    return found


def copy_of_the_repository(folder: Path) -> Path:
    """What git tracks or would track, as it is now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


class Outcome:
    """A plugin of pytest's that keeps how tests have ended."""

    def __init__(self):
        self.failed = {}  # test -> error
        self.skipped = []
        self.passed = []
        self.unreadable = []  # files that cannot be imported

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = crash.message if crash else str(report.longrepr)
            self.failed[report.nodeid] = error.splitlines()[0] if error else "failed"
        elif report.skipped:
            self.skipped.append(report.nodeid)
        elif report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.unreadable.append(report.nodeid)


class Attempt:
    """Tests at work in a process of their own, forked off this one, which has all imported."""

    def __init__(self, words: list[str], bug: Bug | None = None):
        self.bug = bug
        self.folder = Path(tempfile.mkdtemp(prefix="seeded_bug_")).resolve()
        self.copy = copy_of_the_repository(self.folder / "repository")
        for path in bug.paths(self.copy) if bug else ():
            text = path.read_text().replace(bug.old, bug.new)
            path.write_text(text)
        self.words = ["-q", "-p", "no:cacheprovider", f"--basetemp={self.folder / 'tmp'}", *words]
        self.deadline = time.monotonic() + LIMIT
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self.run()

    def run(self) -> None:
        """In the new process."""
        import pytest

        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(self.folder / "output.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.copy)
        here = str(Path(__file__).resolve().parent)
        sys.path[:] = [path for path in sys.path if path not in (here, str(ROOT))]
        sys.argv = ["pytest"]
        outcome = Outcome()
        status = 3
        try:
            status = pytest.main(self.words, plugins=[outcome])
        finally:
            found = vars(outcome) | {"status": int(status)}
            (self.folder / "outcome.json").write_text(json.dumps(found))
            os._exit(0)

    def ended(self) -> bool:
        late = time.monotonic() > self.deadline
        pid, _ = os.waitpid(self.pid, os.WNOHANG)
        if pid or late:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # also what the tests have left
            if not pid:
                os.waitpid(self.pid, 0)
        return bool(pid) or late

    def outcome(self) -> dict | None:
        """What the process has found; None if it did not come to its end."""
        path = self.folder / "outcome.json"
        found = json.loads(path.read_text()) if path.exists() else None
        shutil.rmtree(self.folder, ignore_errors=True)
        return found


def run_all(waiting: list, jobs: int):
    """Yields the ended ones of `waiting`, functions that start an Attempt, `jobs` at a time."""
    waiting = list(waiting)
    running = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0)())
            for test in [each for each in running if each.ended()]:
                running.remove(test)
                yield test
            time.sleep(0.05)
    finally:
        for test in running:
            os.killpg(test.pid, signal.SIGKILL)
            shutil.rmtree(test.folder, ignore_errors=True)


def verdict(outcome: dict | None) -> tuple[str, str]:
    """(caught or not caught, by what or why not)."""
    if outcome is None:
        return "not caught", f"the tests died, or did not end within {LIMIT} s"
    if outcome["unreadable"]:
        return (
            "not caught",
            f"{outcome['unreadable'][0]} cannot be imported, which is no bug to seed",
        )
    for test, error in outcome["failed"].items():
        return "caught", f"{test.removeprefix('tests/')}: {error}"
    if outcome["passed"]:
        return "not caught", f"{len(outcome['passed'])} tests pass"
    return "not caught", f"{len(outcome['skipped'])} tests were skipped, none ran"


def read_table(path: Path) -> list[Bug]:
    """A list of {files, old, new, test}, where files may be a list, in a JSON file."""
    bugs = []
    for entry in json.loads(path.read_text()):
        files = entry["files"] if isinstance(entry["files"], str) else " ".join(entry["files"])
        test = entry.get("test", "").removeprefix("tests/")
        bugs.append(Bug(files, entry["old"], entry["new"], test, entry.get("times", 1)))
    return bugs


def main(arguments: list[str] | None = None, bugs: list[Bug] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", metavar="GLOB", help="bugs with a file, test or text like that")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--all-tests", action="store_true", help="not the named test alone")
    parser.add_argument("--table", type=Path, metavar="JSON", help="other bugs than those below")
    options = parser.parse_args(arguments)
    if bugs is None:
        bugs = read_table(options.table) if options.table else BUGS
    if options.only:
        bugs = [bug for bug in bugs if matches(bug, f"*{options.only}*")]
    if not bugs:
        print(f"no bug matches {options.only!r}", file=sys.stderr)
        return 1
    for name in IMPORTS.split():  # once, not in each process
        with suppress(ImportError):
            importlib.import_module(name)

    counts = {"caught": 0, "not caught": 0, "stale": 0}

    def say(kind: str, bug: Bug, why: str) -> None:
        counts[kind] += 1
        print(f"{kind:10}  {bug.files}: {shown(bug)}\n{'':12}{why}", flush=True)

    fresh = []
    for bug in bugs:
        why = stale(bug)
        if why and not (options.all_tests and "no test" in why):
            say("stale", bug, why)
        else:
            fresh.append(bug)

    fail_anyway = {}
    if not options.all_tests:
        named = sorted({f"tests/{bug.test}" for bug in fresh})
        files = sorted({name.partition("::")[0] for name in named})
        clean = [[name for name in named if name.startswith(f"{file}::")] for file in files]
        print(f"without a bug: {len(named)} tests", flush=True)
        for test in run_all([lambda names=names: Attempt(names) for names in clean], options.jobs):
            outcome = test.outcome() or {"failed": {test.words[-1]: "did not end"}}
            fail_anyway |= outcome["failed"]

    def words_for(bug: Bug) -> list[str]:
        if not options.all_tests:
            return ["-x", f"tests/{bug.test}"]
        others = " and ".join(f"not {name}" for name in TEXT_NAMES)
        return ["-x", "-k", others, *(f"tests/{name}" for name in related(bug))]

    sound = []
    for bug in fresh:
        anyway = [name for name in fail_anyway if name.startswith(f"tests/{bug.test}")]
        if anyway:
            say("not caught", bug, f"{anyway[0]} fails without a bug: {fail_anyway[anyway[0]]}")
        else:
            sound.append(bug)
    starts = [lambda bug=bug: Attempt(words_for(bug), bug) for bug in sound]
    for test in run_all(starts, options.jobs):
        kind, why = verdict(test.outcome())
        say(kind, test.bug, why)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"of {len(bugs)}")
    return int(counts["caught"] < len(bugs))


def shown(bug: Bug) -> str:
    """What changes, on one line."""
    old, new = (" ".join(text.split()) for text in (bug.old, bug.new))
    return f"{old!r} -> {new!r}"


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # either ends what is at work, too
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
