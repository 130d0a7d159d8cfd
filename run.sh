#!/usr/bin/env bash
# The front door: sets up what is missing, then measures or tests. `bash run.sh --help` explains.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'END'
bash run.sh                      the quick speed-up table and figures, in minutes; files in plots/out/
bash run.sh --full               the published ones: every script and row, 3 seeds at full length;
                                 finished runs are kept. Both take --only GLOB (of 'SCRIPT ROW'),
                                 --seeds N, --steps N and --out FOLDER
bash run.sh field [arguments]    against other libraries; --algorithm sac, td3, ppo or ppo_atari
bash run.sh study [arguments]    how environments scale, from processes to kernels, in half an hour
bash run.sh test [arguments]     the tests; arguments go to pytest
bash run.sh --help               this text

An active environment (venv or conda) is used as it is, and gets only the packages that it lacks.
Otherwise the first call makes .venv and installs requirements/requirements.txt and plots.txt there,
for --full envpool.txt, for the study study.txt, for the tests all but dev.txt and field.txt.
END
}

die() {
    echo "run.sh: $1" >&2
    exit "${2:-1}"
}

say() { echo "run.sh: $*" >&2; }

# Prints the first Python that is new enough for the pinned packages.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.10 or newer found: install one, or activate an environment that has it"
}

# install PYTHON ARGUMENTS...: pip install, with a word on the size of torch first.
install() {
    local python=$1 torch
    shift
    "$python" -m pip --version >/dev/null 2>&1 ||
        die "$python has no pip: try $python -m ensurepip"
    torch=$(grep -o '^torch==[^ ;]*' requirements/requirements.txt)
    if ! command -v nvidia-smi >/dev/null && ! "$python" -c 'import torch' 2>/dev/null; then
        say "no NVIDIA GPU here: a smaller torch is $torch from the CPU index named on pytorch.org;" \
            "pip install that in an environment of your own, activate it and start again"
    fi
    say "installing (a few minutes the first time)"
    "$python" -m pip install --quiet --disable-pip-version-check "$@" ||
        die "pip install failed; its reason is above"
}

# make_venv FOLDER REQUIREMENTS...: makes an environment, or brings it up to date when they changed.
make_venv() {
    local folder=$1 base stamps
    shift
    stamps=$(cksum "$@") # a line per file
    if "$folder/bin/python" -c '' 2>/dev/null && [[ -f $folder/installed ]] &&
        ! grep -vxFf "$folder/installed" <<<"$stamps" >/dev/null; then
        return
    fi
    if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
        [[ $PWD != *" "* ]] ||
            say "a space in $PWD: torch.compile cannot build from there, --compile will fail"
        base=$(find_python)
        "$base" -c 'import ensurepip, venv' 2>/dev/null ||
            die "$base lacks the venv module: install it (Debian, Ubuntu: apt install python3-venv)"
        say "making $folder with $("$base" --version)"
        "$base" -m venv --clear "$folder" || die "could not make $folder"
    fi
    install "$folder/bin/python" "${@/#/--requirement=}"
    echo "$stamps" >"$folder/installed" # last, so that an interrupted set-up starts over
}

# set_up REQUIREMENTS...: sets `python` to an interpreter that has these packages.
set_up() {
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} missing
    if [[ -z $active ]]; then
        make_venv .venv "$@"
        python=.venv/bin/python
        return
    fi
    python=$active/bin/python
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        die "the active environment $active has no Python 3.10 or newer: deactivate or replace it"
    # whatever version is there stays: a torch for this machine's CUDA is the user's choice
    missing=$("$python" - "$@" <<'END'
import re, sys
from importlib.metadata import PackageNotFoundError, version

for line in (line for path in sys.argv[1:] for line in open(path)):
    name = re.match(r"[\w-]*", line).group()
    try:
        name and version(name)
    except PackageNotFoundError:
        print(line.strip())
END
    ) || die "cannot list the packages of $active"
    if [[ -n $missing ]]; then
        install "$python" -r /dev/stdin <<<"$missing"
    fi
}

# check_narrowing ARGUMENTS...: before anything is installed, that speedup.py will take them.
check_narrowing() {
    while [[ $# -gt 0 ]]; do
        case $1 in
            --only | --seeds | --steps | --out) [[ $# -gt 1 ]] || die "$1 needs a value" 2 ;;
            *) die "unexpected argument: $1 (bash run.sh --help lists them)" 2 ;;
        esac
        shift 2
    done
}

command=${1:-quick}
case $command in
    --only | --seeds | --steps | --out) command=quick ;; # of the quick table
    *) [[ $# -eq 0 ]] || shift ;;
esac
case $command in
    test | field | study) ;;
    quick | --full) check_narrowing "$@" ;;
    --help | -h) [[ $# -eq 0 ]] || die "unexpected argument: $1" 2 ;;
    *) die "unknown argument: $command (bash run.sh --help lists them)" 2 ;;
esac
if [[ $command == --help || $command == -h ]]; then
    usage
    exit
fi
needs=(requirements/{requirements,plots}.txt)
[[ $command != test ]] || needs+=(requirements/{envpool,wandb,video,study,test,requirements-ray}.txt) # all extras
[[ $command != study ]] || needs+=(requirements/study.txt)
[[ $command != --full && $* != *atari* ]] || needs+=(requirements/envpool.txt)
set_up "${needs[@]}" # not in a && or || list, where a failing step would not stop the script
case $command in
    quick | --full) exec "$python" plots/measure/speedup.py "--${command#--}" "$@" ;;
    test) exec "$python" -m pytest -q tests "$@" ;;
    study) exec "$python" plots/measure/env_scaling.py "$@" ;;
    field)
        make_venv .venv-field requirements/field.txt
        exec "$python" plots/measure/field.py --field-python .venv-field/bin/python "$@"
        ;;
esac
