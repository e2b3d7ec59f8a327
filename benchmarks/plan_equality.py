"""Are the plans of two commits the same? Every configuration is planned with a limit of counted work, not of time.

    python benchmarks/plan_equality.py plans-before.jsonl          # on one commit: plans every case into a file
    python benchmarks/plan_equality.py plans-after.jsonl           # on the other; a file that is there is continued
    python benchmarks/plan_equality.py --compare plans-before.jsonl plans-after.jsonl

A case is a configuration of configs/ on one of three clusters of one kind of device, or a small configuration on
eight CPU devices. It is planned by the command line in a process of its own, without the cache. Compared are the mesh,
the layouts of all arguments and outputs, the layouts that every equation enforces, the cost, the proven bound and the
predicted memory. Only what every version of the library offers is used, so that the script runs on old commits.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
CLUSTERS = ("h100x64", "tpu-v5e-x256", "h100x1024")
SMALL = ("gpt_tiny", "llama_tiny", "vit_tiny", "dlrm_tiny", "encoder_tiny")
CHANGES = {
    "llama_8b@h100x64": ["optimizer.num_micro_batches=8"],
    "llama_8b@tpu-v5e-x256": ["optimizer.num_micro_batches=8"],
    "llama_70b@h100x64": ["optimizer.num_micro_batches=16"],
    "llama_70b@tpu-v5e-x256": ["optimizer.num_micro_batches=16"],
    "gpt3_175b@h100x64": ["optimizer.num_micro_batches=24"],
    "gpt3_175b@tpu-v5e-x256": ["data.batch_size=64"],
    "wide_resnet_13b@tpu-v5e-x256": ["optimizer.num_micro_batches=4"],
}
"""What is changed in a configuration that does not fit the cluster's memory as it is."""

EXACT = ("axes", "layouts", "enforced")
CLOSE = ("cost_s", "bound_s", "peak_bytes", "reserved_bytes")
TOLERANCE = 1e-9
"""Relative; sums of floating-point numbers may be added up in another order."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What a case came to; `error` is empty where there is a plan. `layouts` and `enforced` are digests."""

    case: str
    seconds: float
    error: str = ""
    axes: str = ""
    layouts: str = ""
    enforced: str = ""
    cost_s: float = 0.0
    bound_s: float = 0.0
    peak_bytes: float = 0.0
    reserved_bytes: float = 0.0


def cases(clusters: tuple[str, ...]) -> list[str]:
    """`name@cluster` of every full-size configuration, and `name@cpu` of the small ones, which come first."""
    names = [f.stem for f in sorted((ROOT / "configs").glob("*.yaml"))]
    full = [name for name in names if not name.endswith(("tiny", "quickstart"))]
    return [*(f"{name}@cpu" for name in SMALL), *(f"{name}@{cluster}" for cluster in clusters for name in full)]


def plan_case(case: str, work_limit: float) -> Record:
    """Plans a case by the command line."""
    name, _, cluster = case.partition("@")
    where = ["--devices", "8"] if cluster == "cpu" else ["--cluster", str(ROOT / f"configs/clusters/{cluster}.yaml")]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "plan.json"
        command = [
            sys.executable,
            "-c",
            "from autoshard.cli import main; main()",
            "plan",
            str(ROOT / f"configs/{name}.yaml"),
        ]
        command += [*CHANGES.get(case, ()), *where, "--no-cache", "--work-limit", str(work_limit), "--out", str(out)]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        seconds = round(time.perf_counter() - began, 2)
        if done.returncode or not out.exists():
            return Record(case, seconds, error=" ".join((done.stderr or done.stdout).split())[-300:])
        return read_plan(case, seconds, out)


def read_plan(case: str, seconds: float, file: pathlib.Path) -> Record:
    """The record of a saved plan."""
    import autoshard

    plan = autoshard.Plan.load(file)
    layouts = [(t.name, t.shape, t.entries) for t in (*plan.arguments, *plan.outputs)]
    enforced = [(equation, s.operands, s.results) for equation, s in plan.shardings]
    e, c = plan.estimate, plan.certificate
    figures = c.objective, c.bound, e.peak_bytes, e.reserved_bytes or 0.0
    return Record(case, seconds, "", repr(plan.axes), _digest(layouts), _digest(enforced), *figures)


def _digest(data: object) -> str:
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]


def differences(before: Record, after: Record) -> list[str]:
    """What differs between two records of one case, in words."""
    if bool(before.error) != bool(after.error):
        return [f"before: {before.error or 'a plan'}; after: {after.error or 'a plan'}"]
    found = [f"{name} differ" for name in EXACT if getattr(before, name) != getattr(after, name)]
    for name in CLOSE:
        old, new = getattr(before, name), getattr(after, name)
        if abs(new - old) > TOLERANCE * max(abs(old), abs(new)):
            found.append(f"{name} {old:.9g} -> {new:.9g} ({new / old - 1 if old else 1:+.2e})")
    return found


def compare(before: dict[str, Record], after: dict[str, Record]) -> bool:
    """Prints what differs; whether nothing does."""
    both = [case for case in before if case in after]
    differing = 0
    for case in both:
        found = differences(before[case], after[case])
        differing += bool(found)
        if found:
            print(f"{case}: {'; '.join(found)}")
    planned = [case for case in both if not before[case].error]
    ratio = statistics.median(after[c].seconds / before[c].seconds for c in planned) if planned else float("nan")
    print(f"{len(both)} cases in both files, {len(planned)} of them with a plan; {differing} differ.")
    print(f"Process time by the clock, after over before: {ratio:.2f} at the median (means little on a busy machine).")
    return not differing


def read(path: pathlib.Path) -> dict[str, Record]:
    lines = path.read_text().splitlines() if path.exists() else ()
    return {record.case: record for record in (Record(**json.loads(line)) for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="the results; two of them with --compare")
    parser.add_argument("--compare", action="store_true", help="compare two files; exit status 1 if they differ")
    parser.add_argument("--clusters", nargs="*", default=CLUSTERS, help="files of configs/clusters, without .yaml")
    parser.add_argument("--only", nargs="*", help="plan these cases only: parts of names such as llama_70b@h100x64")
    parser.add_argument("--work-limit", type=float, default=20.0, help="units of counted work a solve")
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (read(file) for file in arguments.files)
        raise SystemExit(0 if compare(before, after) else 1)
    out = arguments.files[0]
    done = read(out)
    for case in cases(tuple(arguments.clusters)):
        if case in done or arguments.only and not any(part in case for part in arguments.only):
            continue
        record = plan_case(case, arguments.work_limit)
        with out.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        print(f"{case}: {record.error or record.axes} {record.seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
