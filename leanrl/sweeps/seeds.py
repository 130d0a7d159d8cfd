"""One script, ten seeds: what an interval over seeds is worth."""

script = "leanrl/ppo_cartpole_gpu_torchcompile.py"
params = dict(
    total_timesteps=[2_000_000],
    compile=[True],
    eval_every=[500_000],
    seed=list(range(1, 11)),
)
