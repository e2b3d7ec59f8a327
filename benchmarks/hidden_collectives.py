"""How many compiled collectives hide behind a matrix product: have one between their begin and their end.

    python benchmarks/verify_matrix.py --keep programs --again
    python benchmarks/hidden_collectives.py programs

Reads the scheduled programs that the matrix keeps, `hlo.txt` in each folder of `programs`, and counts in their entry
computations. Products are calls of cuBLAS and cuDNN; one that XLA made a kernel of its own (Triton) counts if its name
tells, `gemm`.
"""

import argparse
import collections
import pathlib

from autoshard.hlo.module import HloModule, parse

KINDS = ("all-gather", "all-reduce", "reduce-scatter")
CALLS = ("__cublas", "__cudnn")
"""How the targets of calls of NVIDIA's libraries for products and convolutions begin."""


def counted(module: HloModule) -> tuple[collections.Counter, collections.Counter]:
    """Collectives by kind: all of them, and those with a product between begin and end."""
    begun: dict[str, int] = {}
    total, hidden = collections.Counter(), collections.Counter()
    products = 0
    for name, instruction in module.computations[module.entry].instructions.items():
        products += "gemm" in name or any(c in instruction.attributes for c in CALLS)
        kind, _, phase = instruction.opcode.rpartition("-")
        if kind in KINDS and phase == "start":
            begun[name] = products
        elif kind in KINDS and phase == "done":
            total[kind] += 1
            hidden[kind] += products > begun[instruction.operands[0]]
    return total, hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=pathlib.Path, help="folder that `verify_matrix.py --keep` filled")
    files = sorted(parser.parse_args().programs.glob("*/hlo.txt"))
    if not files:
        parser.error("there is no hlo.txt in any folder there; fill it by `python benchmarks/verify_matrix.py --keep`")
    total, hidden = collections.Counter(), collections.Counter()
    for file in files:
        for known, found in zip((total, hidden), counted(parse(file.read_text())), strict=True):
            known.update(found)
    for kind in KINDS:
        print(f"{kind}: {hidden[kind]} of {total[kind]}")
    print(f"{len(files)} programs: {hidden.total()} of {total.total()}, {hidden.total() / total.total():.1%}")


if __name__ == "__main__":
    main()
