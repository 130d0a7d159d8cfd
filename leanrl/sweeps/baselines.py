"""SAC and TD3, baseline and variant, on one task: a list of scripts varies like a parameter.

Variants have flags that baselines lack (--compile), so these run as they are.
"""

script = [
    "leanrl/sac_continuous_action.py",
    "leanrl/sac_continuous_action_torchcompile.py",
    "leanrl/td3_continuous_action.py",
    "leanrl/td3_continuous_action_torchcompile.py",
]
params = dict(
    env_id=["HalfCheetah-v5"],
    total_timesteps=[100_000],
    eval_every=[10_000],
    seed=[1, 2, 3],
)
