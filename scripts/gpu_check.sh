#!/usr/bin/env bash
# Every test and benchmark that needs a GPU, in under 8 minutes, into gpu_report.json.
#
#     scripts/gpu_check.sh [--dry-run] [--out FILE]
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" scripts/gpu_check.py "$@"
