"""Every subcommand on a good bundle: what it prints, and its JSON."""

import importlib.metadata
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import GRIN, Call
from tiny_exits import make_calibration

from eexport.models.exits_file import write_calibration
from eexport.runtime import doctor
from eexport.runtime.chat import Conversation, converse
from eexport.runtime.engine import Engine, Prompt, Token


def type_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def test_version_and_help(call: Call) -> None:
    assert call("--version").out == f"eexport {importlib.metadata.version('eexport')}\n"
    for name in ("build", "run", "chat", "bench", "inspect", "verify", "doctor"):
        assert f"\n  {name} " in call().out
        assert call(name, "--help").code == 0


def test_build_tells_what_it_made_and_how_to_run_it(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "my bundle"
    done = call("build", checkpoint, "-o", out, "--precision", "fp16", "--blocks", "1,3")
    assert done.code == 0 and "\x1b" not in done.out + done.err
    assert "3, of layers 0-1, 1-3, 3-4" in done.out
    assert f"eexport run '{out}'" in done.out
    again = call("build", checkpoint, "-o", out)
    assert "--force" in again.error
    replaced = call("build", checkpoint, "-o", out, "--force", "--precision", "int8", "--json")
    facts = json.loads(replaced.out)
    assert (facts["precision"]["weights"], facts["blocks"]) == ("int8", [[0, 4]])
    assert facts["bytes"] == sum(path.stat().st_size for path in out.iterdir() if path.name != "manifest.json")
    assert [path.name for path in tmp_path.iterdir()] == ["my bundle"]


def test_run_streams_what_json_holds(call: Call, bundle: Path) -> None:
    asked = ("run", bundle, "hello", "--max-tokens", 12, "--ignore-eos")
    plain, told = call(*asked, "--stats"), json.loads(call(*asked, "--json").out)
    assert plain.out == told["text"] + "\n"
    assert "device  cpu (onnxruntime, " in plain.err and "12 tokens (length)" in plain.err
    assert len(told["token_ids"]) == told["generated_tokens"] == 12
    assert told["prefill_tokens_per_second"] > 0 < told["decode_tokens_per_second"]
    assert "\x1b" not in plain.out + plain.err


def test_run_uses_the_template_unless_raw(call: Call, bundle: Path) -> None:
    def prompt_tokens(*options: str) -> Any:
        told = json.loads(call("run", bundle, "hello", "--max-tokens", 1, "--json", *options).out)
        return told["prompt_tokens"]

    assert prompt_tokens("--raw") == 1
    assert prompt_tokens() == prompt_tokens("--chat") > 5


def test_run_reads_standard_input(call: Call, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--max-tokens", 5, "--json", "--ignore-eos")
    type_in(monkeypatch, "grüße\n".encode())
    assert (
        json.loads(call("run", bundle, "-", *options).out)["token_ids"]
        == (json.loads(call("run", bundle, "grüße", *options).out)["token_ids"])
    )
    type_in(monkeypatch, b"caf\xe9")
    assert "not UTF-8 (byte 3)" in call("run", bundle, "-").error


def test_run_passes_every_sampling_option_on(call: Call, bundle: Path) -> None:
    options = "--temperature 0.9 --top-k 40 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --seed 3"
    more = "--frequency-penalty 0.1 --presence-penalty 0.1 --logit-bias 7=-100 --context 64 --ignore-eos"
    asked = ("run", bundle, "hello", "--json", "--max-tokens", 8, *options.split(), *more.split())
    first, second = (json.loads(call(*asked).out) for _ in range(2))
    assert first["token_ids"] == second["token_ids"] and first["context"] == 64
    forced = call("run", bundle, "hello", "--logit-bias", "9=100", "--max-tokens", 3, "--ignore-eos", "--json")
    assert json.loads(forced.out)["token_ids"] == [9, 9, 9]


def test_run_stops_at_a_stop_string(call: Call, endless: Path) -> None:
    told = json.loads(call("run", endless, "hi", "--stop", "x", "--stop", GRIN + GRIN[0], "--json").out)
    assert (told["text"], told["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("prompt", ["a", "ab"])
def test_run_goes_on_when_the_cache_has_to_grow(call: Call, endless: Path, prompt: str) -> None:
    told = json.loads(call("run", endless, prompt, "--raw", "--max-tokens", 300, "--json").out)
    assert told["text"] == GRIN * 60 and told["finish_reason"] == "length"


def test_what_the_authors_recommend_is_the_default(
    call: Call, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["sampling"] = {"temperature": 0.7, "top_k": 20.0}
    copy = tmp_path / "b"
    copy.mkdir()
    for path in bundle.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    seen: list[dict[str, Any]] = []

    def generate(engine: Engine, prompt: Prompt, **sampling: Any) -> Iterator[Token]:
        seen.append(sampling)
        return original(engine, prompt, **sampling)

    original = Engine.generate
    monkeypatch.setattr(Engine, "generate", generate)
    assert call("run", copy, "hello", "--max-tokens", 1, "--top-k", 5).code == 0
    assert (seen[0]["temperature"], seen[0]["top_k"], seen[0]["max_tokens"]) == (0.7, 5, 1)
    assert call("run", copy, "hello", "--max-tokens", 1).code == 0
    assert type(seen[1]["top_k"]) is int


def test_chat_from_a_pipe(call: Call, endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "hi\n\n/help\n/reset\nMøre\n/exit\nnot read\n".encode())
    done = call("chat", endless, "--max-tokens", 5, "--system", "Smile.")
    assert done.code == 0 and done.out == (GRIN + "\n") * 2
    assert "Ctrl-D" in done.err and "forgotten" in done.err and "limit of tokens" in done.err
    type_in(monkeypatch, b"hi\n")
    assert call("chat", endless, "--max-tokens", 4).out == "\N{GRINNING FACE}\n"


def test_chat_reuses_the_cache_and_says_the_same(bundle: Path) -> None:
    warm = Engine.load(bundle)
    conversation = Conversation(warm, max_tokens=8, ignore_eos=True)
    said: list[str] = []
    for text in ("hello world", "and then?"):
        said.clear()
        assert conversation.reply(text, said.append) == "length"
    assert warm.stats().reused_tokens > 8
    fresh = Engine.load(bundle).generate(conversation.messages[:-1], max_tokens=8, ignore_eos=True, reuse_cache=False)
    assert "".join(token.text for token in fresh) == "".join(said) == conversation.messages[-1]["content"]
    conversation.reset()
    assert conversation.messages == []


def test_chat_goes_on_after_a_message_that_does_not_fit(bundle: Path) -> None:
    conversation = Conversation(Engine.load(bundle, context=48), max_tokens=1)
    lines = iter(["long " * 60, "hi"])
    notes: list[str] = []

    def ask() -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    converse(conversation, ask, lambda _text: None, notes.append)
    assert "/reset" in notes[0]
    assert [message["content"] for message in conversation.messages][0] == "hi"


def test_chat_keeps_what_an_interrupted_reply_said(endless: Path) -> None:
    conversation = Conversation(Engine.load(endless))

    def interrupt(text: str) -> None:
        if text:
            raise KeyboardInterrupt

    assert conversation.reply("hi", interrupt) is None
    assert conversation.messages[-1] == {"role": "assistant", "content": GRIN[0]}


def test_bench(call: Call, bundle: Path) -> None:
    asked = ("bench", bundle, "--prompt-tokens", 200, "--tokens", 8, "--repeats", 2)
    told = json.loads(call(*asked, "--json").out)
    assert (told["prompt_tokens"], told["tokens"], told["repeats"]) == (200, 8, 2)
    assert told["prefill_tokens_per_second"] > 0 < told["decode_tokens_per_second"]
    assert 0 < told["token_ms_p50"] <= told["token_ms_p95"]
    assert told["kv_bytes"] == 4 * 2 * 2 * 16 * 4 * 208  # layers, key and value, kv heads, width, bytes, tokens
    shown = call(*asked)
    assert "tok/s" in shown.out and "\x1b" not in shown.out and shown.err == ""
    assert "context of 512" in call("bench", bundle).error


def test_inspect(call: Call, bundle: Path) -> None:
    facts = json.loads(call("inspect", bundle, "--json").out)
    stages, shared = facts["stages"], facts["shared_files"]
    assert [stage["stage"] for stage in stages] == ["embed", "block_00", "block_01", "head"]
    assert [stage["layers"] for stage in stages] == [None, [0, 2], [2, 4], None]
    on_disk = sum(path.stat().st_size for path in bundle.iterdir() if path.name != "manifest.json")
    assert sum(stage["bytes"] for stage in stages) + sum(shared.values()) == facts["bytes"] == on_disk
    assert facts["kv"]["bytes_per_token"] * 512 == facts["kv"]["bytes_at_full_context"]
    assert facts["candidate_exits"] == [2] and facts["built_with"]["options"]["precision"] == "int8"
    shown = call("inspect", bundle).out
    assert "block_01" in shown and "per 1k tokens" in shown and "after layers 2" in shown and "\x1b" not in shown


def test_a_bundle_with_trained_exits(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    """It is built, looked at, checked and run as any other."""
    exits, out = tmp_path / "exits", tmp_path / "bundle"
    write_calibration(make_calibration(checkpoint, {1: ("hidden",), 4: ("embedding", "previous")}), exits)
    built = call("build", checkpoint, "-o", out, "--calibration", exits)
    assert built.code == 0 and "blocks  2, of layers 0-1, 1-4" in built.out
    told = json.loads(call("inspect", out, "--json").out)
    assert [(head["depth"], head["reads"], head["leaves"]) for head in told["exits"]["heads"]] == [
        (1, ["hidden"], True),
        (4, ["embedding", "previous"], False),
    ]
    assert told["exits"]["heads"][0]["entropy_threshold"] == 0.5 and told["exits"]["draft_vocabulary"] == 64
    on_disk = sum(path.stat().st_size for path in out.iterdir() if path.name != "manifest.json")
    assert sum(stage["bytes"] for stage in told["stages"]) + sum(told["shared_files"].values()) == on_disk
    shown = call("inspect", out).out
    assert "after layers 1 (hidden; under 0.5 nats), 4 (embedding+previous; drafts)" in shown
    assert "draft vocabulary 64; predictor on hidden.1, hidden.2; full depth after a token of over 1.5 nats" in shown
    verified = call("verify", out)
    assert verified.code == 0 and "exit_04.hidden" in verified.out
    assert call("run", out, "hi", "--max-tokens", 3).code == 0
    assert call("bench", out, "--prompt-tokens", 20, "--tokens", 4, "--repeats", 1).code == 0


def test_verify(call: Call, bundle: Path) -> None:
    told = json.loads(call("verify", bundle, "--json").out)
    assert told["ok"] and told["rows"] == {} and told["failures"] == []
    assert [stage["stage"] for stage in told["stages"]][-2:] == ["head", "chain"]
    shown = call("verify", bundle)
    assert shown.code == 0 and shown.out.splitlines()[-1].startswith("ok on cpu")


def test_doctor(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(call("doctor", "--json").out)
    cpu = found["backends"][0]
    assert found["ok"] and cpu["works"] and "test graph" in cpu["detail"]
    assert all(check["works"] or (check["detail"] and check["mend"]) for check in found["backends"])
    assert "CPUExecutionProvider" in found["providers"] and found["packages"]["onnxruntime"]
    assert "works" in call("doctor").out

    monkeypatch.setattr(doctor, "_version", lambda *names: "1.32.0")
    (problem,) = json.loads(call("doctor", "--json").out)["problems"]
    assert "onnxruntime-gpu are both installed" in problem and "pip uninstall" in problem
    assert "problem: " in call("doctor").out


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise ImportError('libgomp.so.1: cannot open shared object file')", "libgomp.so.1"),
        ("import os; os.kill(os.getpid(), 4)", "crashed (signal 4)"),
    ],
)
def test_doctor_where_onnxruntime_does_not_load(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, says: str
) -> None:
    (tmp_path / "onnxruntime.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = call("doctor")
    assert done.code == 1 and says in done.out and "pip install --force-reinstall" in done.out
