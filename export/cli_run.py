"""The subcommands that generate: ``run``, ``chat`` and ``bench``. They work where torch is not installed."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eexport.export.cli_options import JSON, PATH, SAMPLING, WHERE, option
from eexport.runtime.console import ask, note, print_json, print_table, progress, read_input, size, stream

if TYPE_CHECKING:
    from eexport.runtime.engine import Engine, Token


@click.command()
@click.argument("bundle", type=PATH)
@click.argument("prompt")
@click.option("--chat/--raw", default=None, help="Use the chat template (if there is one), or plain text.")
@SAMPLING
@WHERE
@JSON
@option("--stats", "Device, token counts and rates on standard error.", is_flag=True)
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


@click.command()
@click.argument("bundle", type=PATH)
@option("--system", "A system message to open with.", metavar="TEXT")
@SAMPLING
@WHERE
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


@click.command()
@click.argument("bundle", type=PATH)
@option("--prompt-tokens", "Length of the prompt.", click.IntRange(1), default=512, show_default=True)
@option("--tokens", "To generate each time.", click.IntRange(2), default=128, show_default=True)
@option("--repeats", "Requests, after one to warm up.", click.IntRange(1), default=5, show_default=True)
@option("--costs", "Write this device's cost table too, for eexport probe --costs.", PATH, metavar="FILE")
@WHERE
@JSON
def bench(bundle: Path, costs: Path | None, as_json: bool, **options: Any) -> None:
    """Measure speed and memory.

    Rates are medians over requests with a fixed prompt; the first request does not count.
    """
    from eexport.runtime.bench import bench as measure

    with progress("loading") as step:
        result = measure(bundle, progress=step, **options)
        if costs is not None:
            from eexport.runtime.costs import measure_costs

            engine = _load(bundle, options["device"], options["threads"], None)
            measure_costs(engine, progress=step).write(costs)
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
