"""Prompts to measure on: the built-in set, the project's own JSONL, and files of GSM8K, HumanEval and Spec-Bench."""

import ast
import builtins
import gzip
import hashlib
import json
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

from eexport.runtime.errors import EexportError, RequestError
from eexport.runtime.text import TextCodec

Task = Literal["exact_match", "pass_at_1", "json"]

# How HumanEval is asked: the question of Qwen2.5-Coder's own evaluation, and the start of the answer, which ends in
# the code block.
QUESTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```python\n{prompt}```\n"
)
ANSWER = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding "
    "tests:\n```python\n"
)

_BUILT_IN = Path(__file__).parent / "prompts.jsonl"
_BOM = b"\xef\xbb\xbf"
_SPEC_BENCH_KINDS = {"coding": "code", "math": "math", "math_reasoning": "math"}  # the others are text


@dataclass(frozen=True)
class Prompt:
    """One row of data.

    Attributes:
        kind: "json", "code", "text", "math", or the row's own word.
        content: A user's message, or raw text where the model has no chat template; or the messages of a
            conversation, each with ``role`` and ``content``.
        task: How an answer is scored; None where it is free text.
        answer: What ``exact_match`` expects.
        test: Python source with assert statements, for ``pass_at_1``.
        entry_point: The function that ``test`` calls.
        prefix: How the assistant's answer is made to begin.
        source: "file.jsonl:12" or "built-in:12".
        stub: Code that the answer goes on from or defines again: imports, helpers, a function without a body.
    """

    kind: str
    content: str | tuple[dict[str, Any], ...]
    task: Task | None
    answer: str | None
    test: str | None
    entry_point: str | None
    prefix: str
    source: str
    stub: str = ""


@dataclass(frozen=True)
class Skipped:
    """A row that is not used, and why."""

    source: str
    reason: str


@dataclass(frozen=True)
class Rows:
    """What files held, in their order."""

    prompts: list[Prompt]
    skipped: list[Skipped]


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids ``[T]``, T ≥ 1; ``cut`` where it was longer than the limit."""

    prompt: Prompt
    ids: tuple[int, ...]
    cut: bool

    @property
    def hash(self) -> str:
        """``prompt_key`` of it: the same wherever the row stands."""
        return prompt_key(self.prompt.kind, self.ids)


class _Unusable(Exception):
    """Why a row cannot be used."""


def prompt_key(kind: str, ids: Sequence[int]) -> str:
    """16 hex digits of what is measured, the kind and the tokens."""
    return hashlib.sha256(repr((kind, tuple(ids))).encode()).hexdigest()[:16]


def builtin_prompts() -> Rows:
    """The project's own prompts, 32 of each of the kinds json, code, text and math."""
    return _without_duplicates([_read(_BUILT_IN, "built-in")])


def read_prompts(paths: Sequence[Path]) -> Rows:
    """Read .jsonl files, plain or gzipped (.gz); what a row is, is known by its fields.

    - ``prompt`` or ``messages``, with ``kind``, ``answer`` (exact match), ``test`` and ``entry_point`` (code; they
      count before ``answer``) where there are any. A row of the kind "json" without them is scored as JSON.
    - GSM8K: ``question``, ``answer`` with ``####``.
    - HumanEval: ``task_id``, ``prompt``, ``entry_point``, ``test``.
    - Spec-Bench: ``question_id``, ``category``, ``turns``, of which the first is used.

    Rows that cannot be used, and repeated ones, are among ``skipped``; blank lines are not.

    Raises:
        EexportError: A file cannot be read, or has no row that can be used.
    """
    return _without_duplicates([_read(path, path.name) for path in paths])


def encode(
    prompts: Iterable[Prompt], codec: TextCodec, bos: int | None, limit: int
) -> tuple[list[Encoded], list[Skipped]]:
    """Token ids of prompts, of each ``limit`` at most.

    A longer prompt is cut: raw text at its end; in a conversation the longest message of the user at its end, so
    that the chat template stays whole.

    Args:
        prompts: What to encode.
        codec: The model's tokenizer and chat template.
        bos: The token for an empty raw prompt; None where the model has none.
        limit: Most tokens of a prompt, at least 1.

    Returns:
        The encoded prompts, in order, and those that cannot be encoded or come to the same tokens as another.
    """
    encoded: dict[str, Encoded] = {}
    skipped = []
    for prompt in prompts:
        try:
            if isinstance(prompt.content, str) and not codec.has_chat_template:
                ids = _encode_raw(prompt.content, prompt.prefix, codec, bos, limit)
            else:
                ids = _encode_chat(prompt, codec, limit)
        except (RequestError, _Unusable) as error:
            skipped.append(Skipped(prompt.source, str(error)))
            continue
        one = Encoded(prompt, *ids)
        first = encoded.setdefault(one.hash, one)
        if first is not one:
            skipped.append(Skipped(prompt.source, f"same tokens as {first.prompt.source}"))
    return list(encoded.values()), skipped


