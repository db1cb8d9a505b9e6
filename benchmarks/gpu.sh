#!/usr/bin/env bash
# Everything that needs a GPU: the tests marked cuda, the demo of every preset and the long prompts
# (figures), many clients at once (many). Run from the repository root; results go to the folder
# named, to be reviewed and appended to benchmarks/results.
#
#     benchmarks/gpu.sh OUT_DIRECTORY [tests] [figures] [many]
set -u
out=$1
shift
what=" ${*:-tests figures many} "
asked() { case "$what" in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
mkdir -p "$out"
export PYTHONPATH=src PYTHONUNBUFFERED=1
pytest="python3 -m pytest -m cuda -q -p no:cacheprovider -p no:benchmark --tb=short"

if asked tests; then
    # The driver's tests read the device's memory, so nothing may run beside them.
    timeout 150 $pytest tests/drivers tests/footguns tests/engine/test_one_launch.py \
        >"$out/tests_driver.log" 2>&1
    echo "driver tests: rc $?"; tail -n 12 "$out/tests_driver.log"
    beside=""
    python3 -c 'import xdist' 2>/dev/null && beside="-n 8 --dist load"
    timeout 240 $pytest $beside tests/models tests/engine >"$out/tests_engine.log" 2>&1
    echo "model and engine tests: rc $?"; tail -n 12 "$out/tests_engine.log"
fi
if asked figures; then
    for model in smollm2-135m qwen3-0.6b gemma3-270m llama3.2-1b qwen3-moe-16l; do
        timeout 150 python3 -m graphseed.cli.main demo -m "random:$model" --device cuda \
            --json "$out/demo.jsonl" >"$out/demo_$model.log" 2>&1
        echo "demo $model: rc $?"
        grep -A 12 "x off" "$out/demo_$model.log"
        grep -E "^median|^released|^finding|^verdict" "$out/demo_$model.log"
    done
    timeout 200 python3 benchmarks/long_prompt.py -m random:llama3.2-1b --device cuda \
        --prompt-tokens 131072 --json "$out/long_prompt.jsonl" >"$out/long_prompt.log" 2>&1
    echo "long prompt: rc $?"; grep -vE "^$" "$out/long_prompt.log" | tail -n 24
fi
if asked many; then
    for model in smollm2-135m qwen3-moe-16l; do
        timeout 300 python3 benchmarks/many.py -m "random:$model" --device cuda \
            --json "$out/many.jsonl" >"$out/many_$model.log" 2>&1
        echo "many $model: rc $?"; tail -n 14 "$out/many_$model.log"
    done
fi
