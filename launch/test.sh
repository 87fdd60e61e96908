#!/usr/bin/env bash
# Lints, type-checks and runs the whole test suite, in .venv.
set -euo pipefail

# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
environment dev

cd "$root"
# Tests start several ranks: more threads than that would only compete.
export OMP_NUM_THREADS=1
"$python" -m ruff check
"$python" -m mypy
exec "$python" -m pytest
