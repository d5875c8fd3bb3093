#!/bin/sh
# Usage: tools/nightly.sh [SEEDS]
# The checks that take hours: SEEDS (10,000) seeds of each simulator that no night before had,
# all Python tests with the other versions of Python, tests/nightly and the tests marked so (RDMA between emulated machines, trainings to their ends, 10^8 priority updates),
# storms of deaths, broker kills and comings and goings, ten minutes of a torch and a JAX learner in
# one group, more examples of the properties, clang-tidy on all files, twenty minutes of each fuzz
# target and an hour's soak.
set -eu
seeds=${1:-10000}
first=$(( $(date +%s) / 86400 * seeds ))
for simulator in session rpc group accumulate stack shared_pipeline exchange replay; do
  echo "simulator $simulator, seeds $first..$((first + seeds - 1))"
  "build/dev/tests/sim/sim_$simulator" --seeds "$first..$((first + seeds - 1))"
done
MOOLINK_BUILD_DIR=build/dev build/venv/bin/python -m pytest -q --timeout 900 tests/nightly
build/venv/bin/python -m pytest -q -m nightly tests --ignore tests/nightly
tools/matrix.sh whole
tools/interop.sh
PYTHONPATH=$PWD build/interop/current/bin/python -m pytest -q --timeout 900 tests/nightly/test_sb3_cartpole.py tests/nightly/test_ray_hosts.py
build/venv/bin/python -m tests.faults.storm --kills 400
build/venv/bin/python -m tests.faults.storm --broker-restarts 50
build/venv/bin/python -m tests.faults.storm --churn 600
build/venv/bin/python -m tests.learning.mixed_job --seconds 600
MOOLINK_EXAMPLES=100 build/venv/bin/python -m pytest -q --timeout 7200 tests/values tests/sim/test_stack.py \
  tests/inference/test_hostile.py tests/replay/test_hostile.py \
  tests/trajectories/test_hostile.py tests/weights/test_hostile.py
make lint
tools/fuzz.sh 1200
build/venv/bin/python tests/soak.py --minutes 60
