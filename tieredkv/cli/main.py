"""The command line's entry: the exit code of whatever was asked for.

Bad input is one line on stderr and exit code 2. Knows no command but that a server is better off in another process (see
`runtime.maybe_reexec`): that is found out here, before typer, rich and pydantic are imported for nothing.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tieredkv.errors import AdminError, ConfigError, StorageError, UnsupportedModelError
from tieredkv.runtime import maybe_reexec

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    command = given[0] if given else None
    if argv is None and command == "serve" and "--help" not in given:
        maybe_reexec(sys.argv)
    import typer

    from tieredkv.cli.app import SERVE, make_app

    # Typer brings its own copy of click or uses the installed one, depending on its version: take the class from typer.
    usage_error: Any = typer.BadParameter.__base__
    try:
        code = make_app(command)(args=argv, prog_name="tieredkv", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except usage_error as error:
        return _complain(error.format_message())
    except (AdminError, ConfigError, StorageError, UnsupportedModelError) as error:
        return _complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except OSError as error:
        # A server that ends of one has more to tell than a line.
        if command == SERVE:
            raise
        _drop_output()
        return _complain(str(error))
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    """Let go of output that cannot be written, or the interpreter fails on it once more when it ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> int:
    print(f"tieredkv: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_BAD_INPUT
