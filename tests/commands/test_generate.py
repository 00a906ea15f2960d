"""`python -m qtrain generate`: what it writes where, in which scheme, and a chat in a terminal."""

import builtins
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qtrain.__main__ import main
from qtrain.commands import generate
from qtrain.data.tokenizers.tokenizer import load_tokenizer
from qtrain.models import Generation, build_model, read_model_source
from tests.commands.generated import TURNS
from tests.system import Outcome, call, flags, serving, wait_until


def generated(*words: str, **settings) -> Outcome:
    done = call(main, ["generate", *words, *flags(**{"device": "cpu", "max_new_tokens": 9, **settings})])
    assert done.code == 0, done.err
    return done


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_texts_are_on_stdout_and_in_the_file_and_all_else_is_on_stderr(runs_folder, tmp_path):
    out = tmp_path / "sub/out.jsonl"
    done = generated("chat/hf", "--logprobs", prompts="mixed.jsonl", samples=2, json=out, batch_size=4)
    found, tokenizer = records(out), load_tokenizer("chat/hf", "-")
    assert [r["prompt"] for r in found] == ["The quick é"] * 2 + [TURNS[:1]] * 2 + ["a"] * 2
    assert [r["sample"] for r in found] == [0, 1] * 3
    assert done.out == "".join(record["text"] + "\n" for record in found)
    for record in found:
        assert record["tokens"] == len(record["ids"]) == len(record["logprobs"])
        assert record["finish"] in ("eos", "length") and (record["finish"] == "eos" or record["tokens"] == 9)
        assert record["text"] == tokenizer.decode(record["ids"]) and max(record["logprobs"]) <= 0
        assert record["tok_s"] == pytest.approx(record["tokens"] / record["seconds"], rel=0.1)
    head, *names, last = done.err.splitlines()
    assert head == "model     chat/hf" and names[2] == "---- 2 (1 of 2): Count." and len(names) == 6
    tokens = sum(record["tokens"] for record in found)
    assert re.fullmatch(rf"3 prompts, {tokens} tokens, \S+ s; prefill \S+ tok/s, decode \S+ tok/s", last)
    alone = generated("chat/hf", prompts="mixed.jsonl", samples=2, batch_size=1)
    assert alone.out == done.out, "the batch changes the texts"


def test_deterministic_log_probabilities_do_not_depend_on_the_batch(runs_folder, tmp_path):
    same = {"quantize": "int8", "quantize_lm_head": True, "deterministic": True, "prompts": "mixed.jsonl"}
    found = []
    for size in (1, 3):
        generated("chat/hf", "--logprobs", **same, batch_size=size, json=tmp_path / f"{size}.jsonl")
        found.append([record["logprobs"] for record in records(tmp_path / f"{size}.jsonl")])
    assert found[0] == found[1]
    done = call(main, ["generate", "chat/hf", *flags(deterministic=True, prompt=["a"], device="cpu")])
    assert done.code == 2 and not done.out
    assert "--deterministic: logits of chat/hf depend on the batch: layers.0.attn.qkv is in high precision" in done.err


def test_a_conversation_is_read_as_in_training(runs_folder, monkeypatch):
    read = []
    monkeypatch.setattr(Generation, "__init__", recording(read))
    generated("chat", prompts="mixed.jsonl")
    text = "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n"
    assert bytes(read[1][:-1]).decode() + chr(read[1][-1]) == text
    read.clear()
    generated("chat", prompts="mixed.jsonl", system="Be brief.")
    assert bytes(read[1]).decode() == "<|im_start|>system\nBe brief.<|im_end|>\n" + text
    assert bytes(read[0]).decode() == "The quick é"


def recording(read: list):
    """`Generation.__init__` that keeps what is read."""
    own = Generation.__init__

    def begin(self, model, prompts, *rest):
        read.extend(prompts)
        own(self, model, prompts, *rest)

    return begin


def test_a_run_generates_in_its_scheme_and_its_export_in_the_same_codes(runs_folder, tmp_path):
    settings = {"prompt": ["One", "Another prompt"], "logprobs": True, "seed": 3}

    def logprobs(model: str, says: str, **changes) -> list:
        done = generated(model, **settings, **changes, json=tmp_path / "x.jsonl")
        assert done.err.startswith(says), done.err
        return [record["logprobs"] for record in records(tmp_path / "x.jsonl")]

    trained = logprobs("pre", "model     pre/checkpoints/00000002\nscheme    int8, that of its training\n")
    says = "model     pre/hf\nscheme    int8 in 8 of 9 linears, codes alone are kept\n"
    assert logprobs("pre", says, quantize="int8") == trained
    assert logprobs("pre/hf", "model     pre/hf\n----") != trained


def test_other_schemes_by_name_and_of_the_head(runs_folder, tmp_path):
    rules = {"quantize": "fp8_rowwise", "quantize_overrides": {"layers.0.*": "bf16"}}
    done = generated("pre", "--quantize_lm_head", prompt="x", **rules, temperature=0)
    assert "scheme    fp8_rowwise in 5 of 9 linears" in done.err


