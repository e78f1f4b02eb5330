"""Compare eexport bundles with onnxruntime-genai and llama.cpp on the same weights, in one interleaved run.

    .venv/bin/python tests/peers/bench_peers.py --gguf model.gguf --bundle int4=bundle --json results.json

Every engine runs in its own process, batch 1, with the same threads, and one at a time: a round gives each
engine one decode and one prefill, the next round starts with another engine. Figures are medians over the
rounds; a ratio is the median of the rounds' own ratios, so a machine that slows down slows both sides of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from client import HERE, Worker, busy_seconds
from results import Row, Turn, as_json, machine, table

ROOT = HERE.parents[1]
# Every round reads the timing text from a later place: what an engine cached in the last one is of no use.
ROUND_SHIFT = 16
# A turn during which other processes took more cores than this is repeated.
QUIET = 0.1
MEMORY_PROMPT, MEMORY_TOKENS = 512, 128  # the run after which memory is read


def prepare(args: argparse.Namespace) -> Path:
    """Build the peers' models where they are missing; returns their folder."""
    log = args.cache / "prepare.log"
    command = [args.peers_python, str(HERE / "prepare.py"), str(args.gguf), str(args.cache)]
    last = "nothing printed"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            last = line.rstrip()
            print(last, flush=True)
    if process.wait() != 0:
        reason = (log.read_text(encoding="utf-8").splitlines() or [last])[-1]
        raise SystemExit(f"preparing the peers failed: {reason} (all of it in {log})")
    return Path(last)


def start_workers(args: argparse.Namespace, models: Path) -> list[Worker]:
    """Start a worker for every bundle and every form of the peers."""
    bundles = [("eexport", label, path) for label, path in args.bundle]
    peers = [("genai", path.name.removeprefix("genai-"), path) for path in sorted(models.glob("genai-*/"))]
    peers.append(("llamacpp", "gguf", args.gguf))
    files = sorted(models.glob("llamacpp-*.gguf"))
    peers += [("llamacpp", path.stem.removeprefix("llamacpp-"), path) for path in files]
    if args.forms:
        peers = [peer for peer in peers if peer[1] in args.forms]
    workers = []
    for engine, form, path in bundles + peers:
        print(f"loading {engine} {form}", flush=True)
        python = sys.executable if engine == "eexport" else args.peers_python
        log = args.cache / f"worker-{engine}-{form}.log"
        load = {"path": str(path), "threads": args.threads, "context": args.context}
        workers.append(Worker(engine, form, python, log, **load))
    return workers


def agreement(worker: Worker, prompts: list[dict[str, list[int]]]) -> float:
    """Share of positions whose greedy token is the fp32 model's, teacher-forced on its output."""
    hits: list[bool] = [
        worker.ask("prefill", prompt_ids=prompt["prompt_ids"] + prompt["greedy_ids"][:k])["token_id"] == token
        for prompt in prompts
        for k, token in enumerate(prompt["greedy_ids"])
    ]
    return sum(hits) / len(hits)


def warm_up(args: argparse.Namespace, worker: Worker, reference: dict[str, Any]) -> Row:
    """Run a worker for the first time; returns a row with its memory and its agreement with fp32."""
    print(f"warming up {worker.name}", flush=True)
    worker.ask("decode", prompt_ids=reference["timing_ids"][:MEMORY_PROMPT], n=MEMORY_TOKENS)
    memory = worker.ask("memory")
    agreed = None if args.no_agreement else agreement(worker, reference["prompts"])
    worker.settle()
    return Row(worker, memory, agreed)


def take_turn(args: argparse.Namespace, active: Worker, others: list[Worker], ids: list[int]) -> Turn:
    """Time one decode and one prefill of ``active`` on the text that starts ``ids``."""

    def clocks() -> tuple[float, float, float, float]:
        waiting = sum(worker.cpu_seconds() for worker in others)
        return time.perf_counter(), waiting, active.cpu_seconds(), busy_seconds()

    before = clocks()
    # Not timed: the other engines have emptied the processor's caches since the last turn.
    active.ask("decode", prompt_ids=ids[: args.prompt_tokens], n=4)
    decode = active.ask("decode", prompt_ids=ids[: args.prompt_tokens], n=args.decode_tokens)
    prefill = active.ask("prefill", prompt_ids=ids[: args.prefill_tokens])
    wall, waiting, used, busy = (now - then for now, then in zip(clocks(), before, strict=True))
    active.settle()
    return Turn(
        decode=1 / decode["seconds_per_token"],
        prefill=args.prefill_tokens / prefill["seconds"],
        waiting=waiting / wall,
        foreign=max(0.0, busy - used - waiting) / wall,
    )


