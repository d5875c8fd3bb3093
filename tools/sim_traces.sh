#!/usr/bin/env bash
# Compares the traces of the simulators of two builds. A change that does not touch a protocol must
# leave each seed's trace, and so its hash, unchanged.
#
#   cp -r build/dev/tests/sim /tmp/before        # before the change
#   tools/sim_traces.sh /tmp/before build/dev/tests/sim [0..999 [NAME...]]
#
# NAME is a simulator without its prefix: session, accumulate. Exits with status 1 if any differs.
set -euo pipefail
before=${1:?usage: tools/sim_traces.sh BEFORE AFTER [SEEDS [NAME...]]}
after=${2:?usage: tools/sim_traces.sh BEFORE AFTER [SEEDS [NAME...]]}
seeds=${3:-0..999}
shift $(($# < 3 ? $# : 3))
names=("$@")
if [ $# -eq 0 ]; then  # all except sim_members, which measures
  mapfile -t names < <(cd "$before" && find . -maxdepth 1 -name 'sim_*' ! -name sim_members -printf '%f\n' |
    sed 's/^sim_//' | sort)
fi
[ ${#names[@]} -gt 0 ] || { echo "$before has no simulators" >&2; exit 2; }

trace_hash() {
  local output
  output=$("$1" --seeds "$seeds")
  [[ $output =~ \"trace_hash\":\ \"([0-9a-f]+)\" ]] || { echo "$1: no hash: $output" >&2; exit 2; }
  echo "${BASH_REMATCH[1]}"
}

differ=0
for name in "${names[@]}"; do
  old=$(trace_hash "$before/sim_$name")
  new=$(trace_hash "$after/sim_$name")
  if [ "$old" = "$new" ]; then
    echo "$name: $new, the same"
  else
    echo "$name: $old before, $new after"
    differ=1
  fi
done
exit $differ
