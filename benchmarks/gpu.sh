#!/usr/bin/env bash
# Everything that needs a GPU, by task. Run from the repository root; results go to the folder named,
# to be reviewed and appended to benchmarks/results. Models by name, without random:.
#
#     benchmarks/gpu.sh OUT_DIRECTORY TASK...
#
#     tests         the tests marked cuda
#     demo          the demo of every model in $MODELS
#     long_prompt   one 131,072-token prompt
#     many          clients at once, for $MODELS
#     families      verify, attribute and bench of every model in $MODELS
#     peers         who else runs a prompt, for $MODELS; LLAMA_BENCH names llama.cpp's llama-bench,
#                   and $GGUF_DIR holds MODEL.gguf (benchmarks/peers/random_gguf.py)
#     over_http     what a client of the server waits for, for $MODELS (needs the serve extra)
#     smoke         one short call of each measuring command, to see that they work
set -u
out=$1
shift
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
pytest="python3 -m pytest -m cuda -q -p no:cacheprovider -p no:benchmark --tb=short"
graphseed="python3 -m graphseed.cli.main"
all="smollm2-135m qwen3-0.6b gemma3-270m llama3.2-1b llama3-8b qwen3-moe-16l"

# said SECONDS NAME COMMAND...: run within a limit, keep the output, show its end.
said() {
    local limit=$1 name=$2 start=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    echo "$name: rc $? in $((SECONDS - start)) s"
    tail -n "${TAIL:-12}" "$out/$name.log"
}

run_tests() {
    # The driver's tests read the device's memory, so nothing may run beside them.
    said 150 tests_driver $pytest tests/drivers tests/footguns tests/engine/test_one_launch.py
    local beside=""
    # A few tests take most of the time: who is done takes over what others have not begun.
    python3 -c 'import xdist' 2>/dev/null && beside="-n 12 --dist worksteal"
    said 240 tests_engine $pytest $beside tests/models tests/engine tests/measure
}

run_demo() {
    for model in ${MODELS:-smollm2-135m qwen3-0.6b gemma3-270m llama3.2-1b qwen3-moe-16l}; do
        said 150 "demo_$model" $graphseed demo -m "random:$model" --device cuda \
            --json "$out/demo.jsonl"
    done
}

run_long_prompt() {
    said 200 long_prompt python3 benchmarks/long_prompt.py -m random:llama3.2-1b --device cuda \
        --prompt-tokens 131072 --json "$out/long_prompt.jsonl"
}

run_many() {
    for model in ${MODELS:-smollm2-135m qwen3-moe-16l}; do
        TAIL=15 said 300 "many_$model" python3 benchmarks/many.py -m "random:$model" --device cuda \
            ${MANY_FLAGS:-} --json "$out/many.jsonl"
    done
}

run_families() {
    for model in ${MODELS:-$all}; do
        TAIL=6 said 120 "verify_$model" $graphseed verify -m "random:$model" --device cuda -q \
            --json "$out/verify.jsonl"
        TAIL=14 said 180 "attribute_$model" $graphseed attribute -m "random:$model" \
            --device cuda --chunks 32,128,512,2048 --contexts 0,32768 -q --json "$out/attribute.jsonl"
        TAIL=30 said 240 "bench_$model" $graphseed bench -m "random:$model" --device cuda \
            -p 32,128,512,2048 -ub 2048 -n 32 -d 0,32768 -q --json "$out/bench.jsonl"
    done
}

run_peers() {
    for model in ${MODELS:-smollm2-135m llama3.2-1b}; do
        local llama=""
        if [ -n "${LLAMA_BENCH:-}" ]; then
            llama="--llama-bench $LLAMA_BENCH --gguf ${GGUF_DIR:-.}/$model.gguf"
        fi
        TAIL=24 said 400 "peers_$model" python3 benchmarks/peers.py -m "random:$model" \
            --device cuda $llama --json "$out/peers.jsonl"
    done
}

run_over_http() {
    for model in ${MODELS:-smollm2-135m}; do
        TAIL=24 said 300 "over_http_$model" python3 benchmarks/over_http.py -m "random:$model" \
            --device cuda ${OVER_HTTP_FLAGS:-} --logs "$out" --json "$out/over_http.jsonl"
    done
}

run_smoke() {
    TAIL=8 said 60 smoke_first_token python3 benchmarks/many.py -m random:smollm2-135m \
        --device cuda --clients "" --json "$out/smoke_many.jsonl"
    TAIL=20 said 90 smoke_attribute $graphseed attribute -m random:smollm2-135m --device cuda \
        --chunks 32,512 --contexts 0,2048 --json "$out/smoke_attribute.jsonl"
    TAIL=30 said 60 smoke_bench $graphseed bench -m random:smollm2-135m --device cuda -p 64,512 \
        -n 8 -r 3 --json "$out/smoke_bench.jsonl"
    for model in tiny-llama tiny-qwen3-moe smollm2-135m; do
        said 60 "smoke_verify_$model" $graphseed verify -m "random:$model" --device cuda \
            --max-tokens 1100 --json "$out/smoke_verify.jsonl"
    done
}

for task in "$@"; do
    "run_$task" || exit 2
done
