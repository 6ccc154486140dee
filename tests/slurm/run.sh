#!/usr/bin/env bash
# Proves the Slurm resolver on a real Slurm: installs it from Debian if need be, runs a controller
# and two nodes on this machine, runs check.py against them, and takes everything down again.
#
# Each node has namespaces of its own for network, processes, host name and mounts (/etc/hosts,
# /dev/shm), so that to anything that runs there the nodes are two hosts, and that nothing
# outlives them. Needs root. Exits 0 if all held, else 1.
#
#   tests/slurm/run.sh [arguments of check.py]      PYTHON=… chooses the interpreter
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)

say() { printf 'slurm: %s\n' "$*"; }
fail() {
    say "$*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || fail "this script starts slurmd and makes network namespaces: run it as root"

install_slurm() {
    local tool missing=()
    for tool in slurmctld slurmd srun munged ip nsenter unshare; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    [ "${#missing[@]}" = 0 ] && return
    command -v apt-get >/dev/null || fail "not found: ${missing[*]}; only apt can install them here"
    say "installing slurm-wlm and munge (not found: ${missing[*]})"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        slurm-wlm munge iproute2 util-linux >/dev/null
}

# All daemons are children of this script and stay in its foreground, so that it can wait for them.
daemons=()
work=''
nodes=(parti-a1 parti-a2)
take_down() {
    local status=$? daemon node
    trap - EXIT INT TERM
    [ "$status" = 0 ] || show_logs
    # Nothing of the cluster is kept, and unshare waits out a polite signal.
    for daemon in "${daemons[@]}"; do kill -KILL "$daemon" 2>/dev/null || true; done
    for daemon in "${daemons[@]}"; do wait "$daemon" 2>/dev/null || true; done
    for node in "${nodes[@]}"; do
        # The link first: with the namespace it would go too, but only some time later.
        ip link delete "$node" 2>/dev/null || true
        ip netns delete "$node" 2>/dev/null || true
    done
    ip link delete parti-br 2>/dev/null || true
    [ -z "$work" ] || rm -rf "$work"
    exit "$status"
}
show_logs() {
    local log
    for log in "$work"/log/*.log; do
        [ -s "$log" ] || continue
        say "the end of $(basename "$log"):"
        tail -n 15 "$log"
    done
} >&2

start() { # start <log> <command…>
    local log=$1
    shift
    "$@" >"$work/log/$log.log" 2>&1 &
    daemons+=($!)
}

make_network() {
    ip link add parti-br type bridge
    ip address add 10.231.17.1/24 dev parti-br
    ip link set parti-br up
    cp /etc/hosts "$work/hosts"
    local node number=10
    for node in "${nodes[@]}"; do
        number=$((number + 1))
        printf '10.231.17.%s %s\n' "$number" "$node" >>"$work/hosts"
        ip netns add "$node"
        ip link add "$node" type veth peer name eth0 netns "$node"
        ip link set "$node" master parti-br up
        ip -n "$node" link set lo up
        ip -n "$node" link set eth0 up
        ip -n "$node" address add "10.231.17.$number/24" dev eth0
    done
}

write_configuration() {
    cat >"$work/slurm.conf" <<EOF
ClusterName=parti
SlurmctldHost=controller(10.231.17.1)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool/%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0
ReturnToService=2
NodeName=parti-a1 NodeAddr=10.231.17.11 CPUs=2
NodeName=parti-a2 NodeAddr=10.231.17.12 CPUs=2
PartitionName=test Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
EOF
}

start_daemons() {
    dd if=/dev/urandom of="$work/munge/key" bs=1024 count=1 status=none
    chmod 600 "$work/munge/key"
    start munged munged --foreground --socket="$work/munge/socket" \
        --key-file="$work/munge/key" --pid-file="$work/munge/pid" \
        --seed-file="$work/munge/seed" --log-file="$work/munge/log"
    # nsenter, as "ip netns exec" would hide the control groups that slurmd asks for.
    # The controller is found by host name in its configuration, so it gets one.
    start slurmctld unshare --uts sh -c \
        "hostname controller && exec slurmctld -D -c -f '$work/slurm.conf'"
    local node
    for node in "${nodes[@]}"; do
        start "slurmd-$node" nsenter --net="/run/netns/$node" \
            unshare --uts --ipc --mount --pid --fork --kill-child --mount-proc sh -c \
            "mount --bind '$work/hosts' /etc/hosts && mount -t tmpfs tmpfs /dev/shm \
             && hostname $node && exec slurmd -D -f '$work/slurm.conf'"
    done
}

wait_for_nodes() {
    local deadline=$((SECONDS + 60)) daemon
    until [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = "${#nodes[@]}" ]; do
        for daemon in "${daemons[@]}"; do
            kill -0 "$daemon" 2>/dev/null || fail "a daemon ended before the cluster was up"
        done
        [ "$SECONDS" -lt "$deadline" ] || fail "the nodes were not idle after 60 s"
        sleep 0.2
    done
}

install_slurm
trap take_down EXIT
trap 'exit 1' INT TERM
work=$(mktemp -d /tmp/parti-slurm.XXXXXX)
chmod 755 "$work" # munge wants its socket to be reachable by all
mkdir -p "$work"/{log,munge,state,spool,jobs}
chmod 755 "$work/munge"
export SLURM_CONF=$work/slurm.conf

make_network
write_configuration
start_daemons
wait_for_nodes
say "$(scontrol --version) is up with nodes ${nodes[*]}"

PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" "$python" "$here/check.py" "$work/jobs" "$@"
say "all held"
