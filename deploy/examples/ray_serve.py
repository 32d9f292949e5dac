"""Does the same as `llm.py` in this folder with several engines, each of which is a replica of a Ray Serve deployment:

    echo "How many primes are there below 50?" | MERIDIAN_CONTROL=host:50051 \\
        python ray_serve.py --replicas 2 --model Qwen/Qwen3-8B --reasoning-parser qwen3

Each replica is an engine of its own for the control plane. Replicas on one machine have one host name, so each takes
its replica's id as the engine's name. On a cluster Ray does not pass this process's environment on to other machines,
so the deployment names the variable that the agent needs.
"""

import os
import sys
import uuid
from argparse import Namespace

from ray import serve
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM


class Engine:
    def __init__(self, options: Namespace) -> None:
        os.environ["MERIDIAN_ENGINE_ID"] = f"ray-{serve.get_replica_context().replica_id.unique_id}"
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(options))

    async def __call__(self, question: str) -> str:
        turns = [{"role": "user", "content": question}]
        prompt = self._engine.get_tokenizer().apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        params = SamplingParams(temperature=0, max_tokens=4096, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = [output async for output in self._engine.generate(prompt, params, request_id=uuid.uuid4().hex)]
        return str(outputs[-1].outputs[0].text)


def main() -> None:
    parser = FlexibleArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=1, help="GPUs of one replica")
    options = AsyncEngineArgs.add_cli_args(parser).parse_args()
    env = {"MERIDIAN_CONTROL": os.environ["MERIDIAN_CONTROL"]}
    actor = {"num_gpus": options.gpus, "runtime_env": {"env_vars": env}}
    serve.start(proxy_location="Disabled")
    engines = serve.run(serve.deployment(num_replicas=options.replicas, ray_actor_options=actor)(Engine).bind(options))
    for question in sys.stdin:
        print(engines.remote(question.strip()).result(), flush=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