def interleave(encoded: Iterable[Encoded], seed: int) -> list[Encoded]:
    """Shuffle within each kind and take the kinds in turn, by name, so that any prefix covers them evenly.

    The order among given prompts depends on them and ``seed`` alone: not on their order, nor on what else is there.
    """

    def place(one: Encoded) -> str:
        return hashlib.sha256(f"{seed} {one.hash}".encode()).hexdigest()

    kinds: dict[str, list[Encoded]] = {}
    for one in sorted(encoded, key=place):
        kinds.setdefault(one.prompt.kind, []).append(one)
    turns = zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [one for one in chain.from_iterable(turns) if one is not None]


def _read(path: Path, name: str) -> Rows:
    prompts, skipped = [], []
    for number, line in _lines(path):
        source = f"{name}:{number}"
        try:
            prompts.append(_prompt(_row(line), source))
        except _Unusable as error:
            skipped.append(Skipped(source, str(error)))
    if not prompts:
        if not skipped:
            raise EexportError(f"{path}: has no rows: give one JSON object a line, with a prompt")
        first = skipped[0]
        raise EexportError(
            f"{path}: none of its {len(skipped)} rows can be used; the first, {first.source}: {first.reason}"
        )
    return Rows(prompts, skipped)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, and their numbers from 1 on."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                line = line.removeprefix(_BOM) if number == 1 else line
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EexportError(f"{path}: damaged, or not a gzip file ({error}): fetch it again") from error
    except OSError as error:
        raise EexportError(f"{path}: cannot be read ({error.strerror})") from error


def _without_duplicates(files: Sequence[Rows]) -> Rows:
    first: dict[str, Prompt] = {}
    skipped = [row for file in files for row in file.skipped]
    for prompt in (prompt for file in files for prompt in file.prompts):
        key = json.dumps([prompt.kind, prompt.content, prompt.prefix])
        kept = first.setdefault(key, prompt)
        if kept is prompt:
            continue
        if kept.task is None and prompt.task is not None:  # Spec-Bench has questions of GSM8K without their answers
            first[key], kept, prompt = prompt, prompt, kept
        skipped.append(Skipped(prompt.source, f"same as {kept.source}"))
    return Rows(list(first.values()), skipped)


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Unusable(f"not UTF-8, at byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        raise _Unusable(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deep nesting
        raise _Unusable("not JSON that can be read: too long a number or too deep") from error
    if not isinstance(row, dict):
        raise _Unusable(f"expected a JSON object, got {reprlib.repr(row)}")
    return row


def _prompt(row: dict[str, Any], source: str) -> Prompt:
    forms: tuple[tuple[bool, Callable[[dict[str, Any], str], Prompt]], ...] = (
        ("turns" in row, _spec_bench),
        ("task_id" in row and "entry_point" in row, _humaneval),
        ("question" in row, _gsm8k),
        ("prompt" in row or "messages" in row, _own),
    )
    for fits, read in forms:
        if fits:
            return read(row, source)
    raise _Unusable("has none of the fields prompt, messages, question, turns")


def _own(row: dict[str, Any], source: str) -> Prompt:
    kind = "text" if row.get("kind") is None else _text(row, "kind").strip()
    if kind == "all":
        raise _Unusable('kind: "all" stands for every kind together, give it another name')
    content, answer = _content(row), row.get("answer")
    if row.get("test") is not None:
        test = _text(row, "test")
        entry_point = _called(test) if row.get("entry_point") is None else _text(row, "entry_point")
        return Prompt(kind, content, "pass_at_1", None, _runnable(test, entry_point), entry_point, "", source)
    if answer is not None:
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
        answer = str(answer) if is_number else _text(row, "answer")
        return Prompt(kind, content, "exact_match", answer, None, None, "", source)
    return Prompt(kind, content, "json" if kind == "json" else None, None, None, None, "", source)


def _content(row: dict[str, Any]) -> str | tuple[dict[str, Any], ...]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if messages is None:
        if not isinstance(prompt, str):
            raise _Unusable(f"prompt: expected a string, got {reprlib.repr(prompt)}")
        return prompt
    if prompt is not None:
        raise _Unusable("has both prompt and messages: which one is meant?")
    if not isinstance(messages, list) or not messages:
        raise _Unusable(f"messages: expected a non-empty list, got {reprlib.repr(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise _Unusable(f"messages[{index}]: expected role and content as strings, got {reprlib.repr(message)}")
    return tuple(messages)


def _gsm8k(row: dict[str, Any], source: str) -> Prompt:
    question, (_, mark, answer) = _text(row, "question"), _text(row, "answer").rpartition("####")
    if not mark or not answer.strip():
        raise _Unusable("answer: expected GSM8K's `#### number` at its end")
    return Prompt("math", question, "exact_match", answer.strip(), None, None, "", source)


def _humaneval(row: dict[str, Any], source: str) -> Prompt:
    stub, entry_point = _text(row, "prompt"), _text(row, "entry_point")
    test = _runnable(_text(row, "test"), entry_point)
    question = QUESTION.format(prompt=stub)
    return Prompt("code", question, "pass_at_1", None, test, entry_point, ANSWER, source, stub)


def _spec_bench(row: dict[str, Any], source: str) -> Prompt:
    turns, category = row["turns"], _text(row, "category")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise _Unusable(f"turns: expected a list of strings, got {reprlib.repr(turns)}")
    return Prompt(_SPEC_BENCH_KINDS.get(category, "text"), turns[0], None, None, None, None, "", source)


def _text(row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    if isinstance(value, str) and value.strip():
        return value
    raise _Unusable(f"{field}: expected text, got {reprlib.repr(value)}" if field in row else f"{field}: missing")


def _called(test: str) -> str:
    """The one function that the asserts of a test call and that neither the test nor Python defines."""
    nodes = list(ast.walk(_tree(test)))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)} | set(dir(builtins))
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    inside = (inner for node in nodes if isinstance(node, ast.Assert) for inner in ast.walk(node.test))
    calls = {node.func.id for node in inside if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if len(names := sorted(calls - bound)) != 1:
        raise _Unusable(f"entry_point: missing, and the test's asserts call {', '.join(names) or 'no such function'}")
    return names[0]


def _runnable(test: str, entry_point: str) -> str:
    """The test as a script that runs its asserts; HumanEval's only define ``check(candidate)``, so that is called."""
    if not entry_point.isidentifier():
        raise _Unusable(f"entry_point: expected the name of a function, got {reprlib.repr(entry_point)}")
    body = _tree(test).body
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body):
        return f"{test}\n\ncheck({entry_point})\n"
    top = (node for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef))
    if not any(isinstance(node, ast.Assert) for part in top for node in ast.walk(part)):
        raise _Unusable("test: expected assert statements outside of functions, or a function check(candidate)")
    return test


