#!/usr/bin/env bash
# Runs all GPU checks in a few minutes; logs and the record of verified kernels go to a folder.
#
#   tests/gpu/run.sh [FOLDER]        tests; then memcheck and racecheck if compute-sanitizer is there
#
# Kernels come from JAX_HOPPER_GEMM_CUBINS (see tests/gpu/build.py), else they are compiled.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-build/gpu}
mkdir -p "$folder"
status=0

python3 -m pytest -m gpu tests/gpu -q --durations=15 2>&1 |
  tee "$folder/pytest.log" || status=1
[ -f tests/gpu/verified.json ] && cp tests/gpu/verified.json "$folder"

if command -v compute-sanitizer >/dev/null; then
  compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
    python3 tests/gpu/sanitize.py --every 4 2>&1 | tee "$folder/memcheck.log" | tail -5 || status=1
  compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
    python3 tests/gpu/sanitize.py --grouped --every 8 2>&1 |
    tee "$folder/memcheck_grouped.log" | tail -5 || status=1
  compute-sanitizer --tool racecheck --error-exitcode 1 \
    python3 tests/gpu/sanitize.py --every 8 2>&1 | tee "$folder/racecheck.log" | tail -5 || status=1
  compute-sanitizer --tool racecheck --error-exitcode 1 \
    python3 tests/gpu/sanitize.py --grouped --every 16 2>&1 |
    tee "$folder/racecheck_grouped.log" | tail -5 || status=1
else
  echo "compute-sanitizer is not installed: memory was not checked"
fi
exit $status
