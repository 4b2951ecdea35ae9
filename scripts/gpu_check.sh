#!/usr/bin/env bash
# What a GPU shows in under 8 minutes, into the folder gpu_report.
#
#     scripts/gpu_check.sh [--dry-run | --rehearse] [--out FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" scripts/gpu_check.py "$@"
