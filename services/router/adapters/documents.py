"""Documents in the shapes that clients of this field send, normalised to one."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from services.router.adapters.fields import read, read_object
from services.router.adapters.schema import (
    AnthropicSource,
    CohereData,
    CohereDocument,
    DocumentFields,
    DocumentPart,
)
from services.router.domain.request import Document, PromptError

__all__ = ["LocatedDocument", "read_document", "read_document_part", "refuse_conflicts"]


@dataclass(frozen=True, slots=True)
class LocatedDocument:
    """A document and the path of its field in the client's JSON."""

    path: str
    document: Document


def read_document(value: Any, path: str) -> Document:  # noqa: ANN401 # any JSON value
    """An entry of `documents`: a string, `{title?, text, id?}`, or Cohere's `{id?, data}`.

    Raises:
        PromptError: it is none of these, or its text is empty.
    """
    if isinstance(value, str):
        return _document(read(DocumentFields, {"text": value}, path), path, path)
    if not isinstance(value, dict):
        raise PromptError(f"{path} must be a string or an object", param=path, code="invalid_type")
    if "data" in value and "text" not in value:
        return _read_cohere(read(CohereDocument, value, path), path)
    if "id" in value and "text" not in value:
        raise PromptError(
            f"{path}.text: texts are not kept, also not of registered documents: send it with every request",
            param=f"{path}.text",
            code="missing_required_parameter",
        )
    return _document(read(DocumentFields, value, path), path, f"{path}.text")


def read_document_part(value: Any, path: str) -> Document:  # noqa: ANN401 # any JSON value
    """A content part of type `document`: plain, nested in `document`, or with Anthropic's `source`.

    Raises:
        PromptError: it is none of these, or its text is empty.
    """
    part = read(DocumentPart, value, path)
    document = replace(_read_part(part, value, path), is_breakpoint=part.is_breakpoint)
    return replace(document, text=f"{part.context}\n{document.text}") if part.context else document


def _read_part(part: DocumentPart, value: Any, path: str) -> Document:  # noqa: ANN401 # any JSON value
    outer = {"title": part.title, "id": part.id}
    if part.document is not None:
        inner = part.document
        inner = {"text": inner} if isinstance(inner, str) else dict(read_object(inner, f"{path}.document"))
        named = {name: given for name, given in outer.items() if given is not None}
        return read_document(named | inner, f"{path}.document")
    if part.source is not None:
        source = read(AnthropicSource, part.source, f"{path}.source")
        return _document(DocumentFields(text=source.data, **outer), path, f"{path}.source.data")
    return _document(read(DocumentFields, value, path), path, f"{path}.text")


def refuse_conflicts(documents: Iterable[LocatedDocument]) -> None:
    """One id names one text within a request.

    Raises:
        PromptError: an id comes twice with different text or title.
    """
    known: dict[str, Document] = {}
    for each in documents:
        document = each.document
        if document.document_id and known.setdefault(document.document_id, document) != document:
            raise PromptError(
                f"{each.path}.id: the id {document.document_id!r} already names another document of this request",
                param=f"{each.path}.id",
            )


def _read_cohere(outer: CohereDocument, path: str) -> Document:
    if isinstance(outer.data, str):
        fields = DocumentFields(text=outer.data, id=outer.id)
        return _document(fields, path, f"{path}.data")
    data = read(CohereData, outer.data, f"{path}.data")
    lines = [
        _line(name, value, f"{path}.data") for name, value in (data.model_extra or {}).items() if value is not None
    ]
    given = data.text if data.text is not None else data.snippet
    text = "\n".join([*lines, *([] if given is None else [given])])
    if given == "" or not text:
        raise PromptError(
            f"{path}.data.text: Field required", param=f"{path}.data.text", code="missing_required_parameter"
        )
    return _document(DocumentFields(text=text, title=data.title, id=outer.id), path, f"{path}.data.text")


def _line(name: str, value: object, path: str) -> str:
    """A field of a document beside its text, as the model reads it."""
    if not isinstance(value, str | int | float):
        raise PromptError(f"{path}.{name} must be a string, a number or a truth value", param=f"{path}.{name}")
    return f"{name}: {value if isinstance(value, str) else json.dumps(value)}"


def _document(fields: DocumentFields, path: str, text_path: str) -> Document:
    if not fields.text:
        raise PromptError(f"{text_path} must not be empty", param=text_path)
    if fields.id is not None and not 0 < len(fields.id) <= 512:
        raise PromptError(f"{path}.id must have 1 to 512 characters", param=f"{path}.id")
    return Document(fields.text, fields.title or "", fields.id or "")
