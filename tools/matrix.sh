#!/usr/bin/env bash
# Usage: tools/matrix.sh quick|whole [VERSION ...]
# The Python tests with other versions of Python (3.12 and 3.13) than that of build/venv, which tests all.
# One extension module, for the stable ABI, serves them; it is built from the libraries of build/dev.
# quick: what needs neither torch nor JAX of values, calls, batches and groups. whole: all tests.
# Environments stay in build/matrix. A version that is not found is left out, and named.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=$root/build/matrix
tier=$1
shift
[ $# -gt 0 ] || set -- 3.12 3.13
mapfile -t found < <(tools/pythons.sh "$@")
[ ${#found[@]} -gt 0 ] || exit 0
extras=(test)
[ "$tier" = quick ] && extras=()

# The environment of an interpreter, made anew when its requirements have changed.
environment() {
  local python=$1 folder=$2
  {
    build/venv/bin/python tools/requirements.py "${extras[@]}"
    for name in pytest pytest-timeout pytest-xdist hypothesis psutil ml-dtypes \
      nanobind apache-tvm-ffi; do
      echo "$name"
    done
  } > "$out/requirements.txt"
  if ! cmp -s "$out/requirements.txt" "$folder/requirements.txt"; then
    rm -rf "$folder"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip --disable-pip-version-check install -q -c constraints.txt \
      -r "$out/requirements.txt"
    cp "$out/requirements.txt" "$folder/requirements.txt"
  fi
}

mkdir -p "$out"
tree=$out/tree
rm -rf "$tree"
mkdir -p "$tree"
# A copy: the checkout's own extension module is of build/venv's Python, and tests start processes in it.
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$tree" 2>/dev/null || true
built=
for python in "${found[@]}"; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  echo "== $tier tests with Python $version"
  environment "$python" "$out/$tier-$version"
  if [ -z "$built" ]; then
    build/venv/bin/cmake -G Ninja -DCMAKE_MAKE_PROGRAM="$root/build/venv/bin/ninja" \
      -DPython_EXECUTABLE="$out/$tier-$version/bin/python" -S . -B "$out/build" \
      -DMOOLINK_DEVELOPMENT=ON -DMOOLINK_LIBRARIES="$root/build/dev" > "$out/build.log"
    build/venv/bin/ninja -C "$out/build"
    build/venv/bin/cmake --install "$out/build" --prefix "$tree" > "$out/install.log"
    built=1
  fi
  tests=(tests --ignore tests/nightly -m "not nightly")
  if [ "$tier" = quick ]; then
    tests=(tests/values tests/rpc tests/batcher tests/group --ignore tests/rpc/test_public_face.py
      -k "not a_device_that_is_none")  # which need torch, too
    while IFS= read -r file; do tests+=(--ignore "$file"); done < <(
      grep -lrE "^(import|from) (torch|jax)" tests --include '*.py')
  fi
  (cd "$tree" && PYTHONPATH=$tree MOOLINK_BUILD_DIR=$root/build/dev "$out/$tier-$version/bin/python" -m pytest \
    -n "${WORKERS:-3}" --dist worksteal -q -p no:cacheprovider "${tests[@]}")
done
