"""`RequestLimits`: what an engine can never run. No torch, no state; any thread or process may ask.

Called by the scheduler for every request, and by `AsyncEngine` before a request leaves for the
engine, so that a refusal comes at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from cedar.config.engine_config import EngineConfig
from cedar.engine.request import Request
from cedar.errors import DoesNotFitError, RequestError


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one engine.

    Attributes:
        config: lengths.   num_blocks: of the pool.   vocab_size: ids are below it.
        positions: the model's, bound of `max_model_len`.
    """

    config: EngineConfig
    num_blocks: int
    vocab_size: int
    positions: int

    def check(self, request: Request) -> None:
        """Refuse, before any work, what can never run.

        Raises:
            RequestError: the prompt is empty or an id is out of range.
            DoesNotFitError: prompt and output exceed `max_model_len` or the whole pool.
        """
        prompt, params = request.prompt_ids, request.params
        if not prompt:
            raise RequestError("the prompt has no tokens; pass at least one", param="prompt")
        for ids in (prompt, params.logit_bias, params.stop_token_ids):
            # min and max first: a prompt has many ids, and all but a bad one are good.
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                token = next(token for token in ids if not 0 <= token < self.vocab_size)
                raise RequestError(
                    f"token id {token} is not in the vocabulary; allowed 0..{self.vocab_size - 1}",
                    param="prompt",
                )
        total, limit = len(prompt) + params.max_tokens, self.config.max_model_len
        if total > limit:
            room = limit - len(prompt)
            advice = f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"
            of_model = ", which is the model's max_position_embeddings"
            is_final = limit == self.positions
            raise DoesNotFitError(
                f"max_tokens={params.max_tokens} does not fit: prompt {len(prompt)} + "
                f"{params.max_tokens} > max_model_len {limit}{of_model if is_final else ''}; "
                f"{advice}{'' if is_final else ' or raise --max-model-len'}"
            )
        need = -(-total // self.config.block_size)
        if need > self.num_blocks:
            raise DoesNotFitError(
                f"the request needs {need} blocks of {self.config.block_size} tokens, the pool has "
                f"{self.num_blocks}; raise num_blocks or lower max_tokens"
            )
