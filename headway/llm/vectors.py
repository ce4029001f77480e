"""Embeddings and scores: requests that nothing is generated for, and what their callers get."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.engine.messages import AddRequest, SequenceOutput
from headway.llm.requests import Front, PromptType
from headway.outputs.choices import TokenizedPrompt
from headway.outputs.pooling import cosine, floats, judged_messages, relevance
from headway.policy.step.sampling_params import SamplingParams

_NOTHING = SamplingParams(temperature=0.0, max_tokens=1)  # is sampled


@dataclass(slots=True)
class Embedding:
    """A prompt's vector."""

    embedding: list[float] = field(default_factory=list)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding; `timings_ns` is its ledger, in nanoseconds."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Embedding = field(default_factory=Embedding)
    num_cached_tokens: int = 0
    finished: bool = False
    timings_ns: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Scored:
    """How relevant a text is."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score.

    Args:
        prompt_token_ids: those that the model was given: of both texts, one after the other where each was embedded.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: Scored
    finished: bool = True


class VectorCollector:
    """Takes the vector of one request."""

    def __init__(self, request: AddRequest) -> None:
        self.output = EmbeddingRequestOutput(request.request_id, request.prompt_token_ids)
        self.request = request

    def take(self, output: SequenceOutput) -> bool:
        """Take the vector. Returns False, because there is nothing for the engine to stop."""
        if output.error is not None:
            raise ValueError(output.error)
        if output.timings is not None:
            self.output.timings_ns = dict(output.timings.phases_ns)
        if output.vector is not None:
            self.output.outputs.embedding = floats(output.vector)
            self.output.num_cached_tokens, self.output.finished = output.cached_tokens, True
        return False


def embedding(front: Front, prompt: PromptType, dimensions: int | None, service_class: str) -> VectorCollector:
    """Make the collector of a request for an embedding."""
    request = front.request(front.pooler.ended(front.prompted(prompt)), _NOTHING, service_class)
    request.pooling = front.pooler.embedding(dimensions)
    return VectorCollector(request)


def judgement(front: Front, query: str, document: str, instruction: str | None, service_class: str) -> VectorCollector:
    """Make the collector of a request in which the model judges a pair."""
    assert front.chat_template is not None and front.tokenizer is not None
    messages, variables = judged_messages(front.chat_template, query, document, instruction)
    text = front.chat_template.render(messages, variables=variables)
    prompted = TokenizedPrompt(front.tokenizer.encode(text, add_special_tokens=False), text)
    request = front.request(prompted, _NOTHING, service_class)
    request.pooling = front.pooler.judgement
    return VectorCollector(request)


def judged(collector: VectorCollector) -> ScoringRequestOutput:
    """The score of a pair that the model has judged."""
    return _scored([collector.output], relevance(collector.output.outputs.embedding))


def compared(one: EmbeddingRequestOutput, other: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """The score of a pair of embeddings."""
    return _scored([one, other], cosine(one.outputs.embedding, other.outputs.embedding))


def _scored(embedded: list[EmbeddingRequestOutput], score: float) -> ScoringRequestOutput:
    token_ids = [token for each in embedded for token in each.prompt_token_ids]
    return ScoringRequestOutput(embedded[-1].request_id, token_ids, Scored(score))
