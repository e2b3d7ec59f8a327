#!/bin/bash
# Trains on Slurm, which starts one worker on each node. Made by `autoshard launch --emit slurm`; submit it with sbatch.
# Add what your cluster asks for: partition, account, modules. All nodes need Python and the folders in the same places.
#SBATCH --job-name=@@name
#SBATCH --nodes=@@nodes
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
@@resources
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=@@signal
set -euo pipefail

logs=@@logs
mkdir -p -- "$logs"

# Before the time limit Slurm sends USR1 to this script alone. Then all workers save the run and end, and the job takes
# its place in the queue again; it continues with as many nodes as it gets.
is_ending=0
notice() {
    is_ending=1
    scancel --signal=TERM "$SLURM_JOB_ID" || true  # all may have ended just now
}
trap notice USR1

# The workers meet at the first node, at another port in every attempt. They are told, instead of asking Slurm: from its
# variables JAX would give each of them one device only.
coordinator=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export JAX_NUM_PROCESSES=$SLURM_JOB_NUM_NODES

for ((attempt = 0; attempt <= @@max_restarts; attempt++)); do
    export JAX_COORDINATOR_ADDRESS=$coordinator:$((20000 + (SLURM_JOB_ID + attempt) % 10000))
    # One worker that fails ends all: a group of processes that has lost one cannot go on.
    # shellcheck disable=SC2016
    srun --kill-on-bad-exit=1 --open-mode=append --output="$logs/worker-%t.log" \
        bash -c 'JAX_PROCESS_ID=$SLURM_PROCID exec "$@"' worker \
        @@command &
    step=$!
    status=0
    wait "$step" || status=$?
    if ((is_ending)); then
        wait "$step" && exit 0
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    case $status in
        0) exit 0 ;;                  # complete
        @@final_status) exit @@final_status ;;                  # an error that would come again
        130) exit 130 ;;              # stopped by a signal of its user, and saved
    esac
    echo "$(date -u +%FT%TZ) attempt $attempt ended with status $status; see $logs" >&2
done
exit "$status"
