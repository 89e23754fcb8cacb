"""Encodes the input and the questions of a decision, once for each way in which its adapters read them."""

import asyncio
from typing import NamedTuple
from uuid import UUID

from loraplex.platform.inference.decisions.wording import question_text
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.prompt_encoding import PromptEncoder
from loraplex.platform.parameters.chat_messages import ChatMessage
from loraplex.platform.parameters.decision_request import DecisionRequest
from loraplex.platform.parameters.request_models import ChatRequest


class EncodedQuestions(NamedTuple):
    """Token ids of the input, and of each question of the decision behind it."""

    input: list[int]
    questions: list[list[int]]


class QuestionEncoding:
    """One decision. `messages`: those of its input. Where they end in a user's, a question ends that message."""

    def __init__(
        self, encoder: PromptEncoder, values: DecisionRequest, messages: list[ChatMessage], tenant_id: UUID
    ) -> None:
        self._encoder = encoder
        self._questions = values.questions
        self._tenant_id = tenant_id
        self._known: dict[tuple[object, ...], asyncio.Task[EncodedQuestions]] = {}
        is_open = messages[-1].role == "user"
        self._between = "\n\n" if is_open else ""
        last = [] if is_open else [ChatMessage("user", "")]
        chat = {"model": values.model, "messages": [*messages, *last], "reasoning_effort": "none"}
        self._chat = ChatRequest.model_construct(set(chat), **chat)

    async def for_model(self, model: ResolvedModel) -> EncodedQuestions:
        """Return what a model reads. Raises as `PromptEncoder.encode_behind`."""
        style = (model.tool_style, str(model.reasoning_style), model.reads_labels)
        if style not in self._known:
            self._known[style] = encoding = asyncio.create_task(self._encode(model))
            # A client that left waits for none.
            encoding.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(self._known[style])

    async def _encode(self, model: ResolvedModel) -> EncodedQuestions:
        texts = [self._between + question_text(each, labels=model.reads_labels) for each in self._questions]
        return EncodedQuestions(*await self._encoder.encode_behind(self._chat, texts, model, self._tenant_id))
