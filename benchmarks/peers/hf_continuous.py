"""transformers' continuous batching with one request at a time, with or without its CUDA graphs.

Measured as its user sees it: from the request to the first token, then from token to token. Its
scheduling, its queues and the greedy choice of a token are in these figures and not in the others.
"""

import dataclasses
import importlib.util
import random
import time
from typing import Any

import common
import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

BLOCK_LEN = 256  # its default, under either of the two names that versions give it
TIMEOUT_S = 300.0
FLASH_PACKAGES = ("flash_attn", "flash_attn_interface")


def config_for(args: Any, module: Any) -> ContinuousBatchingConfig:
    """Memory for the one request that is measured; sets the attention that it can use.

    It pads what it reads to its memory where it uses graphs, so a small one is in its favour.
    """
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    # What is not installed would be looked for on the network.
    has_flash = any(importlib.util.find_spec(name) for name in FLASH_PACKAGES)
    names_pages = "auto_switch_to_flash" in fields
    module.set_attn_implementation("sdpa" if has_flash or names_pages else "paged|sdpa")
    more: dict[str, Any] = {"auto_switch_to_flash": has_flash} if names_pages else {}
    return ContinuousBatchingConfig(
        num_blocks=-(-(args.prompt_tokens + args.new_tokens + 1) // BLOCK_LEN) + 1,
        max_batch_tokens=max(args.prompt_tokens, BLOCK_LEN),
        max_requests_per_batch=1,
        allow_block_sharing=False,  # no prompt is in memory already
        use_cuda_graph=args.graphs,
        **more,
    )


def one_request(manager: Any, token_ids: list[int], num_new: int) -> tuple[float, float]:
    """Tokens a second of one request's prompt, and of its decode steps."""
    request_id = manager.add_request(
        token_ids, max_new_tokens=num_new + 1, record_timestamps=True, eos_token_id=-1
    )
    end = time.monotonic() + TIMEOUT_S
    result = None
    while result is None and manager.is_running() and time.monotonic() < end:
        result = manager.get_result(request_id, timeout=1.0)
    if result is None:
        failure = getattr(manager.background_thread_status, "fatal_error", None)
        raise RuntimeError(f"the request was not answered: {failure or 'no error is known'}")
    if result.error is not None:
        raise RuntimeError(f"the request failed: {result.error}")
    stamps = result.timestamps
    if len(stamps) != num_new + 1:
        raise RuntimeError(f"{len(stamps)} tokens came where {num_new + 1} were asked for")
    prompt_seconds = stamps[0] - result.created_time
    return len(token_ids) / prompt_seconds, num_new / (stamps[-1] - stamps[0])


def measure(args: Any) -> dict[str, Any]:
    driver, model = common.load(args)
    if args.graphs and driver.device == "cpu":
        raise RuntimeError("its CUDA graphs need a GPU")
    rng, module = random.Random(17), model.module
    config = config_for(args, module)
    start = time.perf_counter()
    pairs = []
    with module.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=config,
    ) as manager:
        attention = module.config._attn_implementation  # as long as the manager runs
        for number in range(common.NUM_WARM_UP + args.repetitions):
            if number == common.NUM_WARM_UP:
                setup = time.perf_counter() - start
            token_ids = common.tokens(rng, model.vocab_size, args.prompt_tokens)
            pairs.append(one_request(manager, token_ids, args.new_tokens))
        resolved = manager.continuous_batching_config
    prompts, decodes = zip(*pairs[common.NUM_WARM_UP :], strict=True)
    return common.rates(prompts, decodes) | {
        "setup_seconds": setup,
        "dtype": common.dtype_of(model),
        "peer_version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "note": f"attention {attention}, CUDA graphs (prompt, decode) {resolved.use_cuda_graph}, "
        f"async batching {resolved.use_async_batching}; scheduling and greedy sampling included",
    }


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("--graphs", action="store_true")
    common.run(measure, parser.parse_args())
