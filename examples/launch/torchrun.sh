#!/usr/bin/env bash
# Four ranks on this host under torchrun: two pipeline stages, each cut over two tensor-parallel ranks.
# On several hosts, add --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:PORT and start it on each.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec torchrun --nproc-per-node 4 --no-python \
  plait train --config examples/demo.toml "$@"
