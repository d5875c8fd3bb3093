#!/usr/bin/env bash
# Compares the simulators of two builds: for the same seeds their traces must have the same hash,
# whatever a change of the code was that is not meant to change a protocol.
#
#   cp -r build/dev/tests/sim /tmp/before        # before the change
#   tools/sim_traces.sh /tmp/before build/dev/tests/sim [0..999 [NAME...]]
#
# NAME is a simulator without its prefix: session, accumulate. Exits with status 1 if any differs.
set -euo pipefail
before=$1 after=$2 seeds=${3:-0..999}
shift $(($# < 3 ? $# : 3))
if [ $# -eq 0 ]; then  # all but the one that measures
  names=$(cd "$before" && printf '%s\n' sim_* | sed '/^sim_members$/d; s/^sim_//')
  set -- $names
fi

trace_hash() { "$1" --seeds "$seeds" | sed 's/.*"trace_hash": "\([0-9a-f]*\)".*/\1/'; }

differ=0
for name in "$@"; do
  old=$(trace_hash "$before/sim_$name") new=$(trace_hash "$after/sim_$name")
  if [ "$old" = "$new" ]; then
    echo "$name: $new, the same"
  else
    echo "$name: $old before, $new after"
    differ=1
  fi
done
exit $differ
