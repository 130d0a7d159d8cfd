"""What lambda does to PPO: bias of the value function against variance of the return. 9 variants.

python leanrl/sweep.py run leanrl/sweeps/gae_lambda.py --workers 2
"""

script = "leanrl/ppo_continuous_action_torchcompile.py"
params = dict(
    gae_lambda=[0.0, 0.95, 1.0],
    total_timesteps=[500_000],
    compile=[True],
    seed=[1, 2, 3],
)
