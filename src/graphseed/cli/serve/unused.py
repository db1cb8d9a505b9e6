"""Flags of llama-server that `graphseed serve` knows and does not use, and why.

Owns the two tables: what means nothing here is accepted with one line, what would change answers
without a word is refused. Does not parse.
"""

from typing import Final

from graphseed.cli.serve.table import Other

_THREADS: Final = "torch has one pool of CPU threads; -t sets it"
_AFFINITY: Final = "which cores run it is the system's choice; start it with taskset or numactl"
_SPECULATION: Final = "nothing is speculated, answers are the same without it"
_ROPE: Final = "positions are as the model's config says"
_MEMORY: Final = "weights are read once and stay on the device"
_SPLIT: Final = "one device runs the whole model"
_KV: Final = "K/V is kept in the model's dtype, in blocks that all slots share"
_MEDIA: Final = "only text goes in"
_ROUTER: Final = "one server has one model"
_LOG: Final = "lines are plain, with the time that has passed"
_TOOLS: Final = "the server runs no tools; only pages of this machine may use it, as there"
_REASONING: Final = "what is done with thoughts is the request's choice (reasoning_format)"
_PRESET: Final = "name the model: -m MODEL"
_SAMPLER: Final = "a request says it; this server has no default for it"


def _ignored(names: str, why: str, num_values: int = 1, env: str = "") -> Other:
    return Other(tuple(names.split()), why, num_values, env)


def _refused(names: str, why: str, num_values: int = 1, env: str = "") -> Other:
    return Other(tuple(names.split()), why, num_values, env, is_refused=True)


def _tools(names: str, num_values: int = 1, env: str = "") -> Other:
    return Other(tuple(names.split()), _TOOLS, num_values, env, limits_origins=True)


