"""Asks a model one question per line of standard input, with vLLM's LLM class in an engine that a control plane
governs:

    echo "How many primes are there below 50?" | MERIDIAN_CONTROL=host:50051 \\
        python llm.py --model Qwen/Qwen3-8B --reasoning-parser qwen3

The script contains no code of Meridian. If the package `meridian-llm` is installed, vLLM loads its plugin, and the
variable MERIDIAN_CONTROL says where the control plane is; without the variable vLLM runs as stock. If VLLM_PLUGINS is
set, it must list `meridian`, because vLLM then loads only the plugins that it lists.
"""

import sys

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    options = EngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__)).parse_args()
    llm = LLM(**vars(options))
    params = SamplingParams(temperature=0, max_tokens=4096)
    for question in sys.stdin:
        (output,) = llm.chat([{"role": "user", "content": question.strip()}], params, use_tqdm=False)
        print(output.outputs[0].text, flush=True)


# The guard is needed because vLLM starts processes that import this file again.
if __name__ == "__main__":
    main()
