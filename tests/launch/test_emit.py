"""Job files: the Slurm script runs under stand-ins for Slurm's commands; the JobSet is read by models of its schema."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from kubeflow_trainer_api import models  # generated from the OpenAPI schemas of JobSet and Kubernetes

from autoshard.errors import ConfigError
from autoshard.launch.emit.emit import emit
from autoshard.launch.emit.kubernetes import job_set
from autoshard.launch.emit.request import JobRequest, job_name

COMMANDS = {
    "srun": r"""#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_PROCID=$rank "$@" &
    echo $! >> "$FAKE/tasks"
    pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do wait "$pid"; status=$?; ((status > worst)) && worst=$status; done
exit $worst
""",
    "scontrol": r"""#!/bin/bash
if [[ $1 == show ]]; then printf 'first-node\nsecond-node\n'; else echo "$*" >> "$FAKE/requeued"; fi
""",
    "scancel": r"""#!/bin/bash
[[ $1 == --signal=TERM ]] && xargs kill -TERM < "$FAKE/tasks"
exit 1
""",
}
WORKER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["FAKE"])
names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(130))
with (folder / "calls").open("a") as file:
    file.write(" ".join([*(os.environ[name] for name in names), *sys.argv[1:]]) + "\\n")
plan = (folder / "plan").read_text().split()
attempt = len((folder / "calls").read_text().splitlines()) - 1
if plan[0] == "wait":
    time.sleep(60)
sys.exit(int(plan[min(attempt // 2, len(plan) - 1)]) if os.environ["JAX_PROCESS_ID"] == "1" else 0)
"""


def request(**changes) -> JobRequest:
    given = {
        "name": "gpt-small",
        "arguments": (sys.executable, "-m", "autoshard", "train", "config.yaml"),
        "output_dir": "/shared/my runs/gpt",
        "least_workers": 2,
        "most_workers": 2,
        "gpus_per_worker": 8,
    }
    return JobRequest(**given | changes)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Starts a script under stand-ins for Slurm, whose workers end as `plan` says, attempt by attempt."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "worker.py").write_text(WORKER)

    def start(plan: str, **changes) -> subprocess.Popen[str]:
        (tmp_path / "plan").write_text(plan)
        arguments = (sys.executable, str(tmp_path / "worker.py"), "it's $HOME")
        script = tmp_path / "job.sh"
        script.write_text(emit("slurm", request(arguments=arguments, output_dir=str(tmp_path / "a run"), **changes)))
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "FAKE": str(tmp_path),
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[1-2]",
        }
        return subprocess.Popen(["bash", str(script)], env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    return start


def calls(folder: pathlib.Path) -> list[str]:
    return sorted((folder / "calls").read_text().splitlines()) if (folder / "calls").exists() else []


@pytest.mark.parametrize("changes", [{}, {"least_workers": 1, "gpus_per_worker": 0, "cpus_per_worker": 4}])
def test_the_slurm_script_is_bash(tmp_path, changes):
    script = tmp_path / "job.sh"
    script.write_text(emit("slurm", request(**changes)))
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, "--severity=warning", str(script)], check=True)
    assert "@@" not in script.read_text()


