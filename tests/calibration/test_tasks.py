import ast

import pytest

from eexport.calibration.data import ANSWER, Prompt
from eexport.calibration.tasks import code_block, definitions, program, score

STUB = 'import math\n\n\ndef root(x):\n    """ Square root. """\n'


def exact(answer):
    return Prompt("math", "p", "exact_match", answer, None, None, "", "x:1")


def code(stub="", prefix=""):
    return Prompt("code", "p", "pass_at_1", None, "assert root(9) == 3", "root", prefix, "x:1", stub)


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("18", "18"),
        ("18", "She sells 9 eggs, so 9 * 2 = $18 a day."),
        ("18", "The answer is **18**."),
        ("18", "The answer is 18.00 dollars."),
        ("18", "so x=18"),
        ("18", "3 + 15 = 18\n#### 18\n\nQuestion: 5 more and 7 make 12"),
        ("18", "#### $18.00"),
        ("18", r"Thus \boxed{18}, as 2 * 9 shows."),
        ("18", r"\boxed{17} is wrong; it is \boxed{\text{18 eggs}}"),
        ("1200", r"It costs \$1{,}200."),
        ("1200", "in total 1,200 euros"),
        ("1,200", "1200"),
        ("1234567.5", "1,234,567.50"),
        ("3", "the numbers are 1,2,3"),
        ("-2", "It shows \u22122 degrees."),
        ("-2", "-2"),
        ("-2", "a loss of -$2"),
        ("-2", "a loss of $-2"),
        ("5", "10-5"),
        ("5", "The area is 5 m2."),
        ("5", "The area is 5 cm^2"),
        ("50%", "That is 50 %."),
        ("0.5", "half, or .5"),
        ("$18 ", "18"),
        ("12 km", "12 kilometres"),
        ("Lisbon", " lisbon.\n"),
        ("New York", "#### new  york"),
        ("Room 5", "ROOM 5"),
    ],
)
def test_right_answers(expected, answer):
    assert score(exact(expected), answer, False) is True


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("18", ""),
        ("18", "eighteen"),
        ("18", "180"),
        ("18", "1.8"),
        ("18", "18, not 19"),
        ("18", "#### 17\nthe answer is 18"),
        ("18", "#### none\n18"),
        ("2", "-2"),
        ("-5", "10-5"),
        ("1200", "1,20"),
        ("Lisbon", "The capital is Lisbon"),
        ("Room 5", "5"),
    ],
)
def test_wrong_answers(expected, answer):
    assert score(exact(expected), answer, False) is False


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"a": [1, 2.5, null, true, "x"]}', True),
        (" \n[1]\n", True),
        ('Here it is:\n```json\n{"a": 1}\n```\nAnything else?', True),
        ('```\n{"a": 1}\n```', True),
        ('```json\n{"a": 1}', True),
        ('```json\n{"a": \n```\n```json\n{"a": 1}\n```', False),
        ('Here it is: {"a": 1}', False),
        ('{"a": 1} Done.', False),
        ('{"a": 1}{"b": 2}', False),
        ('{"a": NaN}', False),
        ('{"a": -Infinity}', False),
        ("{'a': 1}", False),
        ('{"a": 1', False),
        ('"text"', False),
        ("5", False),
        ("", False),
        ("[" * 100_000, False),
    ],
)
def test_json(answer, valid):
    prompt = Prompt("json", "p", "json", None, None, None, "", "x:1")
    assert score(prompt, answer, False) is valid


def test_the_forced_start_belongs_to_the_answer():
    assert score(Prompt("json", "p", "json", None, None, None, '{"a":', "x:1"), " 1}", False) is True


def test_what_is_not_scored():
    assert score(Prompt("text", "p", None, None, None, None, "", "x:1"), "anything", True) is None
    assert score(code(), "def root(x): return 3", False) is None


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("Sure!\n```python\ndef root(x):\n    return x ** 0.5\n\nprint(root(input()))\n```\nBye.", True),
        ("```python\nimport math\nsqrt = math.sqrt\ndef root(x):\n    return sqrt(x)\n```", True),
        ("def root(x):\n    return x ** 0.5", True),
        ("```python\ndef root(x):\n    return x\n```", False),
        ("```python\ndef other(x):\n    return x ** 0.5\n```", False),
        ("```python\ndef root(x):\n    exit(0)\n```", False),
        ("I cannot do that.", False),
        ("", False),
    ],
)
def test_code(answer, passes):
    assert score(code(), answer, True) is passes


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("def root(x):\n    return math.sqrt(x)\n```\nIt works:\n```python\nroot(4)\n```", True),
        ("    return math.sqrt(x)\n", True),
        ("def root(x):\n    return math.sqrt(x)\n\ndef unfinished(", True),
        ("def root(x):\n    return x\n", False),
        ("", False),
    ],
)
def test_code_with_a_stub(answer, passes):
    assert score(code(STUB, ANSWER), answer, True) is passes


def test_program():
    prompt = code(STUB)
    assert program(prompt, "    return 3") == f"{STUB}    return 3\n\nassert root(9) == 3\n"
    whole = program(prompt, "def root(x):\n    return 3\nroot(1)")
    assert whole == f"{STUB}    pass\n\ndef root(x):\n    return 3\n\nassert root(9) == 3\n"


@pytest.mark.parametrize(
    ("answer", "block"),
    [
        ("a\n```python\nb\n```\nc\n```python\nd\n```", "b"),
        ("```py\nb", "b"),
        ("```\nb\n```", "b"),
        ("b\n```", "b\n"),
        ("```bash\nb\n```", ""),
        ("b", "b"),
    ],
)
def test_code_block(answer, block):
    assert code_block(answer) == block


@pytest.mark.filterwarnings("error")
def test_definitions():
    script = 'import re\nX: int = 1\nprint(X)\nclass A:\n    pass\ndef f():\n    return "\\d"\nassert f()\nfor'
    kept = "import re\nX: int = 1\nclass A:\n    pass\ndef f():\n    return '\\\\d'"
    assert ast.dump(ast.parse(definitions(script))) == ast.dump(ast.parse(kept))
    assert definitions("x = (" * 5000) == definitions("x = \0") == definitions("") == ""
    assert definitions("y = 1\nx = " + "-" * 100_000 + "1") == "y = 1"
