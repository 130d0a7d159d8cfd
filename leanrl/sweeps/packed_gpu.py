"""Small networks leave a GPU idle, so that several runs share it: here four at a time.

python leanrl/sweep.py run leanrl/sweeps/packed_gpu.py --gpus-per-run 0.25 --workers 4
"""

script = "leanrl/sac_continuous_action_torchcompile.py"
params = dict(
    tau=[0.002, 0.005],
    compile=[True],
    cudagraphs=[True],
    seed=[1, 2, 3, 4],
)
