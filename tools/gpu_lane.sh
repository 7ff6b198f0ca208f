#!/usr/bin/env bash
# Run the tests of the GPU, then the benchmark alone on it, in 8 minutes; `nox -s gpu` calls it.
#
#   tools/gpu_lane.sh [RESULTS] [WHEELS]
#
# RESULTS: where logs and figures go (default: gpu-results). WHEELS: a folder of wheels that are
# installed first, without an index. KD_DEVICE: the device (default: cuda:0; "cpu" tries the lane).
# What `docs/benchmarks.md` shows of a GPU is in benchmarks/figures_gpu.json, put there by hand.
# Every part has a time limit, so one that hangs costs no other. The part `everywhere` is no verdict.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-gpu-results}" && cd "${1:-gpu-results}" && pwd)
work=$(mktemp -d)
export KD_DEVICE=${KD_DEVICE:-cuda:0} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
export PYTHONDONTWRITEBYTECODE= TORCHINDUCTOR_COMPILE_THREADS=4
path=$PWD
for name in core nn probabilistic export; do path="$path:$PWD/packages/kd-$name/src"; done
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"
# Only the plugins that are named: others of the machine may warn, and warnings are errors here.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
for name in core nn probabilistic export; do # what an installed distribution says of itself
    about="$work/site/kd_$name-$(cat VERSION).dist-info/METADATA"
    mkdir -p "${about%/*}"
    printf 'Metadata-Version: 2.1\nName: kd-%s\nVersion: %s\n' "$name" "$(cat VERSION)" > "$about"
done
export PYTHONPATH="$PYTHONPATH:$work/site"
if [ -n "${2:-}" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$work/site" "$2"/*.whl || exit 2
fi
{
    date -u
    python3 -VV
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>&1
    python3 - <<'P'
import os, torch, tensordict, pytest, kd_core
print("torch", torch.__version__, "cuda", torch.version.cuda, "available", torch.cuda.is_available())
print("tensordict", tensordict.__version__, "pytest", pytest.__version__, "cores", os.cpu_count())
print("kd from", kd_core.__file__)
P
} > "$out/environment.txt" 2>&1 || { cat "$out/environment.txt"; exit 2; }
cat "$out/environment.txt"

started=$SECONDS
limit=${KD_GPU_TEST_SECONDS:-250}
part() { # part NAME ARGUMENTS...: run pytest in the background
    local name=$1
    shift
    (
        begin=$SECONDS
        export KD_FAILURES="$work/$name.failures"
        touch "$KD_FAILURES"
        timeout -k 5 "$limit" python3 -X faulthandler -m pytest -p no:cacheprovider -q --no-header \
            --tb=short -o faulthandler_timeout=100 --basetemp "$work/$name" -p tests.gpu.telling \
            "$@" > "$work/$name.log" 2>&1
        echo "exit $? after $((SECONDS - begin)) s" >> "$work/$name.log"
    ) &
}
spread="-p xdist.plugin --dist load -n"
metal=tests/gpu/metal
part containers tests/gpu/test_contract.py tests/gpu/test_containers.py tests/gpu/test_compiled.py
part modules tests/gpu/test_modules.py $spread 2
part probabilistic tests/gpu/test_probabilistic.py
part operations tests/gpu/test_operations.py $spread 4
if [ "$KD_DEVICE" != cpu ]; then
    for name in graphs moves processes; do part "$name" "$metal/test_$name.py"; done
    part exported "$metal/test_exported.py" $spread 2  # a worker that crashes ends one test
    part inductor $metal/test_compiled.py $spread 3
fi
if [ "${KD_GPU_SWEEP:-1}" = 1 ]; then
    part everywhere -p tests.gpu.everywhere -p xdist.plugin --dist loadfile -n 6 \
        tests/core tests/nn tests/probabilistic --ignore=tests/core/drop_in \
        --ignore=tests/core/distributed --ignore=tests/nn/distributed
fi
wait
failed=0
for log in "$work"/*.log; do
    name=$(basename "$log" .log)
    last=$(tail -1 "$log")
    echo "== $name: $(grep -aE '(passed|failed|error).* in [0-9.]+s' "$log" | tail -1); ${last##*exit}"
    [ "$name" = everywhere ] && continue
    grep -a '^FAILED ' "$work/$name.failures" | cut -c1-160
    [[ $last == *"exit 0 after"* ]] || failed=1
done > "$out/summary.txt"
cat "$out/summary.txt"
head -c 8000000 "$work/everywhere.failures" > "$out/everywhere.txt" 2> /dev/null
for log in "$work"/*.log; do
    name=$(basename "$log" .log)
    echo "######## $name"
    [ "$name" = everywhere ] || cat "$work/$name.failures"
    tail -c 20000 "$log"
done > "$out/tests.txt"
echo "tests took $((SECONDS - started)) s"

if [ "${KD_GPU_BENCH_SECONDS:=165}" != 0 ]; then
    timeout -k 5 $((KD_GPU_BENCH_SECONDS + 25)) python3 -m benchmarks.gpu --device "$KD_DEVICE" \
        --seconds "$KD_GPU_BENCH_SECONDS" --json "$out/figures.json" 2>&1 | tee "$out/figures.txt"
fi
echo "all took $SECONDS s; results in $out"
exit $failed
