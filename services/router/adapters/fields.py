"""Reading JSON with errors that name the field."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from services.router.domain.request import PromptError

__all__ = ["Closed", "Strict", "read", "read_object"]

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """JSON types as they are; unknown fields are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Closed(BaseModel):
    """JSON types as they are; unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def read(model: type[Model], value: Any, path: str) -> Model:  # noqa: ANN401 # any JSON value
    """This JSON value as this model.

    Raises:
        PromptError: it does not fit; `param` is the path of the first field that is wrong.
    """
    read_object(value, path)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        param = _join(path, fault["loc"])
        code = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}.get(fault["type"])
        raise PromptError(f"{param}: {fault['msg']}", param=param, code=code or "invalid_value") from error


def read_object(value: Any, path: str) -> Mapping[str, Any]:  # noqa: ANN401 # any JSON value
    """This JSON value as an object.

    Raises:
        PromptError: it is something else.
    """
    if not isinstance(value, dict):
        raise PromptError(f"{path or 'the body'} must be an object", param=path or "body")
    return value


def _join(path: str, location: Iterable[int | str]) -> str:
    for step in location:
        name = f"[{step}]" if isinstance(step, int) else f".{step}"
        path = f"{path}{name}" if path else str(step)
    return path
