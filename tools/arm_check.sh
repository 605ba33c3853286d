#!/bin/sh
# The kernels' tests on 64-bit Arm, emulated: `make arm-check`, or sh tools/arm_check.sh TESTS…
#
# Needs Debian's or Ubuntu's apt-get and dpkg (with the right to add an architecture),
# qemu-aarch64-static (package qemu-user-static) and unzip. Fetches an Arm Python, the wheels of
# NumPy, Numba and LLVM for Arm and the tests' packages into .arm/ (about 400 MB), then runs the
# tests with the Arm kernels (`neon`, dotprod). LLVM cannot read the emulated processor's features,
# so `tools/arm_features.py` names them.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=$PWD/.arm
tests=${*:-tests/ops/test_cpu_linear.py tests/ops/test_cpu_rowwise.py tests/ops/test_cpu_attention.py}
packages="python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 zlib1g libexpat1 libssl3 libffi8
  libbz2-1.0 liblzma5 libstdc++6 libgcc-s1 libgomp1"

command -v qemu-aarch64-static >/dev/null || { echo "qemu-aarch64-static is missing: apt-get install qemu-user-static"; exit 1; }
if [ ! -e "$folder/ready" ]; then
    mkdir -p "$folder/debs" "$folder/root" "$folder/wheels" "$folder/site"
    dpkg --print-foreign-architectures | grep -qx arm64 || { dpkg --add-architecture arm64; apt-get update -q; }
    (cd "$folder/debs" && for package in $packages; do apt-get download -q "$package:arm64"; done)
    for deb in "$folder"/debs/*.deb; do dpkg -x "$deb" "$folder/root"; done
    $python -m pip download -q --only-binary=:all: --python-version 3.11 -d "$folder/wheels" \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        $($python -m pip list --format=freeze | grep -E "^(numpy|numba|llvmlite)==") \
        regex jinja2 safetensors rich orjson pydantic prometheus-client pytest hypothesis gguf tokenizers
    for wheel in "$folder"/wheels/*.whl; do unzip -qo "$wheel" -d "$folder/site"; done
    touch "$folder/ready"
fi
export PYTHONPATH="$folder/site:$PWD:$PWD/tools" MARTLET_HOME="$folder/home" NUMBA_CPU_NAME=generic
export NUMBA_CPU_FEATURES=+neon,+fp-armv8,+fullfp16,+dotprod,+lse,+rdm
exec qemu-aarch64-static -cpu max -L "$folder/root" "$folder/root/usr/bin/python3.11" \
    -m pytest -q -p arm_features -p no:cacheprovider $tests
