"""HumanEval pass@1 of bundles, greedy.

    python tests/quality/humaneval.py BUNDLE... --data HumanEval.jsonl.gz --problems 60 --run-code

It writes and runs code that a model wrote: each candidate in a process of its own with limits on time, memory and
file sizes and, where the system allows it, without network. That is no sandbox, hence ``--run-code``.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eexport.calibration.data import Prompt, read_prompts
from eexport.calibration.sandbox import isolation, run_limited
from eexport.calibration.tasks import program
from eexport.runtime.engine import Engine


@dataclass
class Result:
    """One bundle's figures so far; ``failed`` maps a problem to the last line of what went wrong."""

    bundle: str
    problems: int = 0
    passed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)


def main() -> None:
    args = _arguments()
    problems = [prompt for prompt in read_prompts([args.data]).prompts if prompt.task == "pass_at_1"]
    if missing := isolation():
        print(f"warning: {missing}", file=sys.stderr)
    engines = [Engine.load(path, device="cpu", threads=args.threads, context=2048) for path in args.bundles]
    results = [Result(path.name) for path in args.bundles]
    # Problem by problem, so that a run that is cut short still compares the bundles.
    for problem in problems[: args.problems]:
        for engine, result in zip(engines, results, strict=True):
            attempt(engine, problem, args.max_tokens, result)
        print(problem.source, *(f"{r.bundle} {r.passed}/{r.problems}" for r in results), sep="  ", flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(results)}")


def attempt(engine: Engine, problem: Prompt, max_tokens: int, result: Result) -> None:
    """Let the model solve one problem, run what comes, and count it."""
    started = time.perf_counter()
    answer, tokens = complete(engine, problem, max_tokens)
    result.seconds += time.perf_counter() - started
    result.tokens += tokens
    result.problems += 1
    error = run_limited(program(problem, problem.prefix + answer))
    if error is None:
        result.passed += 1
    else:
        result.failed[problem.source] = error


def complete(engine: Engine, problem: Prompt, max_tokens: int) -> tuple[str, int]:
    """The model's answer from the beginning of its code block on, and its number of tokens."""
    chat = engine.codec.render_chat([{"role": "user", "content": str(problem.content)}]) + problem.prefix
    # A fresh cache: what a problem gets must not depend on the problems before it, whatever the bundle.
    tokens = list(
        engine.generate(
            engine.codec.encode(chat, add_special=False), max_tokens=max_tokens, stop=["\n```"], reuse_cache=False
        )
    )
    return "".join(token.text for token in tokens), len(tokens)


def table(results: list[Result]) -> str:
    """The results as Markdown."""
    rows = ["| bundle | passed | of | pass@1 | tokens | seconds |", "|---|---|---|---|---|---|"]
    for r in results:
        share = f"{100 * r.passed / r.problems:.1f}%"
        rows.append(f"| {r.bundle} | {r.passed} | {r.problems} | {share} | {r.tokens} | {r.seconds:.0f} |")
    return "\n".join(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("bundles", type=Path, nargs="+", metavar="BUNDLE")
    add("--data", type=Path, required=True, help="HumanEval.jsonl, or gzipped")
    add("--problems", type=int, default=164, help="how many, from the first on")
    add("--max-tokens", type=int, default=320)
    add("--threads", type=int)
    add("--json", type=Path, help="write the results here")
    add("--run-code", action="store_true", help="agree to run code that a model wrote")
    args = parser.parse_args()
    if not args.run_code:
        parser.error("this runs code that a model wrote, on this machine: add --run-code to agree")
    return args


if __name__ == "__main__":
    main()
