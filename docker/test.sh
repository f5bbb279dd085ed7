#!/usr/bin/env bash
# Builds the image and runs tests/docker against it: a real build, a real container, no daemon.
#
#   docker/test.sh [pytest arguments]        `make test-docker` calls it; as root, on Debian
#
# Owns: the tools (installed by apt where missing), a base image made once by debootstrap from the
# machine's own Debian mirror, a container storage of its own so that nobody else's images are seen
# or removed. Both are kept under $CACHE; the headrace image is removed at the end.
#   BASE_IMAGE=   another base than the one made here, such as the Dockerfile's own default
#   PYTHON=       the interpreter of the host's side, with headrace[dev] (default .venv/bin/python)
# What the build may reach is what this machine's pip reaches: its configuration is mounted for the
# time of the build, together with the local files that it names; none of it stays in the image.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
cache=${XDG_CACHE_HOME:-/var/cache}/headrace-test
base=${BASE_IMAGE:-}
image=localhost/headrace:test

if [[ $(id -u) != 0 ]]; then
    echo "docker/test.sh: needs root (debootstrap, chown of the queue folder); got uid $(id -u)" >&2
    exit 1
fi
if ! "$python" -c 'import headrace.client, pytest' 2>/dev/null; then
    echo "docker/test.sh: $python cannot import headrace and pytest: run 'make setup' first" >&2
    exit 1
fi

missing=()
for need in podman:podman buildah:buildah runc:runc debootstrap:debootstrap newuidmap:uidmap \
    setpriv:util-linux; do
    command -v "${need%%:*}" >/dev/null || missing+=("${need##*:}")
done
if ((${#missing[@]})); then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o Dpkg::Use-Pty=0 \
        --no-install-recommends "${missing[@]}"
fi

mkdir -p "$cache"
exec 9>/run/lock/headrace-docker-test
flock 9 # one run at a time: they share the storage, and sweep what a killed one has left
storage=(--storage-driver vfs --root "$cache/storage" --runroot "$cache/run")
podman=(podman "${storage[@]}" --runtime runc --cgroup-manager cgroupfs)
sweep() { # everything of ours but the base image
    "${podman[@]}" rm --all --force --time 0
    buildah "${storage[@]}" rm --all
    "${podman[@]}" rmi --force "$image"
    "${podman[@]}" image prune --force
    rm -rf /dev/shm/headrace-docker-* "$cache/scratch"
} >/dev/null 2>&1
trap 'sweep || true' EXIT
trap 'exit 130' INT TERM
sweep || true
scratch=$cache/scratch
mkdir "$scratch"
shared=$(mktemp -d -p /dev/shm headrace-docker-XXXXXX)
chmod 0711 "$shared" # the folders in it belong to the image's uid

# --- base image, once ---------------------------------------------------------------------------
if [[ -z $base ]]; then
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    base=localhost/headrace-python-base:$codename
    if ! "${podman[@]}" image exists "$base"; then
        mirror=$(apt-get indextargets --format '$(REPO_URI)' \
            'Created-By: Packages' "Release: $codename" 'Component: main' | head -n 1)
        if [[ -z $mirror ]]; then
            echo "docker/test.sh: /etc/apt names no mirror of $codename main;" \
                "add one, or set BASE_IMAGE" >&2
            exit 1
        fi
        echo "making $base (about a minute)"
        debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
            "$codename" "$scratch/rootfs" "$mirror" >"$scratch/debootstrap.log" 2>&1 ||
            { tail -n 20 "$scratch/debootstrap.log" >&2; exit 1; }
        tar -C "$scratch/rootfs" -c . | "${podman[@]}" import - "$base" >/dev/null
        rm -rf "$scratch/rootfs"
    fi
fi

# --- build ----------------------------------------------------------------------------------------
mapfile -t volumes < <("$python" -m pip config list |
    "$python" docker/pip_config.py "$scratch/pip.conf")
buildah "${storage[@]}" bud --isolation chroot --format docker --build-arg "BASE=$base" \
    "${volumes[@]}" -f docker/Dockerfile -t "$image" .

# --- run ------------------------------------------------------------------------------------------
HEADRACE_TEST_IMAGE=$image HEADRACE_TEST_PODMAN="${podman[*]}" HEADRACE_TEST_TMPFS=$shared \
    "$python" -m pytest -m docker tests/docker "$@"
