"""Runs and files of prompts that the tests of `python -m qtrain generate` share."""

import json
import shutil
from pathlib import Path

import pytest

import llm_finetune
import llm_pretrain
from tests.data.corpora import write_jsonl
from tests.system import call, flags, only_run, write_model

TINY = {"model": "tiny.json", "pretrained": False, "seq_len": 96, "batch_size": 2, "n_steps": 2, "device": "cpu"}
TEXT = {"type": "text", "paths": "jsonl/0.jsonl", "tokenizer": "byte"}
CHATS = {"type": "chat", "dataset": "chats.jsonl", "tokenizer": "byte", "template": "chatml"}
TURNS = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two."}]


def make_folder(folder: Path) -> Path:
    """Runs `pre`, in INT8, and `chat`, whose weights are large enough for a text that varies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_model(Path("tiny.json"), max_position_embeddings=4096, initializer_range=0.3)
        write_jsonl(Path("jsonl"))
        Path("chats.jsonl").write_text("\n".join([json.dumps({"messages": TURNS})] * 20))
        for script, data, name, scheme in (
            (llm_pretrain, TEXT, "pre", "int8"),
            (llm_finetune, CHATS, "chat", "bf16"),
        ):
            done = call(script.main, flags(**TINY, train_ds=data, quantize=scheme))
            assert done.code == 0, done.err
            only_run(Path("runs"), script.__name__).rename(name)
        Path("mixed.jsonl").write_text(
            '{"prompt":"The quick é"}\n\n' + json.dumps({"messages": TURNS[:1]}) + "\n" + '{"prompt":"a"}\n'
        )
    return folder


MESSAGES = json.dumps(TURNS[:1])
FILES = {
    "broken.jsonl": '{"prompt":"a"}\n\n{"prompt":"b"\n',
    "list.jsonl": '["a"]\n',
    "both.jsonl": f'{{"prompt":"a","messages":{MESSAGES}}}\n',
    "neither.jsonl": '{"text":"a"}\n',
    "twice.jsonl": '{"prompt":"a","prompt":"b"}\n',
    "number.jsonl": '{"prompt":5}\n',
    "blank.jsonl": '{"prompt":"ok"}\n{"prompt":""}\n',
    "surrogate.jsonl": '{"prompt":"\\ud800"}\n',
    "talk.jsonl": f'{{"messages":{MESSAGES}}}\n',
    "no_role.jsonl": '{"messages":[{"content":"x"}]}\n',
    "no_messages.jsonl": '{"messages":[]}\n',
    "answered.jsonl": json.dumps({"messages": TURNS}) + "\n",
    "empty.txt": "\n  \n",
    "long.txt": "short\n" + "x" * 5000 + "\n",
    "prompts.md": "a\n",
}


def make_mistakes(folder: Path) -> Path:
    """`make_folder`, with prompts and models that cannot be used."""
    make_folder(folder)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "latin1.txt").write_bytes(b"\xe9t\xe9\n")
    shutil.copytree(folder / "pre/checkpoints/00000002", folder / "images/checkpoints/00000002")
    shutil.copytree(folder / "pre/hf", folder / "mute")
    for file in ("tokenizer.json", "tokenizer_config.json", "checksums.json"):
        (folder / "mute" / file).unlink()
    shutil.copytree(folder / "pre/hf", folder / "foreign")
    config = json.loads((folder / "pre/hf/config.json").read_text())
    (folder / "foreign/config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    (folder / "foreign/checksums.json").unlink()
    shutil.copytree(folder / "pre", folder / "only_checkpoints")
    shutil.rmtree(folder / "only_checkpoints/hf")
    return folder
