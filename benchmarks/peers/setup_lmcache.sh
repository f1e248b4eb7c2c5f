#!/usr/bin/env bash
# Sets up vLLM's CPU build together with LMCache, in a virtual environment of its own: LMCache wants older versions of
# some of vLLM's dependencies.
#
#   benchmarks/peers/setup_lmcache.sh         install into ${TIEREDKV_PEERS_DIR:-~/.cache/tieredkv-peers}/vllm-lmcache
#
# May be run again at any time, as setup_vllm.sh may.
set -euo pipefail

readonly lmcache_version=0.5.6
readonly venv="${TIEREDKV_PEERS_DIR:-$HOME/.cache/tieredkv-peers}/vllm-lmcache"
readonly stamp="$venv/.lmcache-$lmcache_version"

"$(dirname "$0")/setup_vllm.sh" vllm-lmcache
if [[ ! -e $stamp ]]; then
    printf 'setup_lmcache: installing LMCache %s into %s\n' "$lmcache_version" "$venv" >&2
    pip=("$venv/bin/pip" install --quiet --disable-pip-version-check)
    "${pip[@]}" --no-deps "lmcache==$lmcache_version"
    # What its server and its connector import, less what only GPUs need.
    "${pip[@]}" aiofile caio aiofiles redis sortedcontainers awscrt nvtx "protobuf<7" "prometheus_client<=0.24.1" grpcio
    "$venv/bin/lmcache" --help >/dev/null
    touch "$stamp"
fi
printf 'setup_lmcache: ready: %s\n' "$venv/bin/lmcache" >&2
