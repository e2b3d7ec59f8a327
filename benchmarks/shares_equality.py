"""Steps whose devices have shares drawn at random, other ones at every step: do they equal the plain step?

    python benchmarks/shares_equality.py                       # twenty minutes on two cores
    python benchmarks/shares_equality.py --family moe --mesh 8

The small programs of the families that have heads or experts (tests/models/shares_programs.py) train for three steps
with AdamW on eight CPU devices under Megatron's plan. The measure is that of the tests (zoo_checks.deviations). What
XLA compiles between the first step and the last one is counted. The table goes to benchmarks/results/.
"""

import argparse
import pathlib
import sys

import jax
import jax.monitoring
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))
TABLE = ROOT / "benchmarks" / "results" / "shares-equality.md"
HEAD = """`python benchmarks/shares_equality.py`: the largest difference from the plain step, as a share of the scale of
a leaf, in three steps with AdamW, each with other shares. Of all products, the given part is on units that can move.

| family | mesh | units | movable | metrics | parameters | optimizer | compiled later |
|---|---|---|---|---|---|---|---|
"""


def row(family: str, mesh: str) -> str:
    """Trains one family on one mesh."""
    import zoo_checks
    from shares_programs import MESHES, program
    from zoo_programs import ADAMW

    from autoshard import Balance, baselines

    reference = zoo_checks.reference_of(program(family, ADAMW))
    strategy, axes = MESHES[mesh]
    plan = baselines.plan_baseline(strategy, reference.subject, mesh=axes, options=zoo_checks.OPTIONS)
    run = plan.jit(reference.program.functions.step, balance=Balance(mode="migrate", most_buckets=4))
    run.compile(reference.first, reference.batches[0])
    rng, held, late = np.random.default_rng(0), [], 0
    compiled: list[str] = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)

    def step(state, batch):
        nonlocal late
        run.balance.set(rng.random(run.balance.axes["tensor"]))
        state, batch = jax.device_put((held.pop() if held else state, batch), run.in_shardings((state, batch)))
        before = len(compiled)
        state, metrics = run(state, batch)
        held.append(state)
        by_units = run.balance.by_units(state)
        late += len(compiled) - before
        return by_units, metrics

    found = zoo_checks.deviations_of(step, reference)
    jax.monitoring.unregister_event_duration_listener(listen)
    jax.clear_caches()
    rooms = run.balance.rooms
    flops = sum(room.unit.flops for room in rooms)
    operations = {o.index: o for o in reference.subject.traced.graph.operations if o.name == "dot_general"}
    share = flops / sum(o.rule.flops * o.trips for o in operations.values())
    parts = " | ".join(f"{found[part].share:.1e}" for part in ("metrics", "params", "opt_state"))
    units = ", ".join(str(room.unit.size) for room in rooms)
    return f"| {family} | {mesh} | {units} | {share:.0%} | {parts} | {late} |"


def main() -> None:
    from shares_programs import MESHES, SIZES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=",".join(SIZES), help="some of them, separated by commas")
    parser.add_argument("--mesh", default=",".join(MESHES), help="some of them, separated by commas")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for family in chosen.family.split(","):
        for mesh in chosen.mesh.split(","):
            rows.append(row(family, mesh))
            print(rows[-1], flush=True)
    if len(rows) == len(SIZES) * len(MESHES):
        TABLE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
