#!/usr/bin/env bash
# Tests moolink beside other libraries: builds build/interop/NAME for each NAME.txt of requirements,
# and runs the tests of tests/interop_libraries in it. Arguments go to pytest.
# MOOLINK_TORCHRL_TESTS: the folder test/rb of a checkout of TorchRL, whose packages have no tests.
set -uo pipefail
cd "$(dirname "$0")/.."
tests=tests/interop_libraries
failed=()
[ -n "${MOOLINK_TORCHRL_TESTS:-}" ] ||
  echo "TorchRL's own tests are left out: set MOOLINK_TORCHRL_TESTS to test/rb of a checkout of it"
for requirements in "$tests"/requirements/*.txt; do
  name=$(basename "$requirements" .txt)
  venv=build/interop/$name
  if ! cmp -s "$requirements" "$venv/installed.txt"; then
    ${PYTHON:-build/venv/bin/python} -m venv "$venv"
    # The core's dependencies and the tests' own; moolink itself is this checkout.
    if ! "$venv/bin/python" -m pip --disable-pip-version-check install -q -c constraints.txt \
      torch pytest pytest-timeout psutil cloudpickle -r "$requirements"; then
      failed+=("$name (could not be installed)")
      continue
    fi
    cp "$requirements" "$venv/installed.txt"
  fi
  # What cannot be fetched is skipped, with this reason.
  tools/suites.sh "$venv/bin/python" || echo "not all suites of other libraries could be fetched"
  echo "== $name"
  PYTHONPATH=$PWD "$venv/bin/python" -m pytest -q "$tests" tests/docs/test_{environments,torchrl,ray}.py "$@" || failed+=("$name")
done
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
