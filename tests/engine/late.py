"""Install the agent's part in API servers before vLLM's request classes are imported: `python -m tests.engine.late`.

A program may build an engine, which loads the plugin, and import vLLM's API server later. The program fails if the
agent imports the classes itself, or if they do not copy efforts once they are imported. The classes' modules are
imported anew, because a process that is forked from a preloaded one has imported them already.
"""

from __future__ import annotations

import sys

from meridian_agent.core.request_info import CHAT
from meridian_agent.vllm_adapter import required_api


def main() -> None:
    owners = [owner.partition(":") for owner in required_api.API_SERVER]
    for module, *_ in owners:
        sys.modules.pop(module, None)
    from meridian_agent.vllm_adapter import client_effort

    finders = list(sys.meta_path)
    client_effort.install()
    assert not [module for module, *_ in owners if module in sys.modules]

    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    chat = ChatCompletionRequest(messages=[], reasoning_effort="low")
    assert chat.to_sampling_params(9, {}).extra_args == {"meridian_effort": "low", CHAT: 1}
    response = ResponsesRequest(input="", reasoning={"effort": "high"})
    assert response.to_sampling_params(9).extra_args == {"meridian_effort": "high", CHAT: 1}
    for module, _, name in owners:
        assert getattr(getattr(sys.modules[module], name), client_effort.METHOD).__wrapped__
        assert client_effort.METHOD in vars(getattr(sys.modules[module], name))
    assert [finder for finder in sys.meta_path if finder not in finders]


if __name__ == "__main__":
    main()
