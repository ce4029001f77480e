"""Files and batches as OpenAI's API has them: what is answered, described by OpenAPI, and kept in the store."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, StringConstraints

from headway.server.api.fields import Body, said

T = TypeVar("T", bound=BaseModel)
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank")
# A file is kept for 30 days unless its maker says less, and a batch for as long after its end.
HOUR_S, KEPT_S = 3600, 30 * 24 * 3600


class FileObject(BaseModel):
    """A file. `expires_at` is None for one of a server that kept files until they were deleted."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class Deleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchError(BaseModel):
    """Why a batch failed before it began. `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(BaseModel):
    cached_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class BatchUsage(BaseModel):
    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0


class Batch(BaseModel):
    """A batch. Times are seconds since 1970; those of what has not happened are None."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None

    @property
    def is_open(self) -> bool:
        """There is still something to be done on it."""
        return self.status in OPEN


class Page(BaseModel, Generic[T]):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, found: list[Any], has_more: bool) -> Page[T]:
        ids = [each.id for each in found]
        return cls(data=found, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=has_more)


class ExpiresAfter(Body):
    """Seconds after a file was made that it is deleted."""

    anchor: Literal["created_at"] = said("From when seconds count.", ...)
    seconds: int = said("Seconds after which the file is deleted, from an hour to 30 days.", ..., ge=HOUR_S, le=KEPT_S)


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: str = said("The file with the requests, one in a line.", ...)
    endpoint: Literal[ENDPOINTS] = said("The route of every request.", ...)  # type: ignore[valid-type]
    completion_window: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,5}[smhd]$")] = said(
        "The time after which what is left expires: a number and s, m, h or d.", ...
    )
    metadata: (
        Annotated[
            dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = said("Up to 16 keys of up to 64 characters, with texts of up to 512, which the batch repeats.")
    output_expires_after: ExpiresAfter | None = said("How long the files of answers are kept; default for ever.")

    @property
    def window_s(self) -> int:
        return (
            int(self.completion_window[:-1])
            * {"s": 1, "m": 60, "h": HOUR_S, "d": 24 * HOUR_S}[self.completion_window[-1]]
        )
