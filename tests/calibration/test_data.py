import ast
import gzip
import json
from collections import Counter

import pytest

from eexport.calibration.data import Prompt, Skipped, builtin_prompts, read_prompts
from eexport.runtime.errors import EexportError

HUMANEVAL = {
    "task_id": "Try/0",
    "prompt": 'import math\n\n\ndef root(x):\n    """ Square root. """\n',
    "entry_point": "root",
    "canonical_solution": "    return math.sqrt(x)\n",
    "test": "def check(candidate):\n    assert candidate(9) == 3\n",
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_one(path, row):
    rows = read_prompts([write(path, row)])
    assert not rows.skipped
    return rows.prompts[0]


def reason(path, row):
    """Why a row is skipped, beside one that is used."""
    rows = read_prompts([write(path, {"prompt": "fine"}, row)])
    assert len(rows.prompts) == 1
    (skipped,) = rows.skipped
    assert skipped.source == f"{path.name}:2"
    return skipped.reason


@pytest.fixture
def file(tmp_path):
    return tmp_path / "rows.jsonl"


# What rows are


def test_own_rows(file):
    rows = [
        {"prompt": "one"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "kind": "log"},
        {"prompt": "two", "kind": "json"},
        {"prompt": "three", "kind": "json", "answer": "{}"},
        {"prompt": "four", "kind": "math", "answer": 4.5},
        {"prompt": "five", "test": "assert five(1) == 5", "entry_point": "five", "answer": "unused"},
        {"prompt": "six", "kind": None, "answer": None, "test": None},
    ]
    prompts = read_prompts([write(file, *rows)]).prompts
    assert [p.kind for p in prompts] == ["text", "log", "json", "json", "math", "text", "text"]
    tasks = [None, None, "json", "exact_match", "exact_match", "pass_at_1", None]
    assert [p.task for p in prompts] == tasks
    assert prompts[1].content == tuple(rows[1]["messages"])
    assert [p.source for p in prompts] == [f"rows.jsonl:{n}" for n in range(1, 8)]
    assert (prompts[4].answer, prompts[5].entry_point, prompts[5].answer) == ("4.5", "five", None)
    assert {(p.prefix, p.stub) for p in prompts} == {("", "")}


@pytest.mark.parametrize(
    "test",
    [
        "assert area(2) == 4",
        "import math\nassert math.isclose(area(2), 4) and sorted([area(1)]) == [1]",
        "for x in range(3):\n    assert abs(area(x) - x * x) < 1e-9",
        "def near(a, b):\n    return abs(a - b) < 1\nassert near(area(2), 4)",
    ],
)
def test_the_function_that_a_test_calls_is_found(file, test):
    assert read_one(file, {"prompt": "p", "test": test}).entry_point == "area"


def test_gsm8k(file):
    row = {"question": "How many?", "answer": "2 * 3 = <<2*3=6>>6\n#### 1,206"}
    found = read_one(file, row)
    assert found == Prompt("math", "How many?", "exact_match", "1,206", None, None, "", "rows.jsonl:1")


def test_humaneval(file):
    found = read_one(file, HUMANEVAL)
    assert found.content == (
        "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
        f"```python\n{HUMANEVAL['prompt']}```\n"
    )
    assert found.prefix.endswith("tests:\n```python\n")
    assert (found.kind, found.task, found.entry_point, found.stub) == ("code", "pass_at_1", "root", HUMANEVAL["prompt"])
    assert found.test.endswith("\n\ncheck(root)\n")


@pytest.mark.parametrize(
    ("category", "kind"), [("coding", "code"), ("math", "math"), ("math_reasoning", "math"), ("rag", "text")]
)
def test_spec_bench(file, category, kind):
    found = read_one(file, {"question_id": 81, "category": category, "turns": ["first", "second"]})
    assert (found.kind, found.content, found.task) == (kind, "first", None)


def test_gzip_and_several_files(tmp_path):
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    prompts = read_prompts([packed, write(tmp_path / "b.jsonl", {"prompt": "c"})]).prompts
    assert [(p.content, p.source) for p in prompts] == [
        ("a", "a.jsonl.gz:1"),
        ("b", "a.jsonl.gz:2"),
        ("c", "b.jsonl:1"),
    ]


# Bad input


@pytest.mark.parametrize("content", [b"", b"\n \r\n\t\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows(file, content):
    file.write_bytes(content)
    with pytest.raises(EexportError, match=r"rows\.jsonl: has no rows"):
        read_prompts([file])


def test_bad_lines_are_skipped_with_their_number(file):
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "bom"}\r\n'
        b"\r\n"
        b'{"prompt": \r\n'
        b'{"prompt": "caf\xe9"}\n'
        b'["prompt"]\n'
        b'{"prompt": "crlf \xe2\x80\xa8 and a line separator"}\r\n'
        b"not json at all\n" + b"[" * 100_000 + b"\n"
        b'{"prompt": "the last has no end of line"}'
    )
    rows = read_prompts([file])
    assert [(p.content, p.source) for p in rows.prompts] == [
        ("bom", "rows.jsonl:1"),
        ("crlf \u2028 and a line separator", "rows.jsonl:6"),
        ("the last has no end of line", "rows.jsonl:9"),
    ]
    assert [row.source for row in rows.skipped] == [f"rows.jsonl:{n}" for n in (3, 4, 5, 7, 8)]
    reasons = [row.reason for row in rows.skipped]
    assert reasons[0].startswith("not JSON: ") and reasons[0].endswith("at column 11")
    assert reasons[1] == "not UTF-8, at byte 16 of the line"
    assert reasons[2] == "expected a JSON object, got ['prompt']"
    assert all(reason.startswith("not JSON") and "\n" not in reason for reason in reasons[3:])


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({}, "none of the fields"),
        ({"text": "x"}, "none of the fields"),
        ({"prompt": 3}, "prompt: expected a string, got 3"),
        ({"prompt": None}, "prompt: expected a string, got None"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "both prompt and messages"),
        ({"messages": []}, "messages: expected a non-empty list"),
        ({"messages": "hello"}, "messages: expected a non-empty list"),
        ({"messages": [{"role": "user"}]}, "messages[0]: expected role and content"),
        ({"messages": [{"role": "user", "content": "x"}, "y"]}, "messages[1]: expected role and content"),
        ({"prompt": "x", "kind": 1}, "kind: expected text"),
        ({"prompt": "x", "kind": " "}, "kind: expected text"),
        ({"prompt": "x", "answer": True}, "answer: expected text, got True"),
        ({"prompt": "x", "answer": [1]}, "answer: expected text, got [1]"),
        ({"prompt": "x", "test": 1}, "test: expected text"),
        ({"prompt": "x", "test": "assert f("}, "test: not Python"),
        ({"prompt": "x", "test": "assert f(1) == g(2)"}, "entry_point: missing, and the test's asserts call f, g"),
        ({"prompt": "x", "test": "assert len([]) == 0"}, "entry_point: missing"),
        ({"prompt": "x", "test": "print(f(1))", "entry_point": "f"}, "test: expected assert statements"),
        ({"prompt": "x", "test": "def test():\n    assert f(1)", "entry_point": "f"}, "test: expected assert"),
        ({"prompt": "x", "test": "assert f(1)", "entry_point": "f()"}, "entry_point: expected the name"),
        ({"question": "x"}, "answer: missing"),
        ({"question": "x", "answer": "no mark"}, "####"),
        ({"question": "x", "answer": "mark ####"}, "####"),
        ({key: HUMANEVAL[key] for key in ("task_id", "prompt", "entry_point")}, "test: missing"),
        ({"turns": ["x"]}, "category: missing"),
        ({"turns": [], "category": "rag"}, "turns: expected a list of strings"),
        ({"turns": "x", "category": "rag"}, "turns: expected a list of strings"),
    ],
)
def test_unusable_rows(file, row, part):
    assert part in reason(file, row)


