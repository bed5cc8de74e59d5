"""An SGLang that answers prompts. Runs in SGLang's environment.

    python tests/sglang/answering.py OPTIONS REQUESTS ANSWERS

OPTIONS are those of `sglang.Engine`, as JSON; REQUESTS and ANSWERS descriptors with a line of JSON for each. A request
is the name of a method of `Answering` and its arguments.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import sglang


class Answering:
    """What a test asks for."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._engine = sglang.Engine(**options)

    def complete(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        """The likeliest outputs of prompts, asked at the same time."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = self._engine.generate(input_ids=prompts, return_logprob=True, sampling_params=sampling)
        return [
            {
                "tokens": answer["output_ids"],
                "logprobs": [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]],
                "found": (answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0),
                "cached": answer["meta_info"]["cached_tokens"],
            }
            for answer in answers
        ]

    def forget(self) -> bool:
        """Drop what SGLang has in memory of its own."""
        return bool(self._engine.flush_cache().success)

    def load_weights(self, model: str) -> bool:
        """Replace the weights in memory."""
        return bool(self._engine.update_weights_from_disk(model)[0])


def main() -> None:
    """Answer requests until no more can come."""
    _, options, requests, answers = sys.argv
    answering = Answering(json.loads(options))
    with os.fdopen(int(requests)) as asked, os.fdopen(int(answers), "w") as told:
        told.write("[]\n")
        told.flush()
        for line in asked:
            name, *arguments = json.loads(line)
            told.write(json.dumps(getattr(answering, name)(*arguments)) + "\n")
            told.flush()


if __name__ == "__main__":
    main()
