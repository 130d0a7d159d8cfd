"""How long a rollout is best, with minibatches of 64 and as many steps in all? 12 variants.

A function's argument names are other parameters: the number of minibatches depends on the length
of the rollout, and the learning rate's two choices on that number.
"""

script = "leanrl/ppo_continuous_action_torchcompile.py"
params = dict(
    num_steps=[1024, 4096],
    num_minibatches=lambda num_steps: [num_steps // 64],
    learning_rate=lambda num_minibatches: [3e-4, 3e-4 * (num_minibatches / 32) ** 0.5],
    total_timesteps=[500_000],
    compile=[True],
    seed=[1, 2, 3],
)