def test_repeated_rows_are_used_once(tmp_path):
    same = {"prompt": "x", "kind": "log"}
    first = write(tmp_path / "a.jsonl", same, {"prompt": "x"}, same)
    second = write(tmp_path / "b.jsonl", same)
    rows = read_prompts([first, second])
    assert [p.source for p in rows.prompts] == ["a.jsonl:1", "a.jsonl:2"]
    assert rows.skipped == [Skipped("a.jsonl:3", "same as a.jsonl:1"), Skipped("b.jsonl:1", "same as a.jsonl:1")]


def test_of_repeated_rows_one_that_can_be_scored_is_kept(file):
    question = {"question": "How many?", "answer": "#### 6"}
    write(file, {"turns": ["How many?"], "category": "math_reasoning"}, {"prompt": "x"}, question)
    rows = read_prompts([file])
    assert [(p.source, p.answer) for p in rows.prompts] == [("rows.jsonl:3", "6"), ("rows.jsonl:2", None)]
    assert rows.skipped == [Skipped("rows.jsonl:1", "same as rows.jsonl:3")]


def test_no_usable_row_is_an_error(file):
    write(file, {"text": "x"}, [1])
    with pytest.raises(EexportError, match=r"rows\.jsonl: none of its 2 rows .* first, rows\.jsonl:1: has none of"):
        read_prompts([file])


def test_files_that_cannot_be_read(tmp_path):
    whole = gzip.compress(json.dumps({"prompt": "x" * 5000}).encode())
    damaged = bytearray(whole)
    damaged[20:30] = b"\xff" * 10
    cases = {"cut.gz": whole[:-9], "damaged.gz": bytes(damaged), "plain.gz": b'{"prompt": "x"}\n'}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(EexportError, match=f"{name}: damaged, or not a gzip file"):
            read_prompts([tmp_path / name])
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(EexportError, match=f"{path}: cannot be read") as caught:
            read_prompts([path])
        assert "\n" not in str(caught.value)


# The built-in set


def test_builtin_prompts():
    rows = builtin_prompts()
    assert not rows.skipped
    kinds = [p.kind for p in rows.prompts]
    assert kinds == sorted(kinds) and Counter(kinds) == {"code": 32, "json": 32, "math": 32, "text": 32}
    tasks = {"code": "pass_at_1", "json": "json", "math": "exact_match", "text": None}
    assert all(p.task == tasks[p.kind] for p in rows.prompts)
    assert (rows.prompts[0].source, rows.prompts[-1].source) == ("built-in:1", "built-in:128")
    for p in rows.prompts:
        assert 10 <= len(p.content.split()) <= 200
        if p.kind == "code":
            assert f"`{p.entry_point}(" in p.content or f"def {p.entry_point}(" in p.content
            assert sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(p.test))) >= 2
        if p.kind == "math":
            float(p.answer)
