#!/usr/bin/env bash
# Trains DQN on CartPole on two ranks of this machine. Needs only Python 3.11 or later and a
# package index; everything goes into .venv.
set -euo pipefail

# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
environment examples

# A thread per rank; torchrun says at length that it would choose the same.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Ranks meet at localhost: a host's own name does not resolve everywhere.
exec "$python" -m torch.distributed.run --standalone --local-addr localhost \
    --nproc-per-node 2 "$root/examples/dqn_cartpole.py"
