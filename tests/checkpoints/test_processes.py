"""Checkpoints of runs of several processes, which come back as fewer or more, and on hosts of which one was lost."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from together import free_port, run_together

PROGRAM = pathlib.Path(__file__).with_name("one_process.py")
TIMEOUT_S = 120


def run(base: pathlib.Path, tier: str, hosts: list[str], steps: int, *before: str) -> list[dict]:
    """What the processes, one on each of `hosts`, say; fails with all their output if one fails."""
    port = free_port()
    reports = [base.parent / f"{base.name}-{n}.json" for n in range(len(hosts))]  # `base` may be mounted for them alone
    commands = [
        [sys.executable, *map(str, (PROGRAM, n, len(hosts), port, base, host, tier, steps, said))]
        for n, (host, said) in enumerate(zip(hosts, reports, strict=True))
    ]
    if not before:
        run_together(commands)
        return [json.loads(said.read_text()) for said in reports]
    processes = [
        subprocess.Popen([*before, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(hosts), "\n".join(outputs)
    return [json.loads(said.read_text()) for said in reports]


def committed(said: dict) -> list[int]:
    return [message["step"] for message in said["told"] if message["kind"] == "committed"]


@pytest.mark.slow
def test_memory_serves_other_numbers_of_processes_and_survives_the_loss_of_a_host(tmp_path):
    first = run(tmp_path, "memory", ["a", "b"], 3)
    assert [said["restored"] for said in first] == [0, 0] and [committed(said) for said in first] == [[1, 2, 3]] * 2
    grown = run(tmp_path, "memory", ["a", "b", "c"], 3)
    assert [said["restored"] for said in grown] == [3, 3, 3]
    shutil.rmtree(tmp_path / "b")
    shrunk = run(tmp_path, "memory", ["a", "c"], 2)
    assert [said["restored"] for said in shrunk] == [6, 6]
    shutil.rmtree(tmp_path / "c")
    assert [said["restored"] for said in run(tmp_path, "memory", ["a"], 1)] == [8]
    shutil.rmtree(tmp_path / "a")
    assert [said["restored"] for said in run(tmp_path, "memory", ["a"], 0)] == [0]


@pytest.mark.slow
def test_all_processes_check_the_files_and_agree_on_what_is_damaged(tmp_path):
    first = run(tmp_path, "disk", ["a", "b"], 2)
    assert [committed(said) for said in first] == [[1, 2], []]
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["1", "2"]
    largest = max((tmp_path / "disk" / "2").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    told = [run(tmp_path, "disk", ["a", "b", "c"], 0), run(tmp_path, "disk", ["a"], 0)]
    assert [[said["restored"] for said in group] for group in told] == [[1, 1, 1], [1]]
    (rejected,) = told[0][0]["told"]
    assert rejected["kind"] == "rejected" and rejected["path"].endswith("2.corrupt")
    assert rejected["file"] == largest.relative_to(tmp_path / "disk" / "2").as_posix()


@pytest.mark.slow
def test_a_process_whose_disk_is_full_does_not_hold_up_the_others(tmp_path):
    """All processes write to a file system of 48 MB in memory, in a name space that another process keeps open.

    Process 1 fills it up; process 0, which writes a little, may meet that first when it is slow.
    """
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here without being root")
    shell = f'mount -t tmpfs -o size=48m none "{tmp_path}" && echo mounted && cat'
    with subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as keeper:
        assert keeper.stdin is not None and keeper.stdout is not None
        assert keeper.stdout.readline() == "mounted\n"
        enter = ["nsenter", "--preserve-credentials", "--user", "--mount", f"--target={keeper.pid}"]
        first, second = run(tmp_path, "full", ["a", "b"], 0, *enter)
    assert [first["restored"], second["restored"]] == [3, 3] and second["told"] == []
    assert [message["kind"] for message in first["told"]] == ["committed", "not_saved", "committed"]
    assert re.match("the disk is full: Process [01]: .*(RESOURCE_EXHAUSTED|No space left)", first["told"][1]["why"])
