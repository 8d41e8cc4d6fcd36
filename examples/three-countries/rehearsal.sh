#!/bin/sh
# The steps of README.md on one machine and with the seed policy: the door, the learner, three workers, one look.
# Needs echo2p2p on the PATH. Writes into a folder of its own, and ends everything that it started.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
cd "$folder"
pids=""
trap 'kill $pids 2>/dev/null || true; wait' EXIT INT TERM

line() { # waits up to a minute for the first line of a file
    n=0
    until [ -s "$1" ]; do
        n=$((n + 1))
        [ $n -lt 120 ] || { cat "$2" >&2; exit 1; }
        sleep 0.5
    done
    head -n 1 "$1"
}

local="--host-maddrs /ip4/127.0.0.1/tcp/0"
echo2p2p bootstrap $local --run-dir door >door.out 2>door.log & pids="$pids $!"
door=$(line door.out door.log)

echo2p2p learner -c "$here/learner.toml" $local $door --steps 3 --run-dir learner \
    --set 'task.options={operation="add", digits=1}' --set learner.prompts_per_step=4 --set learner.max_new_tokens=4 \
    --set learner.beat_period_s=1 --set learner.threads=1 --set learner.eval_prompts=4 \
    --set learner.optimizer.gradient_checkpointing=false >learner.out 2>learner.log & learner=$!
pids="$pids $learner"
join=$(line learner.out learner.log | sed 's/^echo2p2p worker//')

for offer in helsinki:0.34 dallas:0.39 singapore:1.19; do
    name=${offer%:*}
    echo2p2p worker -c "$here/worker.toml" $join $local --gpu "$name" --price "${offer#*:}" --run-dir "$name" \
        --set worker.threads=1 >"$name.out" 2>"$name.log" & pids="$pids $!"
done

wait "$learner" || { cat learner.log >&2; exit 1; }
cat learner.log
echo "the run folder: $folder/learner"
