"""The types that settings are made of, and their base."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    text = isinstance(value, str) and not value.strip().lstrip("+-").isdigit()
    if text or isinstance(value, bool | float):
        raise ValueError("a whole number, written without a decimal point")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Fraction = Annotated[Number, Field(gt=0, lt=1)]
Positive = Annotated[Whole, Field(ge=1)]
Rate = Annotated[Number, Field(gt=0)]


def _threads(value: Any) -> Any:
    digits = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if value != "auto" and not (digits.isdigit() and int(digits) >= 1):
        raise ValueError("a whole number of at least 1, or auto")
    return value


Threads = Annotated[int | Literal["auto"], BeforeValidator(_threads)]
Recovery = Annotated[Whole, Field(ge=0)]
Weight = Annotated[Number, Field(ge=0)]
Globs = Annotated[tuple[str, ...], Field(min_length=1)]


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Step(Settings):
    """One artifact of the tree, made from the artifact named `from`."""

    parent: str = Field(alias="from")