def measure(args: argparse.Namespace, rows: list[Row], text: list[int]) -> None:
    """Run the interleaved rounds, filling the rows."""
    for index in range(args.rounds):
        print(f"round {index + 1} of {args.rounds}", flush=True)
        ids = text[ROUND_SHIFT * (index + 1) :]
        first = index % len(rows)
        for row in rows[first:] + rows[:first]:
            others = [other.worker for other in rows if other is not row]
            turn = take_turn(args, row.worker, others, ids)
            for _ in range(args.retries):
                if turn.foreign <= QUIET:
                    break
                turn = min(turn, take_turn(args, row.worker, others, ids), key=lambda turn: turn.foreign)
            row.turns.append(turn)


def report(args: argparse.Namespace, rows: list[Row]) -> None:
    """Print the results, and write them as JSON where that is asked for."""
    where = machine()
    versions = sorted({row.worker.version for row in rows})
    turns = [turn for row in rows for turn in row.turns]
    waiting = max(turn.waiting for turn in turns)
    foreign = statistics.median(turn.foreign for turn in turns)
    print(
        f"\n{args.gguf.name}, batch 1, {args.threads} threads, medians of {args.rounds} interleaved rounds\n"
        f"decode: {args.decode_tokens} tokens after {args.prompt_tokens}; prefill: {args.prefill_tokens}; "
        f"RSS: after {MEMORY_PROMPT} + {MEMORY_TOKENS}\n"
        f"{'; '.join(where.values())}\n{'; '.join(versions)}\n\n{table(rows)}\n\n"
        "x genai: to onnxruntime-genai's fastest int4 and int8 form of this run, median of the rounds\n"
        "= fp32: greedy tokens that equal the fp32 model's, teacher-forced\n"
        f"Others' CPU use in a turn, in cores: waiting workers at most {waiting:.2f}; "
        f"other processes {foreign:.2f} (median)."
    )
    if waiting > QUIET or foreign > QUIET:
        print("warning: the machine was not quiet; trust the ratios more than the speeds, or run it again")
    if args.json:
        settings = ("threads", "context", "rounds", "decode_tokens", "prompt_tokens", "prefill_tokens")
        results = {
            "model": args.gguf.name,
            "machine": where,
            "versions": versions,
            "settings": {name: getattr(args, name) for name in settings},
            "rows": as_json(rows),
        }
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def labelled(text: str) -> tuple[str, str]:
    """Split LABEL=PATH."""
    label, _, path = text.partition("=")
    if not label or not Path(path, "manifest.json").is_file():
        raise argparse.ArgumentTypeError(f"{text}: expected LABEL=PATH of a bundle")
    return label, path


def arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    python = ROOT / ".venv-peers" / "bin" / "python"
    add("--gguf", type=Path, required=True, help="the checkpoint, an instruct model")
    add("--bundle", type=labelled, action="append", default=[], metavar="LABEL=PATH", help="repeatable")
    add("--cache", type=Path, default=ROOT / ".cache" / "peers", help="keeps the peers' models")
    add("--peers-python", default=str(python), help="has tests/peers/requirements.txt installed")
    add("--forms", nargs="+", metavar="FORM", help="only these forms of the peers (default: all)")
    add("--threads", type=int, default=2)
    add("--context", type=int, default=1024, help="KV capacity of every engine")
    add("--rounds", type=int, default=7)
    add("--retries", type=int, default=2, help="of a turn that other processes disturbed")
    add("--decode-tokens", type=int, default=128)
    add("--prompt-tokens", type=int, default=64)
    add("--prefill-tokens", type=int, default=512)
    add("--no-agreement", action="store_true", help="do not compare with the fp32 model's tokens")
    add("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    longest = max(MEMORY_PROMPT + MEMORY_TOKENS, args.prefill_tokens, args.prompt_tokens + args.decode_tokens)
    if args.context <= longest:
        parser.error(f"--context {args.context}: more than {longest} needed")
    if not args.gguf.is_file():
        parser.error(f"--gguf {args.gguf}: no such file")
    if not Path(args.peers_python).exists():
        parser.error(f"--peers-python {args.peers_python}: no such file; make bench-peers creates it")
    return args


def main() -> None:
    """Run the benchmark."""
    args = arguments()
    args.cache.mkdir(parents=True, exist_ok=True)
    models = prepare(args)
    reference = json.loads((models / "hf" / "reference.json").read_text(encoding="utf-8"))
    text = reference["timing_ids"]
    needed = max(args.prefill_tokens, args.prompt_tokens, MEMORY_PROMPT) + ROUND_SHIFT * args.rounds
    if needed > len(text):
        raise SystemExit(f"the timing text has {len(text)} tokens, {needed} needed: fewer rounds or tokens")
    workers = start_workers(args, models)
    try:
        rows = [warm_up(args, worker, reference) for worker in workers]
        measure(args, rows, text)
    finally:
        for worker in workers:
            worker.close()
    report(args, rows)


if __name__ == "__main__":
    main()
