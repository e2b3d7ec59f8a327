"""A real H100 as oracle: what its kernels took beside what they cost by the formulas for compiled programs.

`benchmarks/gpu_steps.py` recorded the programs of benchmarks/results/gpu-steps. One of `foreign/` (the mixer) and three
that are planned with nothing recomputed were not known when the figures of the catalogue and the laws were found.
"""

import gzip
import json
import math
import pathlib

import pytest

from autoshard.cluster import Cluster
from autoshard.hlo.kernel_cost import kernel_s
from autoshard.hlo.module import parse

ROOT = pathlib.Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "results" / "gpu-steps"
NAMES = sorted(path.stem for path in MEASURED.glob("*.json"))
WITHIN = 0.1


def test_there_are_programs_of_eleven_models():
    assert len(NAMES) == 19 and len({name.split("-")[0] for name in NAMES}) == 11


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_of_a_program_take_what_they_are_priced_at(name):
    recorded = json.loads((MEASURED / f"{name}.json").read_text())
    assert recorded["device"] == "NVIDIA H100 80GB HBM3"
    took = {instruction for instruction, _, _ in recorded["kernels"]}
    module = parse(gzip.decompress((MEASURED / f"{name}.hlo.txt.gz").read_bytes()).decode())
    device = Cluster.from_file(ROOT / "configs" / "clusters" / "h100x1.yaml").slices()[0].device_type
    priced_s = math.fsum(
        run.times * kernel_s(device, module, run.computation, run.instruction)
        for run in module.runs()
        if run.instruction.name in took
    )
    assert priced_s == pytest.approx(recorded["busy_s"], rel=WITHIN)