def test_models_of_transformers_generate_without_a_cache(runs_folder, tmp_path):
    config = {"model_type": "gpt2", "vocab_size": 258, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    (tmp_path / "gpt2.json").write_text(json.dumps(config))
    model = build_model(read_model_source(str(tmp_path / "gpt2.json")), impl="hf", seed=1)
    model.model.save_pretrained(tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"pre/hf/{name}", tmp_path / "gpt2")
    out = tmp_path / "out.jsonl"
    done = generated(str(tmp_path / "gpt2"), prompt=["abc", "a"], temperature=0, json=out)
    assert "cache     none for models of transformers" in done.err
    for record in records(out):
        ids = torch.tensor([list(record["prompt"].encode())])
        options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 257, "eos_token_id": 257}
        expected = model.model.eval().generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert record["ids"] == [i for i in expected[0, ids.shape[1] :].tolist() if i != 257]


def test_a_stop_string_ends_a_text_before_it(runs_folder, tmp_path, monkeypatch):
    """Also where the host sees it several tokens later, as on a GPU."""
    monkeypatch.setattr("qtrain.models.generation.engine.runs_ahead", lambda device: True)
    settings = {"prompt": "x", "max_new_tokens": 200, "seed": 1}
    generated("chat/hf", **settings, json=tmp_path / "free.jsonl")
    (free,) = records(tmp_path / "free.jsonl")
    # The host looks after tokens 0, 8, 16, ...: one that is not the last it sees.
    letters = [(at, chr(token)) for at, token in enumerate(free["ids"]) if at % 8 and token < 128]
    stop = next(c for at, c in letters if c.isalnum() and free["ids"].index(ord(c)) == at)
    done = generated("chat/hf", **settings, stop=[stop, "never"], json=tmp_path / "stopped.jsonl")
    (stopped,) = records(tmp_path / "stopped.jsonl")
    assert stopped["finish"] == "stop" and stopped["text"] == free["text"].partition(stop)[0]
    assert done.out == stopped["text"] + "\n"
    assert stopped["ids"] == free["ids"][: free["ids"].index(ord(stop)) + 1]


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_keeps_its_history_until_it_is_reset(runs_folder, monkeypatch):
    read, said = [], iter(["Hello", "", "/what", "More", "/reset", "Anew", "/quit"])
    monkeypatch.setattr(Generation, "__init__", recording(read))
    monkeypatch.setattr(builtins, "input", lambda prompt: next(said))
    monkeypatch.setattr(generate, "_is_terminal", lambda: True)
    done = generated("chat/hf", "--chat", system="S", max_new_tokens=3)
    first, second, third = (bytes(ids).decode(errors="replace") for ids in read)
    system, opening = "<|im_start|>system\nS<|im_end|>\n", "<|im_start|>assistant\n"
    assert first == f"{system}<|im_start|>user\nHello<|im_end|>\n{opening}"
    answer = second.removeprefix(first).partition("<|im_end|>\n<|im_start|>user\nMore")[0]
    assert second == f"{first}{answer}<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n{opening}"
    assert done.out.splitlines()[0] == answer or not answer.isprintable()
    assert third == f"{system}<|im_start|>user\nAnew<|im_end|>\n{opening}"
    assert "/what: unknown; /reset begins anew" in done.err and "3 prompts, " in done.err


TERMINAL = """
import fcntl, signal, termios
import qtrain.__main__
MAINS["qtrain"] = qtrain.__main__.main
os.setsid()
terminal = os.open({name!r}, os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)  # Ctrl-C then is a signal
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a script
"""


def test_a_chat_in_a_terminal(runs_folder):
    """Ctrl-C stops an answer and not the program, nor does it at the prompt; Ctrl-D ends it."""
    own, name = os.openpty()
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK)
    screen = bytearray()

    def shows(text: str) -> bool:
        try:
            screen.extend(os.read(own, 65536))
        except OSError:  # nothing yet
            return False
        return text.encode() in screen

    def expect(text: str, look: Callable[[], bool] | None = None) -> None:
        try:
            wait_until(look or (lambda: shows(text)), 60)
        except AssertionError:
            pytest.fail(f"{text!r} does not show: {bytes(screen)!r}")
        screen.clear()

    def interrupt(text: str) -> None:
        """Again after 5 s: a signal between a prompt and the wait for a key is seen with the key."""
        pressed = 0.0

        def answered() -> bool:
            nonlocal pressed
            if time.monotonic() > pressed + 5:
                pressed = time.monotonic()
                os.write(own, b"\x03")
            return shows(text)

        expect(text, answered)

    words = flags(chat=True, max_new_tokens=4000, temperature=0, device="cpu")
    with serving(runs_folder, "import qtrain.commands.generate, qtrain.train.generate.source") as server:
        process = server.start("qtrain", ["generate", "chat/hf", *words], patch=TERMINAL.format(name=os.ttyname(name)))
        prompt = "Ctrl-C stops an answer\r\n> "
        expect(prompt)  # with the line before: a message of the start may have "> " too
        interrupt(prompt)
        os.write(own, "Zähle\n".encode())
        expect("Zähle\r\n")
        wait_until(lambda: shows(""), 60)
        interrupt("[stopped]")
        os.write(own, b"/reset\n")
        expect("a new conversation")
        os.write(own, b"\x04")
        expect("1 prompts, ")
        assert process.wait().code == 0
    os.close(own), os.close(name)
