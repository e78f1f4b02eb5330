"""HumanEval pass@1 of bundles, greedy.

    python tests/quality/humaneval.py BUNDLE... --data HumanEval.jsonl.gz --problems 60 --run-code

It writes and runs code that a model wrote: each candidate in a process of its own with limits on time, memory and
file sizes and, where the system allows it, without network. That is no sandbox, hence ``--run-code``.
"""

import argparse
import ast
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from eexport.runtime.engine import Engine

SECONDS = 10
MEMORY = 1 << 30
PASSED = 42  # exit status
# The question of Qwen2.5-Coder's own evaluation, and the start of the answer, which ends in the code block.
QUESTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```python\n{prompt}```\n"
)
ANSWER = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding "
    "tests:\n```python\n"
)


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
    engines = [Engine.load(path, device="cpu", threads=args.threads, context=2048) for path in args.bundles]
    results = [Result(path.name) for path in args.bundles]
    # Problem by problem, so that a run that is cut short still compares the bundles.
    for problem in read_problems(args.data)[: args.problems]:
        for engine, result in zip(engines, results, strict=True):
            attempt(engine, problem, args.max_tokens, result)
        print(problem["task_id"], *(f"{r.bundle} {r.passed}/{r.problems}" for r in results), sep="  ", flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(results)}")


def attempt(engine: Engine, problem: dict[str, Any], max_tokens: int, result: Result) -> None:
    """Let the model solve one problem, run what comes, and count it."""
    started = time.perf_counter()
    answer, tokens = complete(engine, problem["prompt"], max_tokens)
    result.seconds += time.perf_counter() - started
    result.tokens += tokens
    result.problems += 1
    error = run_limited(program(problem, answer))
    if error is None:
        result.passed += 1
    else:
        result.failed[problem["task_id"]] = error


def complete(engine: Engine, prompt: str, max_tokens: int) -> tuple[str, int]:
    """The model's answer from the beginning of its code block on, and its number of tokens."""
    chat = engine.codec.render_chat([{"role": "user", "content": QUESTION.format(prompt=prompt)}]) + ANSWER
    # A fresh cache: what a problem gets must not depend on the problems before it, whatever the bundle.
    tokens = list(
        engine.generate(
            engine.codec.encode(chat, add_special=False), max_tokens=max_tokens, stop=["\n```"], reuse_cache=False
        )
    )
    return "".join(token.text for token in tokens), len(tokens)


def program(problem: dict[str, Any], answer: str) -> str:
    """The script that tests an answer.

    The prompt comes first, as a function without a body: it has the imports and helpers. An answer that does not
    define the function is taken for the rest of its body.
    """
    code = code_block(answer)
    name = problem["entry_point"]
    whole = re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE)
    text = f"{problem['prompt']}    pass\n\n{definitions(code)}" if whole else problem["prompt"] + code
    # Under another name no `if __name__ == "__main__"` runs, and only an exit status of its own shows the end reached.
    return f"__name__ = 'candidate'\n{text}\n\n{problem['test']}\n\ncheck({name})\nraise SystemExit({PASSED})\n"


def code_block(answer: str) -> str:
    """The code of an answer that begins inside a block, or has a block of its own."""
    if block := re.search(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", answer, re.DOTALL):
        return block[1]
    return answer.split("```")[0]


def definitions(code: str) -> str:
    """The imports, functions, classes and constants of a script: not the tests and prints that a model adds.

    What a cut-off script has of an unfinished end is dropped, up to the first line with which it parses.
    """
    lines = code.splitlines()
    while lines:
        try:
            body = ast.parse("\n".join(lines)).body
        except (SyntaxError, ValueError):  # ValueError: a null character
            lines.pop()
            continue
        kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
        return "\n".join(ast.unparse(node) for node in body if isinstance(node, kept))
    return ""


def run_limited(code: str) -> str | None:
    """Run a script in a process with limits; the last line of its error, or None where it ends well."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "candidate.py"
        script.write_text(code, encoding="utf-8")
        process = subprocess.Popen(
            [*without_network(), sys.executable, "-I", "-B", str(script)],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_set_limits,
        )
        try:
            _, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"timed out after {SECONDS} s"
        finally:
            _kill_group(process)
    if process.returncode == PASSED:
        return None
    lines = errors.strip().splitlines()
    return lines[-1][:200] if lines else f"exit status {process.returncode}"


@cache
def without_network() -> tuple[str, ...]:
    """The command prefix that takes the network away; empty, with a warning, where there is none."""
    for prefix in (("unshare", "--net", "--map-root-user"), ("unshare", "--net")):
        try:
            if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
                return prefix
        except OSError:
            break
    print("warning: unshare does not work here, so candidates can reach the network", file=sys.stderr)
    return ()


def _set_limits() -> None:
    limits: dict[int, int] = {
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_CPU: SECONDS,
        resource.RLIMIT_FSIZE: 1 << 20,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _kill_group(process: subprocess.Popen[str]) -> None:
    """End the candidate and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.communicate()  # closes the pipe and collects the process


def read_problems(path: Path) -> list[dict[str, Any]]:
    """HumanEval's own file, plain or gzipped."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


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