IGNORED: Final[tuple[Other, ...]] = (
    _ignored("-tb --threads-batch", _THREADS),
    _ignored("--threads-http", "one event loop answers HTTP", env="LLAMA_ARG_THREADS_HTTP"),
    _ignored(
        "-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb "
        "--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch", _AFFINITY,
    ),
    _ignored("--numa", _AFFINITY, env="LLAMA_ARG_NUMA"),
    _ignored("-lm --load-mode", _MEMORY, env="LLAMA_ARG_LOAD_MODE"),
    _ignored("-lzm --lazy-mode", _MEMORY, env="LLAMA_ARG_LAZY_MODE"),
    _ignored("--mmap --no-mmap --mlock -dio --direct-io -ndio --no-direct-io", _MEMORY, 0),
    _ignored("--repack -nr --no-repack", _MEMORY, 0, "LLAMA_ARG_REPACK"),
    _ignored("--no-host", _MEMORY, 0, "LLAMA_ARG_NO_HOST"),
    _ignored("--check-tensors", "a model with bad numbers is found by its logits", 0),
    _ignored("-kvo --kv-offload -nkvo --no-kv-offload", _KV, 0, "LLAMA_ARG_KV_OFFLOAD"),
    _ignored("--op-offload --no-op-offload", _SPLIT, 0),
    _ignored("-sm --split-mode", _SPLIT, env="LLAMA_ARG_SPLIT_MODE"),
    _ignored("-ts --tensor-split", _SPLIT, env="LLAMA_ARG_TENSOR_SPLIT"),
    _ignored("-cmoe --cpu-moe", _SPLIT, 0, "LLAMA_ARG_CPU_MOE"),
    _ignored("-ncmoe --n-cpu-moe", _SPLIT, env="LLAMA_ARG_N_CPU_MOE"),
    _ignored("-ncffn --n-cpu-ffn", _SPLIT, env="LLAMA_ARG_N_CPU_FFN"),
    _ignored("-ot --override-tensor", _SPLIT, env="LLAMA_ARG_OVERRIDE_TENSOR"),
    _ignored("--rpc", _SPLIT, env="LLAMA_ARG_RPC"),
    _ignored("-fit --fit", "the context is made to fit always", env="LLAMA_ARG_FIT"),
    _ignored("-fitt --fit-target", "half of the free memory is left", env="LLAMA_ARG_FIT_TARGET"),
    _ignored("-fitc --fit-ctx", "-c says the context", env="LLAMA_ARG_FIT_CTX"),
    _ignored("-fa --flash-attn", "attention is one paged kernel", env="LLAMA_ARG_FLASH_ATTN"),
    _ignored("-ctk --cache-type-k", _KV, env="LLAMA_ARG_CACHE_TYPE_K"),
    _ignored("-ctv --cache-type-v", _KV, env="LLAMA_ARG_CACHE_TYPE_V"),
    _ignored("-dt --defrag-thold", _KV, env="LLAMA_ARG_DEFRAG_THOLD"),
    _ignored("--swa-full", _KV, 0, "LLAMA_ARG_SWA_FULL"),
    _ignored("-ctxcp --ctx-checkpoints --swa-checkpoints", _KV, env="LLAMA_ARG_CTX_CHECKPOINTS"),
    _ignored("-cms --checkpoint-min-step", _KV, env="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT"),
    _ignored("-cram --cache-ram", _KV, env="LLAMA_ARG_CACHE_RAM"),
    _ignored("--cache-idle-slots --no-cache-idle-slots", _KV, 0, "LLAMA_ARG_CACHE_IDLE_SLOTS"),
    _ignored("--cache-reuse", "whole prefixes are reused, and no other part of a prompt",
             env="LLAMA_ARG_CACHE_REUSE"),
    _ignored("--kv-unified-per-slot", "-c and -np say it", env="LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
    _ignored("-sps --slot-prompt-similarity", "any slot finds any prefix that was computed"),
    _ignored("--keep", "a full context ends the answer"),
    _ignored("--context-shift --no-context-shift", "a full context ends the answer", 0,
             "LLAMA_ARG_CONTEXT_SHIFT"),
    _ignored("-cb --cont-batching -nocb --no-cont-batching", "requests always run together", 0,
             "LLAMA_ARG_CONT_BATCHING"),
    _ignored("--warmup --no-warmup", "kernels are always made ready before the first request", 0),
    _ignored("--perf --no-perf", "each answer has its timings", 0, "LLAMA_ARG_PERF"),
    _ignored("-bs --backend-sampling --backend_sampling", "sampling runs on the device", 0,
             "LLAMA_ARG_BACKEND_SAMPLING"),
    _ignored("-e --escape --no-escape", "no flag here has escapes", 0),
    _ignored("-sp --special", "special tokens are not shown", 0),
    _ignored("--spm-infill", "there is no infill", 0),
    _ignored("--samplers", "samplers have one order: penalties, top-k, typical, top-p, min-p, "
             "temperature"),
    _ignored("--sampler-seq --sampling-seq", "samplers have one order"),
    _ignored("--dynatemp-exp --dry-base --dry-allowed-length --dry-penalty-last-n "
             "--dry-sequence-breaker --mirostat-lr --mirostat-ent --adaptive-decay "
             "--xtc-threshold", "the sampler it belongs to is not there"),
    _ignored("--reasoning-effort", _REASONING, env="LLAMA_ARG_REASONING_EFFORT"),
    _ignored("--reasoning-budget", _REASONING, env="LLAMA_ARG_THINK_BUDGET"),
    _ignored("--reasoning-budget-message", _REASONING, env="LLAMA_ARG_THINK_BUDGET_MESSAGE"),
    _ignored("--reasoning-preserve --no-reasoning-preserve", _REASONING, 0,
             "LLAMA_ARG_REASONING_PRESERVE"),
    _ignored("--skip-chat-parsing --no-skip-chat-parsing", _REASONING, 0,
             "LLAMA_ARG_SKIP_CHAT_PARSING"),
    _ignored("--prefill-assistant --no-prefill-assistant", "a last message of the assistant is "
             "always gone on with", 0, "LLAMA_ARG_PREFILL_ASSISTANT"),
    _ignored("--embd-normalize", "a request says it (embd_normalize)"),
    _ignored("--rerank --reranking", "/rerank answers where the model can", 0,
             "LLAMA_ARG_RERANKING"),
    _ignored("-mm --mmproj", _MEDIA, env="LLAMA_ARG_MMPROJ"),
    _ignored("-mmu --mmproj-url", _MEDIA, env="LLAMA_ARG_MMPROJ_URL"),
    _ignored("--mmproj-auto --no-mmproj --no-mmproj-auto", _MEDIA, 0, "LLAMA_ARG_MMPROJ_AUTO"),
    _ignored("--mmproj-offload --no-mmproj-offload", _MEDIA, 0, "LLAMA_ARG_MMPROJ_OFFLOAD"),
    _ignored("-mmdev --mmproj-device --image-min-tokens --image-max-tokens "
             "--mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir "
             "--media-path", _MEDIA),
    _ignored("-md --model-draft --spec-draft-model", _SPECULATION,
             env="LLAMA_ARG_SPEC_DRAFT_MODEL"),
    _ignored("--spec-type", _SPECULATION, env="LLAMA_ARG_SPEC_TYPE"),
    _ignored("--spec-default", _SPECULATION, 0),
    _ignored(
        "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic --spec-draft-hf -hfd -hfrd "
        "--hf-repo-draft --spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd "
        "--threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range "
        "-Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio "
        "--prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd "
        "--cpu-mask-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft "
        "--spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft "
        "--spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-n-cpu-moe "
        "--spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-n-max --spec-draft-n-min "
        "--spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split "
        "--spec-draft-p-min --draft-p-min --spec-draft-device -devd --device-draft "
        "--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-type-k -ctkd "
        "--cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft "
        "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match "
        "--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits "
        "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits "
        "--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits",
        _SPECULATION,
    ),
    _ignored("--spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-backend-sampling "
             "--no-spec-draft-backend-sampling", _SPECULATION, 0),
    _ignored("--cors-methods", "every method of an endpoint is allowed",
             env="LLAMA_ARG_CORS_METHODS"),
    _ignored("--cors-headers", "every header is allowed", env="LLAMA_ARG_CORS_HEADERS"),
    _ignored("--cors-credentials", "credentials are allowed", 0),
    _ignored("--path", "the page comes with the package", env="LLAMA_ARG_STATIC_PATH"),
    _ignored("--ui-config --webui-config", "the page has no settings", env="LLAMA_ARG_UI_CONFIG"),
    _ignored("--ui-config-file --webui-config-file", "the page has no settings",
             env="LLAMA_ARG_UI_CONFIG_FILE"),
    _tools("--tools", env="LLAMA_ARG_TOOLS"),
    _tools("--tools-runtime", env="LLAMA_ARG_TOOLS_RUNTIME"),
    _tools("-ag --agent", 0, "LLAMA_ARG_AGENT"),
    _tools("--mcp-servers-config", env="LLAMA_ARG_MCP_SERVERS_CONFIG"),
    _tools("--mcp-servers-json", env="LLAMA_ARG_MCP_SERVERS_JSON"),
    _ignored("-no-ag --no-agent --no-ui-mcp-proxy --no-webui-mcp-proxy", "it is off always", 0),
    _ignored("--ui-mcp-proxy --webui-mcp-proxy", "nothing is fetched for clients", 0,
             "LLAMA_ARG_UI_MCP_PROXY"),
    _ignored("--models-dir", _ROUTER, env="LLAMA_ARG_MODELS_DIR"),
    _ignored("--models-preset", _ROUTER, env="LLAMA_ARG_MODELS_PRESET"),
    _ignored("--models-max", _ROUTER, env="LLAMA_ARG_MODELS_MAX"),
    _ignored("--models-autoload --no-models-autoload", _ROUTER, 0, "LLAMA_ARG_MODELS_AUTOLOAD"),
    _ignored("--log-jsonl --no-log-jsonl", _LOG, 0, "LLAMA_ARG_LOG_JSONL"),
    _ignored("--log-colors", _LOG, env="LLAMA_ARG_LOG_COLORS"),
    _ignored("--log-prefix --no-log-prefix", _LOG, 0, "LLAMA_ARG_LOG_PREFIX"),
    _ignored("--log-timestamps --no-log-timestamps", _LOG, 0, "LLAMA_ARG_LOG_TIMESTAMPS"),
    _ignored("--log-prompts-dir", "--log-prompts logs them with everything else"),
    _ignored("--lora-init-without-apply", "there are no adapters", 0),
)  # fmt: skip

REFUSED: Final[tuple[Other, ...]] = (
    _refused("--lora --lora-scaled", "adapters are not applied; merge them into the weights"),
    _refused("--control-vector --control-vector-scaled", "control vectors are not applied"),
    _refused("--control-vector-layer-range", "control vectors are not applied", 2),
    _refused("--rope-scaling", _ROPE, env="LLAMA_ARG_ROPE_SCALING_TYPE"),
    _refused("--rope-scale", _ROPE, env="LLAMA_ARG_ROPE_SCALE"),
    _refused("--rope-freq-base", _ROPE, env="LLAMA_ARG_ROPE_FREQ_BASE"),
    _refused("--rope-freq-scale", _ROPE, env="LLAMA_ARG_ROPE_FREQ_SCALE"),
    _refused("--yarn-orig-ctx", _ROPE, env="LLAMA_ARG_YARN_ORIG_CTX"),
    _refused("--yarn-ext-factor", _ROPE, env="LLAMA_ARG_YARN_EXT_FACTOR"),
    _refused("--yarn-attn-factor", _ROPE, env="LLAMA_ARG_YARN_ATTN_FACTOR"),
    _refused("--yarn-beta-slow", _ROPE, env="LLAMA_ARG_YARN_BETA_SLOW"),
    _refused("--yarn-beta-fast", _ROPE, env="LLAMA_ARG_YARN_BETA_FAST"),
    _refused("-gan --grp-attn-n -gaw --grp-attn-w", "self-extend is not there"),
    _refused("--override-kv", "a model is what its files say"),
    _refused("-mu --model-url", "fetch the file and give its path to -m",
             env="LLAMA_ARG_MODEL_URL"),
    _refused("-dr --docker-repo", "fetch the file and give its path to -m",
             env="LLAMA_ARG_DOCKER_REPO"),
    _refused("--grammar --grammar-file -j --json-schema -jf --json-schema-file", _SAMPLER),
    _refused("--top-nsigma --top-n-sigma --xtc-probability --dry-multiplier --adaptive-target "
             "--dynatemp-range --mirostat", "this sampler is not there"),
    _refused("--chat-template-kwargs", "a request says it (chat_template_kwargs)",
             env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS"),
    _refused("--no-cors-credentials", "name the origins instead: --cors-origins", 0),
    _refused("--draft --draft-n --draft-max --draft-min --draft-n-min --spec-ngram-size-n "
             "--spec-ngram-size-m --spec-ngram-min-hits", "llama-server removed it"),
    _refused("-cl --cache-list --completion-bash", "there is no such list here", 0),
    _refused("--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default "
             "--fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default "
             "--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
             "--vision-gemma-12b-default", _PRESET, 0),
)  # fmt: skip
