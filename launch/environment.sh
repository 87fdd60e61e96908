# shellcheck shell=bash
# Sourced by the scripts beside it. `environment EXTRA` leaves Conduit with that extra of
# pyproject.toml installed in .venv, and the path of that environment's interpreter in $python.
# A run that finds everything in place only looks; one that finds an interrupted run starts over.
#
# CONDUIT_PYTHON=PATH   use this Python instead of looking for one
# CONDUIT_TORCH=WORDS   ask pip for this torch, for example "torch==2.12.0", options included

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." > /dev/null && pwd)
venv=$root/.venv
python=$venv/bin/python
unfinished=$venv/.unfinished

say() {
    printf '%s\n' "$*" >&2
}

fail() {
    say "$@"
    exit 1
}

suitable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null
}

# Prints the folder that holds a torch new enough for pyproject.toml, if this Python has one.
torch_folder() {
    "$1" - 2> /dev/null << 'END'
import importlib.metadata
import re
import sys

torch = importlib.metadata.distribution("torch")
major, minor = re.match(r"(\d+)\.(\d+)", torch.version).groups()
if (int(major), int(minor)) < (2, 11):
    sys.exit(1)
print(torch.locate_file(""))
END
}

# Prints a Python to build on: one that has torch already, if there is one.
find_python() {
    local candidate first=
    if [[ -n ${CONDUIT_PYTHON:-} ]]; then
        set -- "$CONDUIT_PYTHON"
    else
        set -- python3 python3.13 python3.12 python3.11 python3.14
    fi
    for candidate; do
        suitable "$candidate" || continue
        first=${first:-$candidate}
        if torch_folder "$candidate" > /dev/null; then
            first=$candidate
            break
        fi
    done
    [[ -n $first ]] && printf '%s\n' "$first"
}

make_venv() {
    local base folder
    # The environment about to be replaced may be the active one.
    PATH=${PATH//"$venv/bin:"/}
    base=$(find_python) || fail "Conduit needs Python 3.11 or later with its venv module (on Debian" \
        "and Ubuntu the package python3-venv); tried ${CONDUIT_PYTHON:-python3, python3.11 to 3.14}." \
        "Install one, or name one: CONDUIT_PYTHON=/path/to/python3 $0"
    say "Making .venv with $("$base" --version)."
    rm -rf "$venv"
    mkdir "$venv"
    : > "$unfinished"
    "$base" -m venv "$venv"
    if folder=$(torch_folder "$base"); then
        say "It uses the torch in $folder."
        # Unlike --system-site-packages, this also reaches into a base that is a venv itself.
        printf '%s\n' "$folder" \
            > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
    fi
}

install() {
    # Interrupted, pip exits as if it had failed, but has undone nothing: leave the mark.
    trap 'exit 130' INT
    "$python" -m pip install --disable-pip-version-check "$@" && return
    # pip has undone what it began, so that the next run can go on from here.
    rm -f "$unfinished"
    fail "pip could not install ${*: -1}: its last lines say why. Run $0 again afterwards."
}

environment() {
    local extra=$1 stamp key torch
    stamp=$venv/.installed-$extra
    if [[ -e $unfinished ]] || ! "$python" --version > /dev/null 2>&1; then
        make_venv
    elif ! suitable "$python" || ! "$python" -m pip --version > /dev/null 2>&1; then
        fail "The environment in $venv was not made by this script, and lacks pip or Python 3.11." \
            "Move it away."
    fi

    key="$root $("$python" --version) ${CONDUIT_TORCH:-}
$(cat "$root/pyproject.toml" "$root/launch/environment.sh" | cksum)"
    if [[ -e $stamp && $(< "$stamp") == "$key" ]]; then
        return
    fi
    : > "$unfinished"
    if [[ -n ${CONDUIT_TORCH:-} ]] || ! torch_folder "$python" > /dev/null; then
        read -ra torch <<< "${CONDUIT_TORCH:-torch==2.13.0}"
        say "Installing ${torch[*]}."
        install "${torch[@]}"
    fi
    say "Installing Conduit with the extra '$extra'."
    install --quiet --editable "${root}[$extra]"
    printf '%s\n' "$key" > "$stamp"
    rm "$unfinished"
}
