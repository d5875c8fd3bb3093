#!/usr/bin/env bash
# Builds the extension with this machine's python3 and runs what needs a CUDA device: the tests in
# tests/cuda, benchmarks/cuda_tensors.py, rounds of gradients on the device compared with gloo, and
# a storm that kills peers whose model is on the device. It needs no network: modules that python3
# lacks are installed from the wheels in .whl/, if that folder exists.
#
# usage: tools/cuda_check.sh [tests] [bench] [rounds] [storm] [sanitizer]; default: tests bench
# Logs and figures of all steps go to $OUT (default build/cuda).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-build/cuda}
site=${MOOLINK_SITE:-/tmp/moolink-site}
steps=${*:-tests bench}
began=$SECONDS
limit=${LIMIT:-460}  # seconds for all of it
# The seconds that a step has which asks for so many; `timeout 0` would mean no end.
left() {
  local rest=$((limit - SECONDS + began))
  echo $((rest < 5 ? 5 : rest < $1 ? rest : $1))
}
say() { echo "== $((SECONDS - began)) s: $*"; }
mkdir -p "$out" "$site"
export PYTHONPATH=$PWD:$site PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false

say "what is here"
uname -a
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" --version

# What is installed stays as it is; a wheel is taken where its module is missing.
wheels=()
while read -r module wheel; do
  "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" && continue
  for file in .whl/$wheel-*.whl; do [ -e "$file" ] && wheels+=("$file"); done
done <<'MODULES'
nanobind nanobind
tvm_ffi apache_tvm_ffi
pytest pytest
_pytest pytest
iniconfig iniconfig
pluggy pluggy
packaging packaging
pygments pygments
pytest_timeout pytest_timeout
hypothesis hypothesis
sortedcontainers sortedcontainers
attr attrs
psutil psutil
ml_dtypes ml_dtypes
typing_extensions typing_extensions
MODULES
command -v cmake > /dev/null || wheels+=(.whl/cmake-*.whl)
command -v ninja > /dev/null || wheels+=(.whl/ninja-*.whl)
if [ ${#wheels[@]} -gt 0 ]; then
  mapfile -t wheels < <(printf '%s\n' "${wheels[@]}" | sort -u)
  say "installing ${wheels[*]}"
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" "${wheels[@]}" || exit
  export PATH=$PATH:$site/bin
fi

include=$("$python" -c "import sysconfig; print(sysconfig.get_path('include'))")
cmake_options=()
if [ ! -e "$include/Python.h" ] && [ -e .whl/python3.12-include.tgz ]; then
  say "this Python has no headers: those of .whl/ are used"
  tar xzf .whl/python3.12-include.tgz -C "$site"
  cmake_options+=(-DPython_INCLUDE_DIR="$site/python3.12")
fi

say "building"
build=build/cuda-check
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOOLINK_TESTS=OFF -DMOOLINK_PYTHON=ON \
  -DPython_EXECUTABLE="$(command -v "$python")" "${cmake_options[@]}" > "$out/cmake.log" 2>&1 ||
  { cat "$out/cmake.log"; exit 1; }
ninja -C "$build" --quiet _core > "$out/build.log" 2>&1 || { tail -50 "$out/build.log"; exit 1; }
cp "$build"/cpp/bind/_core*.so moolink/
say "built"
"$python" -m moolink doctor

status=0
for step in $steps; do
  case $step in
    tests)
      say "tests"
      # A process for each framework: each brings libraries of its own.
      for file in tests/cuda/test_*.py; do
        timeout "$(left 120)" "$python" -m pytest "$file" -q --maxfail=25 --durations=4 \
          -p no:cacheprovider 2>&1 | tee -a "$out/tests.log" || status=1
      done
      ;;
    sanitizer)
      say "compute-sanitizer"
      timeout "$(left 200)" compute-sanitizer --error-exitcode 9 --target-processes all \
        "$python" -m pytest tests/cuda/test_torch.py -q -p no:cacheprovider \
        -k "views or tree or asked_for" 2>&1 | tee "$out/sanitizer.log" || status=1
      ;;
    bench)
      say "benchmark"
      for ipc in 0 1; do
        MOOLINK_CUDA_IPC=$ipc timeout "$(left 150)" "$python" benchmarks/cuda_tensors.py \
          --json "$out/cuda-ipc$ipc.json" 2>&1 | tee "$out/bench-ipc$ipc.log" || status=1
      done
      ;;
    rounds)
      say "rounds of gradients"
      for peers in 2 4; do
        timeout "$(left 90)" "$python" benchmarks/accumulator.py --device cuda --peers $peers \
          --parameters 1700000 2>&1 | tee -a "$out/rounds.log" || status=1
      done
      ;;
    storm)
      say "storm of deaths"
      used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader; }
      before=$(used)
      timeout "$(left 300)" "$python" -m tests.faults.storm --kills 100 --device cuda 2>&1 |
        tee "$out/storm.log" || status=1
      say "memory of the device in use: before $before, after $(used)"
      ;;
    *)
      echo "unknown step $step" >&2
      exit 2
      ;;
  esac
done
say "done, status $status"
exit $status
