"""A mistake about generation is one short line that names the flag, what was given and what is allowed; no model is
loaded, and nothing is written."""

from pathlib import Path

import pytest

from qtrain.__main__ import main
from qtrain.commands import generate
from qtrain.train.assembly.measured import MeasuredModel
from tests.system import call, flags, tree

P = {"prompt": ["a"]}
MISTAKES = [
    ([], P, "--model: no model is named; give a run folder, a checkpoint, a folder or a hub id"),
    (["pre"], {}, '--prompt: nothing to continue is given; give --prompt "TEXT", --prompts FILE or --chat'),
    (["pree"], P, "--model: unknown model 'pree'"),
    (["."], P, "Give a checkpoint or a run folder. It holds models: give one, such as "),
    (["tiny.json"], P, "--model: tiny.json has no tokenizer"),
    (["mute"], P, "--model: mute has no tokenizer; put tokenizer.json beside its config.json"),
    (["foreign"], {"prompt": ["xyz"]}, "makes the id 122 of the prompt, and the model's vocabulary has 100"),
    (["images"], P, "is not a checkpoint within the run folder of a language model"),
    (["pre"], {"prompt": [""]}, "--prompt: the value is empty"),
    (["pre"], {"prompt": ["x" * 4097]}, "--prompt: the prompt has 4,097 tokens, pre has 4,096 positions; shorten it"),
    (["pre"], {"prompts": "long.txt"}, "--prompts (long.txt, line 2): the prompt has 5,000 tokens"),
    (["pre"], {**P, "prompts": "long.txt"}, "--prompt: it does not go with --prompts; give one of them"),
    (["pre"], {"prompts": "mixed.json"}, "--prompts: mixed.json is neither .txt, a prompt a line, nor .jsonl"),
    (["pre"], {"prompts": "prompts.md"}, "--prompts: prompts.md is neither .txt"),
    (["pre"], {"prompts": "mixd.jsonl"}, "--prompts: the file mixd.jsonl does not exist. Did you mean mixed.jsonl?"),
    (["pre"], {"prompts": "empty.txt"}, "--prompts: empty.txt holds no prompts; write one a line"),
    (["pre"], {"prompts": "latin1.txt"}, "--prompts: latin1.txt is not UTF-8 text (byte 0)"),
    (["pre"], {"prompts": "broken.jsonl"}, "--prompts (broken.jsonl, line 3): not valid JSON"),
    (["pre"], {"prompts": "list.jsonl"}, 'line 1): a line is an object with "prompt" or "messages", not a list'),
    (["pre"], {"prompts": "both.jsonl"}, 'line 1): the object has both of "prompt" and "messages"'),
    (["pre"], {"prompts": "neither.jsonl"}, 'line 1): the object has neither of "prompt" and "messages"'),
    (["pre"], {"prompts": "twice.jsonl"}, "line 1): the key 'prompt' is given twice"),
    (["pre"], {"prompts": "number.jsonl"}, 'line 1): "prompt" is 5, not text'),
    (["pre"], {"prompts": "blank.jsonl"}, 'line 2): "prompt" is empty; give a text to continue'),
    (["pre"], {"prompts": "surrogate.jsonl"}, 'line 1): "prompt" is not valid Unicode text'),
    (["pre"], {"prompts": "talk.jsonl"}, "line 1): the tokenizer of pre has no chat template; give plain prompts"),
    (["chat"], {"prompts": "no_role.jsonl"}, "line 1): a message has no role or no text as content"),
    (["chat"], {"prompts": "no_messages.jsonl"}, "line 1): the column 'messages' holds no list of messages"),
    (["chat"], {"prompts": "answered.jsonl"}, "line 1): the last message is the assistant's"),
    (["pre"], {"chat": True}, "--chat: the tokenizer of pre has no chat template"),
    (["chat"], {"chat": True, "prompts": "talk.jsonl"}, "--prompts: it does not go with --chat"),
    (["chat"], {"chat": True, "samples": 2}, "--samples: --chat has one text at a time"),
    (["chat"], {"chat": True}, "--chat: stdin is no terminal; give --prompts FILE with conversations instead"),
    (["chat"], {**P, "system": "Be brief."}, "--system: no conversation has it; give --chat, or --prompts FILE.jsonl"),
    (["pre"], {**P, "quantize": "int9"}, "--quantize: unknown scheme 'int9'. Did you mean 'int8'?"),
    (["pre"], {**P, "quantize": "auto"}, "--quantize: 'auto' times schemes as they train; name the scheme"),
    (["pre"], {**P, "quantize": "bitnet"}, "--quantize: 'bitnet' rounds latent weights, which checkpoints alone have"),
    (
        ["pre"],
        {**P, "quantize": "qat", "quantize_kwargs": {"weight": "int4_g128"}},
        "--quantize: 'qat' quantizes none of the model's 9",
    ),
    (
        ["pre"],
        {**P, "quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}},
        "--quantize_kwargs.scaling: delayed scales are of earlier training steps",
    ),
    (["pre"], {**P, "quantize": "int8", "quantize_kwargs": {"granularty": "x"}}, "Did you mean 'granularity'?"),
    (
        ["pre"],
        {**P, "quantize": "int8", "quantize_overrides": {"*.gate": "bf16"}},
        "--quantize_overrides: unknown linear",
    ),
    (["pre"], {**P, "quantize_lm_head": True}, "--quantize_lm_head: it needs --quantize"),
    (
        ["pre"],
        {**P, "quantize_kwargs": {}, "quantize": "int8", "quantise": "x"},
        "--quantise: unknown flag. Did you mean",
    ),
    (
        ["only_checkpoints"],
        {**P, "quantize": "int8"},
        "runs in the scheme of its training, int8. Leave it out, or write",
    ),
    (["pre"], {**P, "logprobs": True}, "--logprobs: they are written to the file of --json; name one"),
    (["pre"], {**P, "json": "pre"}, "--json: cannot write pre: "),
    (["pre"], {**P, "json": "tiny.json/x.jsonl"}, "--json: cannot write tiny.json/x.jsonl: "),
    (["pre"], {**P, "temperature": -1}, "--temperature: -1.0 is out of range; it must be a number from 0 to 100"),
    (["pre"], {**P, "temperature": "nan"}, "--temperature: nan is out of range"),
    (["pre"], {**P, "top_p": 1.5}, "--top_p: 1.5 is out of range; it must be a number from 0 to 1"),
    (["pre"], {**P, "min_p": -0.1}, "--min_p: -0.1 is out of range"),
    (["pre"], {**P, "top_k": -1}, "--top_k: -1 is out of range"),
    (["pre"], {**P, "repetition_penalty": 0}, "--repetition_penalty: 0.0 is out of range"),
    (["pre"], {**P, "max_new_tokens": 0}, "--max_new_tokens: 0 is out of range"),
    (["pre"], {**P, "stop": [""]}, "--stop: the value is empty"),
    (
        ["pre"],
        {**P, "dtype": "fp32"},
        "--dtype: pre/checkpoints/00000002 is in the dtype of its training; leave it out",
    ),
    (["pre"], {**P, "device": "tpu"}, "--device: 'tpu' is not allowed"),
]


def labels(value) -> str | None:
    return value[:60] if isinstance(value, str) else ""


@pytest.mark.parametrize(("words", "settings", "says"), MISTAKES, ids=labels)
def test_it_is_one_line_before_a_model_is_loaded(words, settings, says, runs_folder, monkeypatch):
    def load(*arguments, **options):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(MeasuredModel, "loaded", load)
    monkeypatch.setattr(MeasuredModel, "in_codes", load)
    monkeypatch.setattr(generate, "_is_terminal", lambda: "terminal" not in says)
    before = tree(Path())
    done = call(main, ["generate", *words, *flags(**{"device": "cpu", **settings})])
    assert done.code == 2 and says in done.err, done.err
    assert done.err.count("\n") == 1 and len(done.err) < 420 and "Traceback" not in done.err
    assert not done.out and tree(Path()) == before
