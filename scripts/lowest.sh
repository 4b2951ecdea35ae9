#!/usr/bin/env bash
# Which torch the core runs on: its tests in an environment with one release of torch and NumPy.
#
#     scripts/lowest.sh 2.6.0
#
# The builds of torch on PyPI for Linux hold CUDA: some 3 GB for each release.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python -m venv "$folder"
"$folder/bin/pip" install --quiet "torch==$version" "numpy>=2.0" \
    "pytest>=8.2" "pytest-xdist>=3.6" "hypothesis>=6.100"
"$folder/bin/pip" install --quiet --no-deps -e .
"$folder/bin/pytest" -p no:cacheprovider tests/test_core.py tests/test_regularization.py \
    tests/solvers/test_solvers.py tests/solvers/test_properties.py tests/backward \
    tests/models/rnn/test_ernn.py
