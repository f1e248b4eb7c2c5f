"""Flags made from settings: one per field of `tieredkv.config`, so names, defaults and descriptions are written once.

Values stay text: `Config.load` converts and checks them. Knows typer; no command.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tieredkv.config import Config, format_size

PANELS = {
    "model": "Model",
    "cache": "KV block pool",
    "tiers": "Tiers below the device",
    "scheduler": "Scheduling",
    "server": "HTTP server",
    "admin": "Admin API",
}


def settings_fields() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """All settings as (section, field), in the order of the config module."""
    for section in dataclasses.fields(Config):
        factory = section.default_factory
        if not isinstance(factory, type):
            raise TypeError(f"Config.{section.name} has no dataclass behind it")
        for field in dataclasses.fields(factory):
            yield section.name, field


def option(section: str, field: dataclasses.Field[Any]) -> inspect.Parameter:
    """The flag of one setting."""
    flag = "--" + field.name.replace("_", "-")
    notes = [str(field.metadata["doc"])]
    if "choices" in field.metadata:
        notes.append(f"One of: {', '.join(map(str, field.metadata['choices']))}.")
    kind: Any = str | None
    default: Any = field.default
    if isinstance(default, bool):
        kind = bool | None
        notes.append(f"Default: {'on' if default else 'off'}.")
        flag = f"{flag}/--no-{flag[2:]}"
    elif isinstance(default, tuple):
        kind = list[str] | None
        notes.append("May be repeated.")
    elif default is not None:
        notes.append(f"Default: {format_size(default) if field.metadata.get('size') else default}.")
    made = typer.Option(
        flag, help=" ".join(notes), show_default=False, rich_help_panel=PANELS[section], metavar=_metavar(field)
    )
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, made])


def _metavar(field: dataclasses.Field[Any]) -> str | None:
    if isinstance(field.default, bool):
        return None
    if field.metadata.get("size"):
        return "SIZE"
    return "NUMBER" if isinstance(field.default, int | float) or "low" in field.metadata else "TEXT"


def config_option() -> inspect.Parameter:
    """`--config FILE`."""
    made = typer.Option(
        "--config", metavar="FILE", envvar="TIEREDKV_CONFIG", help="TOML file with settings; see configs/default.toml."
    )
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, made]
    )


def given_settings(given: dict[str, Any]) -> dict[str, Any]:
    """What was said of the settings among a command's arguments."""
    names = {field.name for _, field in settings_fields()}
    return {key: value for key, value in given.items() if key in names and value not in (None, [])}


def with_parameters(command: Callable[..., int], parameters: Collection[inspect.Parameter]) -> Callable[..., int]:
    """A function that typer sees with these parameters, and that passes them all on to `command`."""

    def run(**given: Any) -> int:
        return command(**given)

    run.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
