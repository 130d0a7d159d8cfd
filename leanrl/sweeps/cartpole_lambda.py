"""What lambda does to PPO, in a minute or two: 9 variants of some seconds on 256 CartPoles.

python leanrl/sweep.py run leanrl/sweeps/cartpole_lambda.py --workers 2
python plots/curves.py runs/cartpole_lambda --band std
"""

script = "leanrl/ppo_cartpole_gpu.py"
params = dict(
    gae_lambda=[0.0, 0.8, 1.0],
    gamma=[0.98],
    num_envs=[256],
    total_timesteps=[500_000],
    seed=[1, 2, 3],
)
