#!/usr/bin/env bash
# Builds the source distribution, and two wheels from it, into dist/: one for Python 3.11, and one
# for 3.12 and later, which uses the stable ABI. Tests the matching wheel in an empty environment of
# every interpreter. PYTHONS="python3.11 /opt/python3.13/bin/python" selects the interpreters; the
# default is those in PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
out=build/wheels
rm -rf "$out" dist

found=()
for candidate in ${PYTHONS:-python3.11 python3.12 python3.13 python3.14}; do
  "$candidate" -c 'import venv' 2>/dev/null && found+=("$(command -v "$candidate")")
done
minor() { "$1" -c 'import sys; print(sys.version_info.minor)'; }

"$python" -m build --sdist -o dist
built_stable=
for interpreter in "${found[@]}"; do
  if [ "$(minor "$interpreter")" -ge 12 ]; then
    [ -n "$built_stable" ] && continue
    built_stable=1
  fi
  echo "== building with $interpreter"
  "$interpreter" -m venv "$out/environment"
  "$out/environment/bin/python" -m pip --disable-pip-version-check install -q build
  "$out/environment/bin/python" -m build --wheel -o "$out/raw" dist/*.tar.gz
  rm -rf "$out/environment"
done
# auditwheel names each wheel by the oldest glibc that it works with: build on an old system.
PATH="$PWD/.venv/bin:$PATH" "$python" -m auditwheel repair -w dist "$out"/raw/*.whl

for interpreter in "${found[@]}"; do
  wheel=(dist/*cp311-cp311-*.whl)
  [ "$(minor "$interpreter")" -ge 12 ] && wheel=(dist/*-abi3-*.whl)
  "$python" tools/check_wheel.py "${wheel[0]}" "$interpreter"
done
ls -l dist
