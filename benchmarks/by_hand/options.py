"""Options of XLA:GPU under which hand-written programs are compiled."""

from typing import Any

from autoshard.compiler.candidates import pipelined_collectives

DEFAULTS, COST_PROFILE = "defaults", "cost profile"
OPTIONS: dict[str, dict[str, Any]] = {
    DEFAULTS: {},
    "overlap limit 2": {"xla_gpu_experimental_parallel_collective_overlap_limit": 2},
    COST_PROFILE: {},
    "MaxText": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_highest_priority_async_stream": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": 134217728,
        "xla_gpu_all_gather_combine_threshold_bytes": 134217728,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 67108864,
        **pipelined_collectives(),
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_enable_all_gather_combine_by_dim": False,
        "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
        "xla_disable_hlo_passes": "rematerialization",
    },
}
"""By name. The cost profile is a file that is written from a first compile (`exposed.py`).

MaxText's flags for H100s are those of MaxText/configs/a3/llama_2_7b/16vm.sh in its repository (for two nodes it has one
other threshold); its flags for CUDA graphs and for fusing softmax are gone from XLA, and the one for Triton's matrix
products is the same in all programs here (`autoshard/verify/gpus.py`).
"""
