"""The edges of the command line: errors, interrupts, pipes, narrow encodings; reading, tables and JSON."""

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from eexport.runtime.errors import EexportError, RequestError

Progress = Callable[[str, int, int], None]


def guarded(command: Callable[[], object]) -> int:
    """Run ``command``; its int result, or 0, is the exit code.

    Errors that are the user's become one line on stderr and code 2. Ctrl-C is 130 and SIGTERM 143, both after
    the clean-up of whatever was running. A reader that closed the pipe ends it without a word.
    """
    _let_text_through()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        result = command()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BaseException as error:
        code = _exit_of(error)
        return _explain(error) if code is None else code
    finally:
        signal.signal(signal.SIGTERM, before)


def note(text: str) -> None:
    """A line for the person at the terminal, beside the output."""
    click.echo(text, err=True)


def stream(text: str) -> None:
    """Text that is to be seen at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def read_input() -> str:
    """All of standard input. Raises RequestError where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"prompt: standard input is not UTF-8 (byte {error.start})", "prompt") from None


def ask() -> str:
    """The next line from the person or the pipe. Raises EOFError at its end."""
    if not sys.stdin.isatty():
        if line := sys.stdin.buffer.readline():
            return line.decode("utf-8", errors="replace")
        raise EOFError
    while True:
        try:
            return input(">>> ")
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /exit leaves)")
        except EOFError:
            note("")
            raise


def print_json(value: Any) -> None:
    """One JSON object on one line; numbers that JSON lacks (NaN, infinity) become null."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    click.echo(json.dumps(_finite(value), ensure_ascii=not is_unicode, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """A table; the first ``left`` columns are flush left, the others, being numbers, flush right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*row)
    # A file or pipe has no width to fit into: nothing is cut there.
    width = None if sys.stdout.isatty() else 10_000
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as text:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in text.get().splitlines()))


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A bar on stderr, on a terminal only and gone at the end; call it with (what, done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total)


def size(count: float) -> str:
    """Bytes for people: "1.6 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            break
        count, unit = count / 1000, {"B": "kB", "kB": "MB", "MB": "GB"}[unit]
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _let_text_through() -> None:
    """A character that the terminal cannot show becomes "?" and does not end the program."""
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="replace")


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _exit_of(error: BaseException | None) -> int | None:
    """The code of an end that was asked for; code in C may have turned that into an error of another kind."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else 1
        error = error.__cause__ or error.__context__
    return None


def _explain(error: BaseException) -> int:
    """Say in a line what went wrong; what is no user's error is raised again, with its traceback."""
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" (see {context.command_path} --help)" if context else ""
        return _fail(f"{error.format_message().rstrip('.')}{hint}", error.exit_code)
    if isinstance(error, EexportError):
        return _fail(str(error), error.exit_code)
    if isinstance(error, MemoryError):
        return _fail("out of memory: use a smaller --context, or a machine with more", 2)
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return 1
    if isinstance(error, OSError):
        if error.filename is None:  # no file of ours: standard output itself, e.g. on a full disk
            _drop_output()
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", 2)
    raise error


def _fail(message: str, code: int) -> int:
    note(f"eexport: error: {' '.join(message.split())}")
    return code


def _drop_output() -> None:
    """Nobody reads: what is still buffered must not raise again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
