"""Is an answer right? Exact match, valid JSON, and code that passes its tests."""

import ast
import json
import re
import warnings
from decimal import Decimal
from typing import NoReturn

from eexport.calibration.data import Prompt
from eexport.calibration.sandbox import run_limited

# No digits after a letter or ^, as in `m2` and `cm^2`; a minus between two operands is no sign.
_NUMBER = re.compile(
    r"(?:(?<![A-Za-z0-9)\]])-)?(?<![A-Za-z0-9^])"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)
_UNIT = re.compile(r"\s*(?:%|°?[A-Za-z]+)?\.?")
_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def score(prompt: Prompt, answer: str, run_code: bool) -> bool | None:
    """Whether ``answer``, the text after ``prompt.prefix``, is right.

    Returns:
        None where that cannot be said: for free text, and for code unless ``run_code``.

    Raises:
        EexportError: Code cannot be run within limits on this system.
    """
    text = prompt.prefix + answer
    match prompt.task:
        case "exact_match":
            return same_answer(prompt.answer or "", text)
        case "json":
            return is_json(text)
        case "pass_at_1" if run_code:
            return run_limited(program(prompt, text)) is None
    return None


def same_answer(expected: str, text: str) -> bool:
    r"""Whether the final answer in ``text`` is ``expected``.

    The final answer is what follows ``####`` (GSM8K's convention), else the last ``\boxed{}``, else all of the text.
    Of a number's place the first number counts after ``####``, elsewhere the last, whatever surrounds it: ``$1,200.``
    equals ``1200.0``. An expected answer that is no number is compared as text, without regard to case.
    """
    text, after_mark = _final(text)
    number = _lone_number(expected)
    if number is None:
        return _folded(text) == _folded(expected)
    found = _NUMBER.findall(_plain(text))
    return bool(found) and _decimal(found[0 if after_mark else -1]) == number


def is_json(text: str) -> bool:
    """Whether the text, or else its first fenced block, is one JSON object or array and nothing more."""
    fenced = _FENCED.search(text)
    return _parses(text) or (fenced is not None and _parses(fenced[1]))


def program(prompt: Prompt, answer: str) -> str:
    """The script that tests an answer; it runs to its end where the answer is right.

    The stub comes first, as a function without a body: it has the imports and helpers. An answer that does not
    define the function is taken for the rest of the stub.
    """
    code = code_block(answer)
    whole = re.search(rf"^def {re.escape(prompt.entry_point or '')}\b", code, re.MULTILINE)
    if not prompt.stub:
        text = definitions(code)
    elif whole:
        text = f"{prompt.stub}    pass\n\n{definitions(code)}"
    else:
        text = prompt.stub + code
    return f"{text}\n\n{prompt.test}\n"


def code_block(answer: str) -> str:
    """The code of an answer that begins inside a block, or has a block of its own."""
    if block := re.search(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", answer, re.DOTALL):
        return block[1]
    return answer.split("```")[0]


def definitions(code: str) -> str:
    """The imports, functions, classes and constants of a script: not the tests and prints that a model adds.

    What a cut-off script has of an unfinished end is dropped, up to the first line with which it parses.
    """
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    lines = code.splitlines()
    while lines:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a model's "\d" is not the user's concern
                body = ast.parse("\n".join(lines)).body
            return "\n".join(ast.unparse(node) for node in body if isinstance(node, kept))
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # a null character, or deep nesting
            lines.pop()
    return ""


def _final(text: str) -> tuple[str, bool]:
    """The part of an answer that holds the result, and whether it follows ``####``."""
    _, mark, rest = text.partition("####")
    if mark:
        return rest.strip().split("\n")[0], True
    boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    return (boxed[-1] if boxed else text), False


def _lone_number(text: str) -> Decimal | None:
    """The number that a text is, apart from a currency sign and a unit of one word."""
    text = _plain(text).strip()
    match = _NUMBER.match(text)
    return _decimal(match[0]) if match and _UNIT.fullmatch(text, match.end()) else None


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _plain(text: str) -> str:
    """The text without LaTeX and currency signs around its numbers, and with one kind of minus."""
    for old, new in (("{,}", ","), ("\\$", "$"), ("\\,", ""), ("\\!", ""), ("\u2212", "-")):
        text = text.replace(old, new)
    return re.sub(r"(-?)\s?[$€£]\s?(?=[-.0-9])", r" \1", text)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).strip("*`\"' ").removesuffix(".")


def _parses(text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
