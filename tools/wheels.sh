#!/usr/bin/env bash
# Builds the source distribution, and wheels from it, into dist/: for each architecture one for
# Python 3.11, and one for 3.12 and later, which uses the stable ABI. They work with glibc 2.28 and
# later: Zig's Clang compiles them, for other architectures too. Each wheel is tried in an empty
# environment of every interpreter that it is for; those for aarch64 by an emulator.
# PYTHONS="python3.11 /opt/python3.13/bin/python" selects the interpreters; the default is 3.11 to
# 3.14 as far as they are in PATH or pyenv. ARCHITECTURES="x86_64" selects the architectures.
# FRAMEWORKS="jax" selects the frameworks to try the wheels with; the default is "torch jax".
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/build/venv/bin/python
out=$PWD/build/wheels
native=$(uname -m)
: "${ARCHITECTURES:=$native $([ "$native" = x86_64 ] && echo aarch64)}"
rm -rf "$out" dist
mkdir -p "$out"
export PATH="$PWD/build/venv/bin:$PATH"

if [ -n "${PYTHONS:-}" ]; then
  read -ra found <<< "$PYTHONS"
else
  mapfile -t found < <(tools/pythons.sh 3.11 3.12 3.13 3.14)
fi
minor() { "$1" -c 'import sys; print(sys.version_info.minor)'; }

# The header that RDMA needs, without the system's others, which are for the system's own glibc.
verbs=/usr/include
if [ ! -e $verbs/infiniband/verbs.h ] && command -v apt-get dpkg >/dev/null; then
  (cd "$out" && apt-get download -qq libibverbs-dev && dpkg -x libibverbs-dev_*.deb rdma) || true
  verbs=$out/rdma/usr/include
fi
mkdir -p "$out/include"
if [ -e "$verbs/infiniband/verbs.h" ]; then
  ln -s "$verbs/infiniband" "$out/include/infiniband"
else
  echo "infiniband/verbs.h was not found (Debian: libibverbs-dev): wheels without RDMA"
fi

zig=$("$python" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / "zig")')
"$python" -m build --sdist -o dist
for architecture in $ARCHITECTURES; do
  tools/zig_toolchain.sh "$zig" "$architecture" "$out/zig-$architecture"
  libraries=
  built_stable=
  for interpreter in "${found[@]}"; do
    if [ "$(minor "$interpreter")" -ge 12 ]; then
      [ -n "$built_stable" ] && continue
      built_stable=1
    fi
    echo "== building for $architecture with $interpreter"
    rm -rf "$out/environment"
    "$interpreter" -m venv "$out/environment"
    "$out/environment/bin/python" -m pip --disable-pip-version-check install -q build
    folder=$out/$architecture-3.$(minor "$interpreter")
    # Where the interpreter is of another architecture, the two variables say what it would be.
    # Only the bindings depend on the interpreter: the libraries of the first build serve the others.
    _PYTHON_HOST_PLATFORM=linux-$architecture \
    SETUPTOOLS_EXT_SUFFIX=.cpython-3$(minor "$interpreter")-$architecture-linux-gnu.so \
    CMAKE_ARGS="-DCMAKE_TOOLCHAIN_FILE=$out/zig-$architecture/toolchain.cmake
      -DMOOLINK_VERBS_INCLUDE=$([ -e "$out/include/infiniband" ] && echo "$out/include")
      -DMOOLINK_LIBRARIES=$libraries" \
      "$out/environment/bin/python" -m build --wheel -C "build-dir=$folder" -o "$out/raw" dist/*.tar.gz
    : "${libraries:=$folder}"
  done
done
# auditwheel names each wheel by the oldest glibc that it works with.
for wheel in "$out"/raw/*.whl; do "$python" -m auditwheel repair --plat auto -w dist "$wheel"; done

for wheel in dist/*.whl; do "$python" tools/check_wheel.py "$wheel"; done
for interpreter in "${found[@]}"; do
  wheel=(dist/*cp311-cp311-*"_$native.whl")
  [ "$(minor "$interpreter")" -ge 12 ] && wheel=(dist/*-abi3-*"_$native.whl")
  [ -e "${wheel[0]}" ] || continue  # ARCHITECTURES leaves this machine's out
  "$python" tools/check_wheel.py "${wheel[0]}" "$interpreter"
  for framework in ${FRAMEWORKS-torch jax}; do  # an environment for each: none needs the other
    "$python" tools/check_wheel.py "${wheel[0]}" "$interpreter" "$framework"
  done
done
for wheel in dist/*cp311-cp311-*_aarch64.whl; do
  [ "$native" = aarch64 ] || [ ! -e "$wheel" ] || tools/try_aarch64.sh "$wheel" "$out/aarch64"
done
ls -l dist
