"""Options that several subcommands share, and the extra that some of them need."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from eexport.runtime.errors import EexportError

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
PRECISION = click.Choice(["int4", "int8", "fp16", "fp32"])


def options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several click options as one decorator."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def option(name: str, help_text: str, kind: Any = None, **more: Any) -> Callable[[F], F]:
    """A click option, its help text first."""
    return click.option(name, type=kind, help=help_text, **more)


def _logit_bias(_context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (value.split("=") for value in values)}
    except ValueError:
        raise click.BadParameter("give ID=VALUE, e.g. 42=-100") from None


JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
WHERE = options(
    option("--device", "Where to run: auto, cpu or cuda.", default="auto", show_default=True),
    option("--threads", "CPU threads; by default all that this process may use.", click.IntRange(1)),
)
SAMPLING = options(
    option("--context", "Cap on prompt and output together, in tokens.", click.IntRange(1)),
    option("--max-tokens", "Tokens to generate; by default until the model or the context ends.", int),
    option("--temperature", "0 always takes the likeliest token.", float),
    option("--top-k", "Draw from this many likeliest tokens; 0 is all.", int),
    option("--top-p", "Draw from the fewest tokens that hold this share of probability.", float),
    option("--min-p", "Drop tokens below this share of the likeliest one's probability.", float),
    option("--repetition-penalty", "Over 1 makes tokens of prompt and output less likely.", float),
    option("--frequency-penalty", "Taken off a logit for each time its token was generated.", float),
    option("--presence-penalty", "Taken off a logit once its token was generated.", float),
    option("--logit-bias", "Added to a logit.", multiple=True, callback=_logit_bias, metavar="ID=VALUE"),
    option("--stop", "Ends the output, and is left out of it.", multiple=True, metavar="TEXT"),
    option("--seed", "Same seed, same tokens.", int),
    option("--ignore-eos", "Go on after the model's end tokens.", is_flag=True),
)


@contextmanager
def export_extra(command: str, extra: str = "export") -> Iterator[None]:
    """Turn a missing package into the line that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise EexportError(
            f"eexport {command} needs {error.name}, which is not installed: pip install 'eexport[{extra}]'"
        ) from None
