"""What GPUs before Hopper keep in float32.

They have no arithmetic in bfloat16: XLA computes in float32 and rounds the results (`FloatNormalization`). A function
that takes longer to compute again than to fetch is stored as it was computed, and rounded by each kernel that reads it.
"""

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.fusion import COSTLY_BYTES
from autoshard.compiler.primitives import PRODUCTS


def widened(analysis: ProgramAnalysis) -> frozenset[int]:
    """The values of bfloat16 that are stored in float32: those that only kernels read which could compute them."""
    chains, values = analysis.chains, analysis.graph.values
    return frozenset(
        value
        for value in analysis.live.stored & analysis.live.recomputable
        if values[value].dtype == "bfloat16"
        and COSTLY_BYTES.get(chains.made_by(value).name, 0.0) >= COSTLY_BYTES["tanh"]
        and not any(reader.name in PRODUCTS for reader, _ in chains.consumers[value])
    )
