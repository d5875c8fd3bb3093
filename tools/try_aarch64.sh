#!/usr/bin/env bash
# Usage: tools/try_aarch64.sh WHEEL FOLDER
# Tries a wheel for Python 3.11 on aarch64 on this machine: QEMU's user mode runs Debian's
# interpreter, from its packages in FOLDER. Nothing is installed, and nothing needs root.
set -euo pipefail
wheel=$(realpath "$1")
python=$PWD/build/venv/bin/python program=$PWD/tools/wheel_program.py
qemu=$(command -v qemu-aarch64-static qemu-aarch64 | head -1) || true
if [ -z "$qemu" ] || ! command -v apt-get dpkg >/dev/null; then
  echo "$(basename "$wheel") was not tried: that needs QEMU (Debian: qemu-user-static) and apt-get"
  exit 0
fi
mkdir -p "$2"
cd "$2"
if [ ! -e root/usr/bin/python3.11 ]; then
  mkdir -p state/lists/partial cache/archives/partial root
  touch state/status
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$PWD/state"
    -o "Dir::State::status=$PWD/state/status" -o "Dir::Cache=$PWD/cache")
  if ! "${apt[@]}" update ||
    ! "${apt[@]}" download python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 \
      libexpat1 zlib1g libssl3 libffi8 libgcc-s1 libstdc++6 libuuid1 liblzma5 libbz2-1.0 libcrypt1; then
    echo "$(basename "$wheel") was not tried: there is no Python 3.11 for arm64 among the packages"
    exit 0
  fi
  for package in *.deb; do dpkg -x "$package" root; done
fi
rm -rf site && mkdir site
"$python" -m pip --disable-pip-version-check install -q --target site --only-binary :all: \
  --python-version 3.11 --implementation cp --abi cp311 --platform manylinux_2_28_aarch64 \
  --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 "$wheel"
PYTHONPATH=site timeout 600 "$qemu" -L root root/usr/bin/python3.11 "$program"
echo "$(basename "$wheel"): called and reduced under $(basename "$qemu")"
