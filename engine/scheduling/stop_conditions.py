"""When a choice ends by its tokens alone. Invariant: only a length ends it before `min_tokens` are sampled.

Stop strings are matched on text elsewhere; the output processor then ends the choice.
"""

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.messages import FinishReason
from loraplex.engine.token_mask import TokenMask


def ends_with_unknown(sequence: Sequence, max_model_len: int) -> bool:
    """Whether the token being sampled is the sequence's last, whatever its value."""
    known = len(sequence.token_ids)
    most = sequence.num_prompt_tokens + sequence.request.sampling.max_tokens
    return sequence.num_unknown > 0 and known + 1 >= min(most, max_model_len)


def received_reason(
    sequence: Sequence, eos_token_ids: frozenset[int], max_model_len: int
) -> FinishReason | None:
    """Return why a sequence that another engine began ends with what that one sent, or None. Its mask is behind these tokens."""
    if not sequence.num_output_tokens:
        return None
    mask = sequence.token_mask
    if mask is None:
        return finish_reason(sequence, eos_token_ids, max_model_len)
    reason = masked_reason(sequence, mask, eos_token_ids, max_model_len)
    return "stop" if reason == "length" and mask.closes and mask.is_complete() else reason


def masked_reason(
    sequence: Sequence, mask: TokenMask, eos_token_ids: frozenset[int], max_model_len: int
) -> FinishReason | None:
    """Return why a sequence with a mask ends with its newest token, or None. The mask is behind it."""
    if sequence.token_ids[-1] in eos_token_ids:
        return "stop"
    reason = finish_reason(sequence, eos_token_ids, max_model_len)
    return "stop" if reason != "stop" and mask.is_final() else reason


def finish_reason(
    sequence: Sequence, eos_token_ids: frozenset[int], max_model_len: int
) -> FinishReason | None:
    """Return why a sequence ends with its newest token, or None. Sets `stopped_by` for one of `stop_token_ids`."""
    sampling = sequence.request.sampling
    token_id = sequence.token_ids[-1]
    num_output = sequence.num_output_tokens
    if num_output >= sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return "stop"
        if token_id in sampling.stop_token_ids:
            sequence.stopped_by = token_id
            return "stop"
    if num_output >= sampling.max_tokens or len(sequence.token_ids) >= max_model_len:
        return "length"
    return None
