#!/bin/sh
# The swarm of docs/runs/holdem.md on this machine: the door, the learner, and two workers at different prices.
#   sh examples/holdem/run.sh runs/holdem --policy runs/holdem-policy [what else the learner is to be told]
# Needs echo2p2p on the PATH. Ends everything that it started.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?the folder of the run; then what the learner is to be told, --policy first}
shift
mkdir -p "$folder"
pids=""
trap 'kill $pids 2>/dev/null || true; wait' EXIT INT TERM

line() { # waits up to two minutes for the first line that the process of that number writes
    n=0
    until [ -s "$1.out" ]; do
        n=$((n + 1))
        case $n$(ps -o stat= -p "$2") in
        240* | *Z* | "$n") cat "$1.log" >&2 && exit 1 ;; # too long, or it has ended
        esac
        sleep 0.5
    done
    head -n 1 "$1.out"
}

local="-c $here/run.toml --host-maddrs /ip4/127.0.0.1/tcp/0"
echo2p2p bootstrap $local --run-dir "$folder/door" >"$folder/door.out" 2>"$folder/door.log" & pids="$pids $!"
door=$(line "$folder/door" $!)

echo2p2p learner $local $door --run-dir "$folder" "$@" >"$folder/learner.out" 2>"$folder/learner.log" & learner=$!
pids="$pids $learner"
join=$(line "$folder/learner" $learner)
join=${join#echo2p2p worker}

for offer in first:0.20 second:0.30; do
    name=${offer%:*}
    echo2p2p worker $join $local --gpu "$name" --price "${offer#*:}" --run-dir "$folder/$name" \
        >"$folder/$name.out" 2>"$folder/$name.log" & pids="$pids $!"
done

wait "$learner" || { cat "$folder/learner.log" >&2; exit 1; }
tail -n 25 "$folder/learner.log"
