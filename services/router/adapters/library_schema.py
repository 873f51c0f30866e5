"""The JSON of documents that are registered, invalidated and pinned."""

from typing import Annotated, Any, Literal

from pydantic import Field

from services.router.adapters.fields import Closed
from services.router.adapters.shapes import TEXT_PARTS

__all__ = ["DocumentBody", "InvalidateBody", "PinBody"]

Tag = Annotated[str, Field(min_length=1, max_length=256)]


class DocumentBody(Closed):
    """`POST /v1/documents`: a text, or text parts that are joined."""

    id: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="Its name; made from the text where none is given."
    )
    title: Annotated[str, Field(max_length=4096)] | None = Field(default=None, description="A line ahead of the text.")
    text: str | None = Field(default=None, description="The text; either this or `parts`.")
    parts: Annotated[list[Any], Field(min_length=1), TEXT_PARTS] | None = Field(
        default=None, description="Texts that are joined."
    )
    tags: Annotated[list[Tag], Field(max_length=32)] = Field(default=[], description="Names to invalidate it by.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="The salt of the requests that are to use it."
    )
    namespace: Literal["public"] | None = Field(default=None, description="For every tenant; administrators only.")


class InvalidateBody(Closed):
    """`POST /v1/invalidate`: exactly one of tag, tenant and model."""

    tag: Tag | None = Field(default=None, description="All documents with this tag.")
    tenant: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Everything of a tenant."
    )
    model: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="Everything of a model; administrators only."
    )
    namespace: Literal["public"] | None = Field(
        default=None, description="In what serves every tenant; administrators only."
    )


class PinBody(Closed):
    """`POST` and `DELETE /v1/pins`: a document, of the caller's tenant unless one is named, or a whole tenant."""

    document: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="The document's id; without it, the whole tenant."
    )
    tenant: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Whose; the caller's by default, where a document is named."
    )
