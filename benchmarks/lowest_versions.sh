#!/usr/bin/env bash
# Run a quick part of the tests with the lowest versions that pyproject.toml promises.
#
#     bash benchmarks/lowest_versions.sh [FOLDER]
#
# FOLDER gets the virtual environment, and keeps it for the next time; by default it is a new one,
# which is removed at the end. PYTHON names the interpreter. TORCH names another version of torch, as
# TORCH=2.13.0+cpu, where the lowest is only there as a build for CUDA.
#
# On two cores it took 80 s with a FOLDER from the last time; the install, with a torch for the CPU,
# took some 2 minutes before that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# -gt 0 ]; then
  environment=$1
else
  environment=$(mktemp -d)
  trap 'rm -rf "$environment"' EXIT
fi
if [ ! -x "$environment/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$environment"
fi
# shellcheck disable=SC1091
. "$environment/bin/activate"

# "name>=1.2" of the dependencies and of the extras plots and sb3 becomes "name==1.2". Left out are
# Minari, whose lowest version wants a newer numpy, Ray, and the tools of `dev`.
lowest=$environment/lowest.txt
python - >"$lowest" <<'PYTHON'
import os
import re

text = open("pyproject.toml", encoding="utf-8").read()
dependencies = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)[1]
extras = re.findall(r"^(?:plots|sb3) = (.*)$", text, re.M)
for name, version in re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)"', dependencies + "".join(extras)):
    print(f"{name}=={os.environ.get('TORCH', version) if name == 'torch' else version}")
print("setuptools<81")  # TensorBoard imports pkg_resources of it
PYTHON
cat "$lowest"
# numba keeps compiled kernels by its version: this one has a place of its own, so that it does not
# push out those of the checkout
export NUMBA_CACHE_DIR=$environment/numba
SECONDS=0
pip install -q -e ".[plots,sb3]" hypothesis pandas pytest pytest-xdist "setuptools<81" -c "$lowest"
echo "installed in $SECONDS s"
# warnings of old versions about each other are no fault of ours
pytest -n 2 --dist loadfile -q -p no:cacheprovider -W default --override-ini addopts= \
  tests/test_evaluate.py tests/test_files.py tests/test_record.py tests/test_record_vector.py \
  tests/test_store.py tests/test_spaces.py tests/test_policies.py \
  tests/test_torch_policy.py tests/test_tensorboard.py tests/test_figures.py \
  tests/test_collect.py tests/test_sb3.py tests/test_train.py
