"""What every block of the YAML is made of: the strict frozen section and the kinds of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator

KIB, MIB = 1024, 1024**2


def _not_a_flag(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Count = Annotated[int, BeforeValidator(_not_a_flag), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_not_a_flag), Field(ge=0)]
Number = Annotated[float, BeforeValidator(_not_a_flag), Field(allow_inf_nan=False)]
Bytes = Annotated[ByteSize, BeforeValidator(_not_a_flag), Field(ge=1 * KIB)]
Port = Annotated[int, BeforeValidator(_not_a_flag), Field(ge=1, le=65535)]
TokenId = Annotated[int, BeforeValidator(_not_a_flag), Field(ge=0)]


class Section(BaseModel):
    """A block of the YAML: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_empty(cls, value: object) -> object:
        return {} if value is None else value
