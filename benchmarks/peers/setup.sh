#!/bin/sh
# Makes the virtual environments of the libraries that Parti is measured against.
#
#   benchmarks/peers/setup.sh [directory]      default: ~/.cache/parti-peers
#
# They stay outside the repository and outside Parti's own environment: TensorFlow and PyTorch
# pin different companions. Running it again is cheap and changes nothing.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
directory=${1:-"$HOME/.cache/parti-peers"}
python=${PYTHON:-python3.11}
mkdir -p "$directory"

make_environment() {
    [ -x "$directory/$1/bin/python" ] || "$python" -m venv "$directory/$1"
}

make_environment torch
"$directory/torch/bin/pip" install --quiet torch==2.13.0
# The constraint keeps the build that is installed: a dependency must not swap it for another.
"$directory/torch/bin/pip" freeze | grep -i '^torch==' > "$directory/torch-constraint.txt"
"$directory/torch/bin/pip" install --quiet \
    --constraint "$directory/torch-constraint.txt" --requirement "$here/requirements-torch.txt"

make_environment tensorflow
"$directory/tensorflow/bin/pip" install --quiet --requirement "$here/requirements-tensorflow.txt"

echo "peers are installed in $directory"
