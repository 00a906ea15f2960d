"""Exported folders and adapters with any byte changed are refused; those without checksums load as before."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from qtrain.core.checksums import BLOCK_BYTES, MAX_BLOCKS, NAME, sampled_checksums
from qtrain.core.errors import UserError
from qtrain.data.tokenizers.tokenizer import ByteTokenizer, load_tokenizer
from qtrain.models import (
    AdaptedOriginal,
    Lora,
    ModelSource,
    add_lora,
    as_lora,
    build_model,
    export_hf,
    load_adapter,
    read_model_source,
    save_adapter,
)
from tests.system import TINY


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with a model, hf, and an adapter of it."""
    folder = tmp_path_factory.mktemp("exported")
    source = ModelSource("tiny", TINY, "--model")
    model, lora = build_model(source, seed=1), Lora(r=2)
    export_hf(model, source, folder / "hf", ByteTokenizer().with_chat_template("{{ messages }}"))
    add_lora(model, lora, seed=0)
    save_adapter(model, lora, "hf", folder / "adapter")
    return folder


@pytest.fixture
def copied(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copied"))


def load_model(folder: Path) -> torch.nn.Module:
    return build_model(read_model_source(str(folder / "hf")), pretrained=True)


def load_lora(folder: Path) -> None:
    lora = as_lora({"adapter": str(folder / "adapter")})
    model = build_model(ModelSource("tiny", TINY, "--model"), seed=1)
    add_lora(model, lora, seed=0)
    load_adapter(model, lora.adapter)


LOAD = {"hf": load_model, "adapter": load_lora}
COVERED = [("adapter", name) for name in ("adapter_config.json", "adapter_model.safetensors")] + [
    ("hf", name)
    for name in ("chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
]


def test_every_file_but_the_generation_settings_is_covered(exported):
    found = {(kind, name) for kind in LOAD for name in json.loads((exported / kind / NAME).read_text())["files"]}
    assert found == set(COVERED)
    left = {p.name for p in (exported / "hf").iterdir()} - {name for _, name in found}
    assert left == {NAME, "generation_config.json"}


@pytest.mark.parametrize(("kind", "name"), COVERED)
def test_a_flip_of_any_byte_is_refused_with_the_file_and_how_to_accept_it(copied, kind, name):
    file = copied / kind / name
    data, chance = file.read_bytes(), random.Random(name)
    for at in (0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(6))):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        with pytest.raises(UserError, match=f"{name} is not as it was exported.* is wanted, delete .*{NAME}"):
            LOAD[kind](copied)
    file.unlink()
    with pytest.raises(UserError, match=f"{name}"):
        LOAD[kind](copied)
    file.write_bytes(data)
    LOAD[kind](copied)


@pytest.mark.parametrize("kind", LOAD)
def test_a_damaged_list_of_checksums_is_refused_and_a_folder_without_one_loads(copied, kind):
    listed = copied / kind / NAME
    for content in (b"", b"{", b"[]", b'{"files": 5}', b'{"files": {"../x": "0"}}', b"\xff\xfe"):
        listed.write_bytes(content)
        with pytest.raises(UserError, match=f"{NAME}.* if the change is wanted, delete"):
            LOAD[kind](copied)
    listed.unlink()
    LOAD[kind](copied)


def test_settings_of_generation_may_be_edited(copied):
    (copied / "hf/generation_config.json").write_text('{"temperature": 0.5}')
    load_model(copied)


def test_a_tokenizer_is_checked_where_it_alone_is_read(copied):
    assert load_tokenizer(str(copied / "hf"), "--train_ds").vocab_size == 258
    file = copied / "hf/tokenizer.json"
    file.write_text(file.read_text().replace("257", "256"))
    for name in ("hf", "hf/tokenizer.json"):
        with pytest.raises(UserError, match=r"--train_ds: .*tokenizer\.json is not as it was exported"):
            load_tokenizer(str(copied / name), "--train_ds")


def test_other_ways_to_read_the_weights_check_them_too(copied):
    model = load_model(copied)
    add_lora(model, Lora(r=2), seed=0)
    source = read_model_source(str(copied / "hf"))
    with (copied / "hf/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    for load in (
        lambda: build_model(source, impl="hf", pretrained=True),
        lambda: AdaptedOriginal(model, source),
    ):
        with pytest.raises(UserError, match=r"model\.safetensors is not as it was exported"):
            load()


def test_sampled_checksums_depend_on_contents_alone(tmp_path):
    data = random.Random(0).randbytes(1_000_000)
    paths = [tmp_path / name for name in ("a", "b", "c", "d", "e")]
    for path, content in zip(paths, (data, data, data[:-1], data[:-1] + b"x", b""), strict=True):
        path.write_bytes(content)
    os.utime(paths[1], (0, 0))
    a, b, *others = sampled_checksums(paths)
    assert a == b and len({a, *others}) == 4
    assert len(set(sampled_checksums([paths[0], paths[3]], max_reads=4))) == 2  # two blocks: the first and the last


def test_of_a_small_file_every_byte_counts(tmp_path):
    data = random.Random(0).randbytes(MAX_BLOCKS * BLOCK_BYTES)
    (tmp_path / "a").write_bytes(data)
    before = sampled_checksums([tmp_path / "a"])
    for at in range(0, len(data), 1009):
        (tmp_path / "a").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert sampled_checksums([tmp_path / "a"]) != before