def _tree(test: str) -> ast.Module:
    try:
        return ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _Unusable(f"test: not Python ({' '.join(str(error).split())})") from error


def _encode_raw(text: str, prefix: str, codec: TextCodec, bos: int | None, limit: int) -> tuple[tuple[int, ...], bool]:
    ids = codec.encode(text + prefix)
    if not ids and bos is not None:
        ids = [bos]
    if not ids:
        raise _Unusable("is empty, and this model has no token to begin a text with")
    if len(ids) <= limit:
        return tuple(ids), False
    forced = codec.encode(prefix, add_special=False)
    if len(forced) >= limit:
        raise _Unusable(f"the start of the answer alone has {len(forced)} tokens, which leaves no room in {limit}")
    return (*codec.encode(text)[: limit - len(forced)], *forced), True


def _encode_chat(prompt: Prompt, codec: TextCodec, limit: int) -> tuple[tuple[int, ...], bool]:
    content = prompt.content
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    longest = max(messages, key=lambda message: len(message["content"]) if message["role"] == "user" else -1)
    whole = longest["content"]

    def ids_of(keep: int) -> list[int]:
        cut = [message | {"content": whole[:keep]} if message is longest else message for message in messages]
        # A template writes its own BOS, so the tokenizer adds none.
        return codec.encode(codec.render_chat(cut) + prompt.prefix, add_special=False)

    ids = ids_of(len(whole))
    if not ids:
        raise _Unusable("the chat template makes no text of it")
    if len(ids) <= limit:
        return tuple(ids), False
    best: list[int] = []
    low, high = 0, len(whole) if longest["role"] == "user" else 0
    while high - low > 1:
        middle = (low + high) // 2
        found = ids_of(middle)
        low, high = (middle, high) if len(found) <= limit else (low, middle)
        best = found if len(found) <= limit else best
    if not best:
        raise _Unusable(f"does not fit in {limit} tokens even with the user's longest message cut away")
    return tuple(best), True
