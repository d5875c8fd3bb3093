#!/usr/bin/env bash
# Builds the C++ tests and the simulators with a sanitizer and runs them: tools/sanitize.sh thread
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1
build=build/sanitize-${kind%%,*}
bin=build/venv/bin
# Builds with sanitizers are several times as fast with clang as with GCC.
compiler=$(command -v clang++ || command -v g++)
$bin/cmake -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/$bin/ninja" \
  -DCMAKE_CXX_COMPILER="$compiler" -DMOOLINK_TESTS=ON -DMOOLINK_DEVELOPMENT=ON \
  -DPython_EXECUTABLE="$PWD/$bin/python" -DMOOLINK_PYTHON=OFF -DMOOLINK_SANITIZE="$kind"
$bin/ninja -C "$build" --quiet
$bin/ctest --test-dir "$build" --output-on-failure --timeout 600
for simulator in "$build"/tests/sim/sim_*; do
  [ -x "$simulator" ] && [ -f "$simulator" ] && "$simulator" --seeds 0..60
done
# Failed allocations reach destructors that nothing else reaches.
if [[ $kind == address* ]]; then
  ASAN_OPTIONS=detect_leaks=0 "$build/tests/injection/injection" --sample 100
fi
