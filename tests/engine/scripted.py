"""Runs an engine that says what it is told to, and prints what became of it, as JSON.

`python -m tests.engine.scripted FOLDER CONTROL_TARGET BUILD < REQUESTS`: FOLDER holds a model without weights, BUILD is
one of `tests.engine.matrix.builds`, REQUESTS are, per reasoning parser, prompts and scripts in token ids and caps. A
script is by place: where the agent writes a token, the script's for that place is left unsaid.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import LogitsProcessor

from tests.engine import ENGINE_ARGS
from tests.engine.matrix.builds import BUILDS, prepare
from tests.engine.policies import NEUTRAL
from tests.engine.recording import records, rows
from tests.processes import ENGINE_ENV, Control

if TYPE_CHECKING:
    import torch

SURE = 1e6


class Script(LogitsProcessor):  # type: ignore[misc]
    """Makes the next token of each request's script all but certain. vLLM applies it after the token masks, whose
    minus infinity it leaves: what is forced wins."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._requests: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        from vllm.v1.sample.logits_processor.builtin import process_dict_updates

        process_dict_updates(
            self._requests, batch_update, lambda params, _, said: ((params.extra_args or {}).get("script", []), said)
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (script, said) in self._requests.items():
            if len(said) < len(script):
                logits[row, script[len(said)]] += SURE
        return logits


def main() -> None:
    folder, control, build = sys.argv[1], Control.existing(sys.argv[2]), BUILDS[sys.argv[3]]
    os.environ.update(ENGINE_ENV)
    os.environ.update(MERIDIAN_CONTROL=control.target, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    prepare(build)
    import vllm

    llm = vllm.LLM(
        **{**ENGINE_ARGS, "model": folder, "served_model_name": "marked", "reasoning_parser": "openai_gptoss"},
        load_format="dummy",
        logits_processors=["tests.engine.scripted:Script"],
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    def say(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        params = []
        for one in requests:
            cap = {} if one["cap"] is None else {"meridian_max_think_tokens": one["cap"]}
            extra = {"script": one["script"], **cap}
            length = len(one["script"])
            params.append(vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, extra_args=extra))
        with records(scheduler._agent) as seen:
            outputs = llm.generate([{"prompt_token_ids": one["prompt"]} for one in requests], params, use_tqdm=False)
        found = zip(outputs, rows(seen).values(), strict=True)
        return [{"tokens": list(o.outputs[0].token_ids), "rows": [r[:2] for r in told]} for o, told in found]

    said = {}
    for parser, requests in json.load(sys.stdin).items():
        control.apply({**NEUTRAL, "model": {"marked": {"reasoning_parser": parser}}})
        said[parser] = say(requests)
        said[f"{parser} writes"] = scheduler._agent.tracker.markers.ending
    found = {**said, "is_async": scheduler._agent.is_async, "fault": control.engine().fault}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
