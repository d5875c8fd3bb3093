#!/usr/bin/env bash
# Fetches other libraries' own tests into build/interop/suites, for tests/interop_libraries/test_suites.py:
# suites.sh PYTHON, which has the versions of these libraries that are meant.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
suites=build/interop/suites
mkdir -p "$suites"
version() { "$python" -c "import importlib.metadata as m; print(m.version('$1'))" 2>/dev/null; }

if sb3=$(version stable-baselines3) && [ ! -d "$suites/stable_baselines3-$sb3" ]; then
  "$python" -m pip --disable-pip-version-check download -q --no-deps --no-binary :all: -d "$suites" \
    "stable-baselines3==$sb3"
  tar -xzf "$suites/stable_baselines3-$sb3.tar.gz" -C "$suites"
fi
# Gymnasium's source distribution leaves its tests out.
if gymnasium=$(version gymnasium) && [ ! -d "$suites/gymnasium-$gymnasium" ]; then
  git clone -q --depth 1 --branch "v$gymnasium" "${MOOLINK_GYMNASIUM:-https://github.com/Farama-Foundation/Gymnasium}" \
    "$suites/gymnasium-$gymnasium"
fi
