"""Does the same as `llm.py` in this folder with vLLM's AsyncLLM class, which streams the answers:

    echo "How many primes are there below 50?" | MERIDIAN_CONTROL=host:50051 \\
        python async_llm.py --model Qwen/Qwen3-8B --reasoning-parser qwen3

A request can carry the values that the policy matches: `extra_args` holds the entries that an HTTP client puts into
`vllm_xargs` (meridian_tenant, meridian_slo_class, meridian_effort, meridian_min_think_tokens,
meridian_max_think_tokens).
"""

import asyncio
import sys
from argparse import Namespace

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM


async def answer(options: Namespace) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(options))
    own = {"meridian_tenant": "examples"}
    try:
        number = 0
        while question := await asyncio.to_thread(sys.stdin.readline):
            number += 1
            turns = [{"role": "user", "content": question.strip()}]
            prompt = engine.get_tokenizer().apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            params = SamplingParams(temperature=0, max_tokens=4096, output_kind=RequestOutputKind.DELTA, extra_args=own)
            async for output in engine.generate(prompt, params, request_id=f"question-{number}"):
                print(output.outputs[0].text, end="", flush=True)
            print(flush=True)
    finally:
        engine.shutdown()


# The guard is needed because vLLM starts processes that import this file again.
if __name__ == "__main__":
    asyncio.run(answer(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__)).parse_args()))
