#!/usr/bin/env bash
# Four ranks under mpirun (Open MPI or MPICH): two pipeline stages, each cut over two tensor-parallel ranks.
# On several hosts, export MASTER_ADDR, the host of rank 0 (Open MPI: pass it on with -x MASTER_ADDR).
set -euo pipefail
cd "$(dirname "$0")/../.."
exec mpirun -n 4 plait train --config examples/demo.toml "$@"