def test_the_slurm_script_asks_for_what_the_run_needs():
    lines = emit("slurm", request(least_workers=1, most_workers=4)).splitlines()
    directives = lines[: lines.index("set -euo pipefail")]
    assert {"#SBATCH --nodes=1-4", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue"} <= set(directives)
    assert all(line.startswith("#") for line in directives)  # Slurm reads no directive after the first command
    on_cpus = emit("slurm", request(gpus_per_worker=0, cpus_per_worker=4))
    assert "#SBATCH --cpus-per-task=4\n" in on_cpus and "gpus" not in on_cpus and "--nodes=2\n" in on_cpus


def test_slurm_starts_failed_workers_again_at_another_port(slurm, tmp_path):
    job = slurm("1 137 0")
    _, said = job.communicate(timeout=60)
    assert job.returncode == 0 and "attempt 0 ended with status 1" in said and "attempt 1 ended with status 137" in said
    arguments = "it's $HOME distributed=true train.resume=true"
    assert calls(tmp_path) == [
        f"first-node:{23456 + attempt} 2 {rank} {arguments}" for attempt in range(3) for rank in range(2)
    ]
    assert (tmp_path / "a run" / "logs").is_dir()


@pytest.mark.parametrize(("status", "attempts"), [(2, 1), (130, 1), (7, 3)])
def test_slurm_does_not_start_again_what_would_fail_again(slurm, tmp_path, status, attempts):
    job = slurm(str(status), max_restarts=2)
    job.communicate(timeout=60)
    assert job.returncode == status and len(calls(tmp_path)) == 2 * attempts
    assert not (tmp_path / "requeued").exists()


def test_slurm_saves_the_run_before_its_time_is_over_and_queues_it_again(slurm, tmp_path):
    job = slurm("wait")
    end_s = time.monotonic() + 60
    while len(calls(tmp_path)) < 2 and time.monotonic() < end_s:
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    assert job.returncode == 0 and (tmp_path / "requeued").read_text() == "requeue 123456\n"
    assert len(calls(tmp_path)) == 2


def test_the_job_set_is_what_its_schema_says():
    data = job_set(request(image="registry.example/autoshard:1"))
    read = models.JobsetV1alpha2JobSet.from_dict(data)
    assert read is not None
    assert without_empty(read.to_dict()) == without_empty(data)  # keys that the schema lacks would be lost


@pytest.mark.parametrize("change", ["parallelism", "podFailurePolicy"])
def test_a_job_set_that_the_schema_does_not_know_is_noticed(change):
    data = job_set(request(image="autoshard"))
    job = data["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["misspelt" + change] = job.pop(change)
    read = models.JobsetV1alpha2JobSet.from_dict(data)
    assert read is not None and without_empty(read.to_dict()) != without_empty(data)


def test_all_kubernetes_documents_belong_together():
    text = emit("kubernetes", request(image="autoshard", config_text="model: {name: gpt}\n", output_dir="/output"))
    config, policy, jobs = yaml.safe_load_all(text)
    assert [document["kind"] for document in (config, policy, jobs)] == ["ConfigMap", "NetworkPolicy", "JobSet"]
    job = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (worker,) = pod["containers"]
    assert yaml.safe_load(config["data"]["config.yaml"]) == {"model": {"name": "gpt"}}
    assert config["metadata"]["name"] in [volume.get("configMap", {}).get("name") for volume in pod["volumes"]]
    assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
    # <job set>-<replicated job>-<job index>-<pod index>.<subdomain>, says JobSet
    assert environment["JAX_COORDINATOR_ADDRESS"] == "gpt-small-worker-0-0.gpt-small:8476"
    names = list(environment)
    assert environment["JAX_COORDINATOR_BIND_ADDRESS"] == "$(POD_IP):8476"  # known only if it comes before
    assert names.index("POD_IP") < names.index("JAX_COORDINATOR_BIND_ADDRESS")
    assert environment["JAX_NUM_PROCESSES"] == "2" and job["parallelism"] == job["completions"] == 2
    assert jobs["spec"]["network"]["subdomain"] == "gpt-small"
    assert worker["command"][-3:] == ["train.output_dir=/output", "distributed=true", "train.resume=true"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == worker["name"] and rule["onExitCodes"]["values"] == [2]
    assert pod["restartPolicy"] == "Never"  # which a pod failure policy needs
    assert policy["spec"]["ingress"][0]["from"][0]["podSelector"] == policy["spec"]["podSelector"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"least_workers": 1}, "fixed number of workers; received 1:2"),
        ({"image": None}, "--image"),
    ],
)
def test_kubernetes_needs_an_image_and_a_fixed_size(changes, match):
    with pytest.raises(ConfigError, match=match):
        emit("kubernetes", request(**{"image": "autoshard"} | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Upper"},
        {"name": "a" * 41},
        {"name": "a\n#SBATCH --uid=0"},
        {"name": "-a"},
        {"output_dir": "/run\n#SBATCH --uid=0"},
        {"arguments": ("python", "\0")},
        {"least_workers": 0},
        {"least_workers": 3},
    ],
)
def test_what_no_job_file_can_say_is_refused(changes):
    with pytest.raises(ConfigError):
        request(**changes)


@pytest.mark.parametrize(
    ("text", "name"),
    [("quickstart", "quickstart"), ("My Run_2", "my-run-2"), ("3d", "d"), ("é!", "autoshard"), ("a" * 50, "a" * 40)],
)
def test_names_of_jobs(text, name):
    assert job_name(text) == name
    request(name=name)


def without_empty(data):
    """The data without keys whose values are empty or absent, which models leave out or add."""
    if isinstance(data, dict):
        return {key: without_empty(value) for key, value in data.items() if value not in (None, {}, [])}
    return [without_empty(item) for item in data] if isinstance(data, list) else data
