#!/usr/bin/env bash
# The front door: sets up what is missing, then measures or tests. `bash run.sh --help` explains.
set -euo pipefail

# To the checkout, also where a link in some other folder was called; not all have readlink -f.
self=${BASH_SOURCE[0]}
while [[ -L $self ]]; do
    link=$(readlink "$self")
    [[ $link == /* ]] || link=$(dirname -- "$self")/$link
    self=$link
done
CDPATH='' cd -P -- "$(dirname -- "$self")"

usage() {
    cat <<'END'
bash run.sh                      a robot that learns to run, then the speed-up table of README, in ten
                                 minutes; figures and a film in plots/out/
bash run.sh --full               every script and row, 3 seeds at full length, which takes days;
                                 finished runs are kept
                                 --only 'ppo* compile' (SCRIPT ROW), --seeds N, --steps N and --out
                                 FOLDER change either table, and leave out the robot
bash run.sh field [arguments]    against other libraries; --algorithm sac, td3, ppo, ppo_mujoco ...
bash run.sh race [arguments]     what each has learned after minutes of one core, in 24 hours; it goes
                                 on where it stopped. --entrants "PPO on worlds" is a part of it
bash run.sh study [arguments]    how environments scale, from processes to kernels, in minutes
bash run.sh figures [arguments]  the figures of our sources that this machine can make, in twenty
                                 to forty minutes; --list says which, and what needs a GPU
bash run.sh gpu [arguments]      half an hour of a GPU: tests, speeds in turns, traces, learning, and
                                 a page; --minutes 10 is a part, after which it goes on. --rehearse
                                 is the same, tiny, without a GPU
bash run.sh test [arguments]     the tests, in a process per core, four at most. Arguments go to
                                 pytest: --slow runs all of them, -n 0 --pdb in one process. With
                                 --triton first also those of a GPU's kernels, 250 MB to install
bash run.sh --help               this text

An active environment (venv or conda) is used as it is, and gets only the packages that it lacks.
Otherwise the first call makes .venv and installs there what the command needs of requirements/.
END
}

die() {
    echo "run.sh: $1" >&2
    exit "${2:-1}"
}

say() { echo "run.sh: $*" >&2; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints the first Python that is new enough for the pinned packages.
find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        new_enough "$candidate" && command -v "$candidate" && return
    done
    die "no Python 3.11 or newer found: install one, or activate an environment that has it"
}

# install PYTHON ARGUMENTS...: pip install, with a word on the size of torch first.
install() {
    local python=$1
    shift
    "$python" -m pip --version >/dev/null 2>&1 ||
        die "$python has no pip: try $python -m ensurepip"
    if ! command -v nvidia-smi >/dev/null && ! "$python" -c 'import torch' 2>/dev/null; then
        say "no NVIDIA GPU here: torch from the CPU index named on pytorch.org is smaller;" \
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
        [[ ! -e $folder || -d $folder ]] || die "$PWD/$folder is no folder: move it away"
        mkdir -p "$folder" 2>/dev/null && [[ -w $folder ]] ||
            die "cannot write to $PWD/$folder: activate an environment that is somewhere else"
        base=$(find_python)
        "$base" -c 'import ensurepip' 2>/dev/null ||
            die "$base cannot make an environment (Debian, Ubuntu: apt install python3-venv)"
        [[ $PWD${TMPDIR:-} != *" "* ]] ||
            say "a space in $PWD or in TMPDIR: torch.compile cannot build there"
        say "making $folder with $("$base" --version)"
        "$base" -m venv --clear "$folder" || die "could not make $folder; the reason is above"
    fi
    install "$folder/bin/python" "${@/#/--requirement=}"
    echo "$stamps" >"$folder/installed" # last, so that an interrupted set-up starts over
}

# set_up REQUIREMENTS...: sets `python` to an interpreter that has these packages.
set_up() {
    local missing
    python=${active:-.venv}/bin/python
    if [[ -z $active ]]; then
        make_venv .venv "$@"
        return
    fi
    new_enough "$python" ||
        die "the active environment $active has no Python 3.11 or newer: deactivate or replace it"
    # whatever version is there stays: a torch for this machine's CUDA is the user's choice
    missing=$("$python" - "$@" <<'END'
import re, sys
from importlib.metadata import PackageNotFoundError, version

for line in sorted({line for path in sys.argv[1:] for line in open(path)}):
    name, tested = re.match(r"([\w-]*)(?:\[.*\])?(?:==(\S*))?", line).groups()
    try:
        found = name and version(name)
        if tested and found.partition("+")[0] != tested:
            print(f"run.sh: {name} {found} is here, tested is {tested}", file=sys.stderr)
    except PackageNotFoundError:
        print(line.strip())
END
    ) || die "cannot list the packages of $active"
    [[ -z $missing ]] || install "$python" -r /dev/stdin <<<"$missing"
}

# check_device PYTHON: that there is a CUDA device, and that torch finds it if it is installed.
check_device() {
    nvidia-smi -L >/dev/null 2>&1 || die "no CUDA device here: nvidia-smi is missing or finds none"
    ! "$1" -c 'import torch; assert not torch.cuda.is_available()' 2>/dev/null ||
        die "no CUDA device for torch: $1 has a build without CUDA, or for a newer driver"
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
active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
needs=(requirements/{requirements,plots}.txt)
case $command in
    quick) [[ $* != *--only* ]] || needs+=(requirements/envpool.txt) ;;
    --full) needs+=(requirements/envpool.txt) ;;
    field) needs+=(requirements/envpool.txt) ;;
    race) ;;
    study) needs+=(requirements/study.txt) ;;
    figures) needs+=(requirements/{study,envpool}.txt) ;;
    gpu)
        [[ " $* " == *" --rehearse "* ]] || check_device "${active:-.venv}/bin/python"
        needs+=(requirements/{study,test}.txt)
        ;;
    test)
        needs+=(requirements/{envpool,wandb,video,study,test,requirements-ray,onnx}.txt)
        if [[ ${1:-} == --triton ]]; then
            needs+=(requirements/triton.txt)
            shift
        fi
        ;;
    --help | -h) usage && exit ;;
    *) die "unknown argument: $command (bash run.sh --help lists them)" 2 ;;
esac
! command -v nvidia-smi >/dev/null || needs+=(requirements/mujoco-warp.txt) # worlds on the GPU
[[ $command != quick && $command != --full ]] || check_narrowing "$@"
set_up "${needs[@]}" # not in a && or || list, where a failing step would not stop the script
case $command in
    quick)
        status=0
        [[ $# -gt 0 ]] || "$python" plots/measure/robot.py || status=$?
        [[ $status -ne 130 ]] || exit 130 # Ctrl-C
        "$python" plots/measure/speedup.py --quick "$@" || status=$?
        exit "$status"
        ;;
    --full) exec "$python" plots/measure/speedup.py --full "$@" ;;
    test)
        workers=(-n auto --maxprocesses 4 --dist loadfile) # each takes whole files
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
        exec "$python" -m pytest -q "${workers[@]}" tests "$@"
        ;;
    study) exec "$python" plots/measure/env_scaling.py "$@" ;;
    figures) exec "$python" plots/measure/figures.py "$@" ;;
    gpu)
        [[ " $* " == *" --rehearse "* ]] || check_device "$python"
        exec "$python" plots/measure/gpu.py "$@"
        ;;
    field | race)
        make_venv .venv-field requirements/field.txt
        exec "$python" "plots/measure/$command.py" --field-python .venv-field/bin/python "$@"
        ;;
esac
