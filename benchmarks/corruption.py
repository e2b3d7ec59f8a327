"""Damages checkpoints at random, 500 bits and 100 truncations over all files, and tells what a restore makes of each.

    python benchmarks/corruption.py --flips 500 --truncations 100 --seed 17

A checkpoint of step 2 is damaged beside a sound one of step 1, and restored. Noticed: it is set aside, told, and step 1
comes back, bit for bit. Harmless: step 2 comes back, bit for bit. Silently wrong: anything else. Writes
benchmarks/results/corruption.md; the exit status is 1 if one was silently wrong.
"""

import argparse
import collections
import os
import pathlib
import random
import shutil
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.checkpoints.manifest import MANIFEST, UNCHECKED
from autoshard.files import write_text_atomically
from autoshard.launch.messages import Rejected

RESULTS = pathlib.Path(__file__).parent / "results" / "corruption.md"
NOTICED, HARMLESS, WRONG = "noticed", "harmless", "silently wrong"


def state_of(step: int) -> dict:
    """A small state of several types, of which little can be compressed."""
    keys = jax.random.split(jax.random.key(step), 3)
    return {
        "w": jax.random.normal(keys[0], (64, 32)),
        "half": jax.random.normal(keys[1], (16, 16)).astype(jnp.bfloat16),
        "count": jax.random.randint(keys[2], (5,), 0, 1000),
        "step": jnp.int32(step),
    }


def is_same(found: dict, step: int) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(state_of(step)), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def restored(folder: pathlib.Path) -> str:
    told: list = []
    with Checkpoints(folder, 2, told.append) as checkpoints:
        found = checkpoints.restore(state_of(0))
    if found is None or not is_same(found.state, found.step):
        return WRONG
    rejected = [message for message in told if isinstance(message, Rejected)]
    return {(1, 1): NOTICED, (2, 0): HARMLESS}.get((found.step, len(rejected)), WRONG)


def by_orbax_alone(folder: pathlib.Path) -> str:
    """What Orbax makes of the same damage."""
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state_of(0))
            found = reader.restore(folder / "2" / "state", args=ocp.args.StandardRestore(like))
    except Exception:  # it raises whatever its readers raise, down to plain Exception
        return NOTICED
    return HARMLESS if is_same(found, 2) else WRONG


def kind_of(name: pathlib.PurePath) -> str:
    """What a file is for; the names of data files differ from run to run."""
    if name.name == MANIFEST:
        return "manifest"
    if name.as_posix() in UNCHECKED:
        return "written after the manifest"
    if "d" in name.parts:
        return "data and index (OCDBT)"
    return {"manifest.ocdbt": "root of an index (OCDBT)", "commit_success.txt": "note"}.get(name.name, "description")


def damage(path: pathlib.Path, how: str, choose: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncation":
        del content[choose.randrange(len(content)) :]
    else:
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


def table(counts: dict[tuple[str, str], collections.Counter[str]], alone: collections.Counter[str]) -> str:
    lines = [
        "| damage | file | tries | noticed | harmless | silently wrong |",
        "|---|---|---|---|---|---|",
    ]
    for (how, kind), found in sorted(counts.items()):
        row = " | ".join(str(found[outcome]) for outcome in (NOTICED, HARMLESS, WRONG))
        lines.append(f"| {how} | {kind} | {found.total()} | {row} |")
    everything = sum(counts.values(), collections.Counter())
    row = " | ".join(str(everything[outcome]) for outcome in (NOTICED, HARMLESS, WRONG))
    lines.append(f"| all | all | {everything.total()} | {row} |")
    row = " | ".join(str(alone[outcome]) for outcome in (NOTICED, HARMLESS, WRONG))
    lines.append(f"| all | all, by Orbax alone | {alone.total()} | {row} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--truncations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=17)
    options = parser.parse_args()
    choose = random.Random(options.seed)
    counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    alone = collections.Counter[str]()
    with tempfile.TemporaryDirectory() as base:
        sound, tried = pathlib.Path(base, "sound"), pathlib.Path(base, "tried")
        with Checkpoints(sound, 2) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state_of(step), {"seed": options.seed})
        names = sorted(path.relative_to(sound / "2") for path in (sound / "2").rglob("*") if path.is_file())
        sizes_bytes = [(sound / "2" / name).stat().st_size for name in names]
        for number in range(options.flips + options.truncations):
            how = "bit flip" if number < options.flips else "truncation"
            # Every file, however small, in turn; and every byte as likely as the others.
            name = names[number // 2 % len(names)] if number % 2 else choose.choices(names, sizes_bytes)[0]
            shutil.copytree(sound, tried)
            damage(tried / "2" / name, how, choose)
            alone[by_orbax_alone(tried)] += 1
            outcome = restored(tried)
            counts[how, kind_of(name)][outcome] += 1
            if outcome == WRONG:
                print(f"SILENTLY WRONG: {how} in {name}, try {number}", file=sys.stderr)
            shutil.rmtree(tried)
    text = table(counts, alone)
    print(text)
    head = (
        f"# Damaged checkpoints\n\n`python benchmarks/corruption.py --flips {options.flips} --truncations "
        f"{options.truncations} --seed {options.seed}`: a bit or the end of a file of the newest of two checkpoints is "
        "changed, and the run restores: half of the tries go through the files in turn, half hit any byte.\n\n"
    )
    write_text_atomically(RESULTS, head + text)
    sys.exit(any(found[WRONG] for found in counts.values()))


if __name__ == "__main__":
    main()
