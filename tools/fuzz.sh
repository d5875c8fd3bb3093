#!/usr/bin/env bash
# Builds the fuzz targets of tests/fuzz with clang's libFuzzer, ASan and UBSan and runs them:
#   tools/fuzz.sh SECONDS [TARGET...]     so long each (all targets), one on each processor
# The times are those of a clock: a fuzzer that is stopped for long calls its input slow.
# FUZZ_SEED=N makes a run repeatable; FUZZ_KEEP=1 adds what was new to tests/fuzz/corpus, minimised.
# A finding is written to tests/fuzz/regressions/TARGET, where the ordinary tests replay it.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?usage: tools/fuzz.sh SECONDS [TARGET...]}
shift
bin=build/venv/bin
build=build/fuzz
compiler=${FUZZ_CXX:-}
for name in clang++ clang++-{20,19,18,17,16,15,14}; do
  [ -n "$compiler" ] || compiler=$(command -v "$name" || true)
done
program='extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
if [ -z "$compiler" ] || ! "$compiler" -x c++ -fsanitize=fuzzer,address -o /dev/null - <<<"$program"
then
  echo "left out: fuzzing needs clang++ with libFuzzer (Debian's clang and libclang-rt-dev)" >&2
  exit 2
fi
$bin/cmake -S . -B $build -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/$bin/ninja" \
  -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMOOLINK_FUZZERS=ON \
  -DMOOLINK_DEVELOPMENT=ON -DMOOLINK_PYTHON=OFF >/dev/null
if [ $# -eq 0 ]; then
  for source in tests/fuzz/fuzz_*.cc; do
    name=$(basename "$source" .cc)
    set -- "$@" "${name#fuzz_}"
  done
fi
$bin/ninja -C $build --quiet "${@/#/fuzz_}" "${@/#/replay_}"

fuzz() {
  local target=$1
  local fuzzer=$build/tests/fuzz/fuzz_$target
  local found=tests/fuzz/regressions/$target
  local corpus=tests/fuzz/corpus/$target
  local work=$build/corpus/$target  # grows from run to run, and is not kept in the repository
  local log=$build/$target.log
  mkdir -p "$found" "$corpus" "$work"
  "$build/tests/fuzz/replay_$target" --seeds "$work"
  if ! "$fuzzer" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=8192 \
    -print_final_stats=1 -verbosity=0 ${FUZZ_SEED:+-seed=$FUZZ_SEED} -artifact_prefix="$found/" \
    "$work" "$corpus" "$found" >"$log" 2>&1; then
    grep -vE '^(INFO|\s*NEW_FUNC)' "$log" >&2
    echo "$target: found something; it is in $found" >&2
    return 1
  fi
  echo "$target: $seconds s, $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs"
  [ -z "${FUZZ_KEEP:-}" ] || keep_the_best
  rmdir --ignore-fail-on-non-empty "$found" "$corpus"
}

# Uses what fuzz() has named.
keep_the_best() {
  local fresh=$build/merged/$target
  rm -rf "$fresh" && mkdir -p "$fresh"
  "$fuzzer" -set_cover_merge=1 -max_len=1024 "$fresh" "$corpus" "$work" >/dev/null 2>&1
  rm -rf "$corpus" && mkdir -p "$corpus"
  # In the order in which they were chosen: each adds the most to what those before it reach.
  while read -r _ file; do
    cp "$fresh/$file" "$corpus/$file"
  done < <(find "$fresh" -type f -printf '%T@ %f\n' | sort -n | head -n 48)
}

export build seconds
export -f fuzz keep_the_best
# Ends with 123 if one of them found something; the others are not stopped by that.
printf '%s\n' "$@" | xargs -P "$(nproc)" -I{} bash -euo pipefail -c 'fuzz {}'
