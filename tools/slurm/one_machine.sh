#!/bin/bash
# Runs a live run on a Slurm of this machine alone: a lighthouse, an array job of two
# members, and a job of another partition that preempts one of them.
#     apt-get install --no-install-recommends slurm-wlm munge    (Debian or Ubuntu)
#     PATH=.venv-torch/bin:$PATH tools/slurm/one_machine.sh [FOLDER]
# It must be root, as munged, slurmctld and slurmd are of a cluster, and ends all of them.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(realpath -m "${1:-$(mktemp -d)}")
mkdir -p "$folder"/{state,spool,run} /run/munge
export PYTHONPATH=$root SLURM_CONF=$folder/slurm.conf LIVE_TOKEN=one-machine
cat > "$SLURM_CONF" << END
ClusterName=one
SlurmctldHost=$(hostname)
SlurmUser=root
# A job that is queued again waits so long for its old credentials to end; default: 120.
AuthInfo=cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=$(hostname) CPUs=3 State=UNKNOWN
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=small Nodes=ALL PriorityTier=5 PreemptMode=OFF
END
end() {
    scancel --quiet --full --user=root || true
    sleep 2
    kill $(cat "$folder"/*.pid /run/munge/munged.pid) 2> /dev/null || true
}
trap end EXIT
[ -e /etc/munge/munge.key ] || mungekey --create
chown -R munge: /etc/munge /run/munge
runuser -u munge -- munged --force 2> /dev/null
slurmctld -c
slurmd -c
until sinfo --noheader --format=%T | grep -q idle; do sleep 1; done

cd "$folder"
launch=$root/examples/launch
sbatch --partition=small "$launch/lighthouse.sbatch" run
array=$(sbatch --parsable --array=0-1 "$launch/members.sbatch" run \
    "$root/examples/live/train_digits.py" run --epochs 10 --minibatch-seconds 0.25)
echo "members are array job $array"
until grep -qs "update 20 " slurm-"$array"_*.out; do sleep 1; done
echo "$(date +%T) an urgent job needs a processor"
sbatch --wait --partition=urgent --wrap "sleep 5"
echo "$(date +%T) it has ended"
while squeue --noheader --jobs="$array" --format="%i %T %S" | grep .; do sleep 5; done
grep -h "test accuracy" slurm-"$array"_*.out
grep -h '"members"' run/run.jsonl
