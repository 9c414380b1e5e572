#!/usr/bin/env bash
# Unpacks the packages that gpu.py needs on a machine without network, for Python 3.12 on Linux (x86-64), in the folder
# .carry, which git ignores. There: PYTHONPATH=.carry python3 benchmarks/gpu.py --part a
#
# moec's own needs come first, then peers, then quack with what it needs. What has no wheel, or would not fit in LIMIT MiB,
# is left out, and said. SCATTERMOE=folder takes ScatterMoE from a checkout of its source (github.com/shawntan/scattermoe).
set -euo pipefail
cd "$(dirname "$0")/.."

LIMIT=${LIMIT:-64}
PYTHON=${PYTHON:-python3}
FOLDER=.carry
NEEDED="lark pydantic pydantic-core annotated-types typing-inspection typing-extensions"
PEERS="liger-kernel scattermoe"
QUACK="quack-kernels nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-cu13 apache-tvm-ffi torch-c-dlpack-ext einops cuda-python"
PLATFORMS=()
for tag in manylinux2014 manylinux1 manylinux_2_17 manylinux_2_24 manylinux_2_27 manylinux_2_28 manylinux_2_31 manylinux_2_34 manylinux_2_35; do
  PLATFORMS+=(--platform "${tag}_x86_64")
done

left_out=()
leave_out() { left_out+=("$1: $2"); }

download() { # folder, packages: each in its newest version for that machine, one wheel each
  local into=$1 name
  mkdir -p "$into"
  for name in "${@:2}"; do
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
      --implementation cp "${PLATFORMS[@]}" --dest "$into" "$name" >"$wheels/log" 2>&1 || leave_out "$name" "no wheel"
  done
}

mebibytes() { du --summarize --apparent-size --block-size=1M "$@" | awk '{ sum += $1 } END { print sum + 0 }'; }

unpack() { # folder of wheels, what they are for: all of them, or none if they do not fit
  local wheel
  rm -rf "$1.site"
  mkdir "$1.site"
  for wheel in "$1"/*.whl; do
    [ -e "$wheel" ] && "$PYTHON" -m zipfile -e "$wheel" "$1.site"
  done
  if [ $(($(mebibytes "$FOLDER" "$1.site"))) -gt "$LIMIT" ]; then
    leave_out "$2" "$(mebibytes "$1.site") MiB more than $(mebibytes "$FOLDER") are over the limit of $LIMIT"
    return 1
  fi
  cp -r "$1.site/." "$FOLDER/"
}

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
rm -rf "$FOLDER"
mkdir "$FOLDER"

# shellcheck disable=SC2086 # words of a list
download "$wheels/needed" $NEEDED
unpack "$wheels/needed" "moec's own needs" || { echo "moec cannot run there without: ${left_out[*]}" >&2; exit 1; }
for peer in $PEERS; do
  if [ "$peer" = scattermoe ] && [ -n "${SCATTERMOE:-}" ]; then
    cp -r "$SCATTERMOE/scattermoe" "$FOLDER/"
    continue
  fi
  download "$wheels/$peer" "$peer"
  unpack "$wheels/$peer" "$peer" || true
done
# shellcheck disable=SC2086
download "$wheels/quack" $QUACK
unpack "$wheels/quack" quack || true

echo "$FOLDER: $(mebibytes "$FOLDER") MiB: $(cd "$FOLDER" && ls -d ./*.dist-info scattermoe 2>/dev/null | sed 's/.dist-info//; s|^./||' | tr '\n' ' ')"
for one in "${left_out[@]:-}"; do
  [ -z "$one" ] || echo "left out: $one"
done
