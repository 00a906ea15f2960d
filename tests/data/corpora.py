"""Small corpora of real text (standard-library source) in every format, shared by the tests of this room."""

import bz2
import gzip
import json
import lzma
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet

STDLIB = Path(sysconfig.get_path("stdlib"))
SOURCES = ["abc.py", "bisect.py", "colorsys.py", "contextlib.py", "copy.py", "fnmatch.py", "glob.py", "heapq.py"]
SOURCES += ["html/entities.py", "json/decoder.py", "keyword.py", "linecache.py", "operator.py", "queue.py", "sched.py"]


def source_texts() -> list[str]:
    return [(STDLIB / name).read_bytes().decode() for name in SOURCES]


def functions() -> list[str]:
    """Some hundred short documents: the paragraphs of the sources, two of them empty."""
    paragraphs = [part for text in source_texts() for part in text.split("\n\n")]
    return [*paragraphs[:100], "", *paragraphs[100:300], ""]


def write_files(folder: Path) -> list[str]:
    """Write the sources as .py and .txt files; returns their texts in the order of the paths."""
    texts = source_texts()
    for i, text in enumerate(texts):
        path = folder / f"part{i % 3}" / f"{i:02d}{'.py' if i % 2 else '.txt'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return [p.read_bytes().decode() for p in sorted(folder.rglob("*")) if p.is_file()]


def write_jsonl(folder: Path, files: int = 2) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = functions()
    for f in range(files):
        lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts[f::files])]
        lines.insert(3, "\n")  # blank lines are no documents
        (folder / f"{f}.jsonl").write_text("".join(lines), encoding="utf-8")
    return [text for f in range(files) for text in texts[f::files]]


def write_parquet(folder: Path, files: int = 3, row_group_size: int = 20) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = functions()
    for f in range(files):
        table = pyarrow.table({"id": list(range(len(texts[f::files]))), "text": texts[f::files]})
        pyarrow.parquet.write_table(table, folder / f"{f}.parquet", row_group_size=row_group_size)
    return [text for f in range(files) for text in texts[f::files]]


def compress(data: bytes, ending: str) -> bytes:
    """`data` as a file with this ending holds it; "": as it is."""
    if ending == ".zst":
        with pyarrow.BufferOutputStream() as sink:
            with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
                stream.write(data)
            return sink.getvalue().to_pybytes()
    return {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[ending](data)


def encode(texts: list[str], ending: str) -> bytes:
    """A file of `texts` in the format of an ending such as .jsonl; .arrow: a file, .arrows: a stream."""
    table, sink = pyarrow.table({"id": list(range(len(texts))), "text": texts}), pyarrow.BufferOutputStream()
    records = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    match ending:
        case ".jsonl":
            return "\n\n".join(records).encode()
        case ".json":
            return f" [{', '.join(records)}]".encode()
        case ".csv":
            pyarrow.csv.write_csv(table, sink)
        case ".arrow" | ".arrows":
            create = pyarrow.ipc.new_file if ending == ".arrow" else pyarrow.ipc.new_stream
            with create(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=50)
    return sink.getvalue().to_pybytes()


def write_raw(path: Path, tokens: np.ndarray, dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens.astype(dtype).tofile(path)
    return path


def write_llmq(path: Path, tokens: np.ndarray, trained: np.ndarray | None, version: int = 2) -> Path:
    """llm.q's layout, written from its description: 256 int32 of header, int32 tokens, mask bits little-endian."""
    header = np.zeros(256, "<i4")
    header[:2] = np.frombuffer(b"BIN.TOK\n", "<i4")
    header[2:7] = [version, 4, len(tokens), 50_000 if version == 2 else 0, trained is not None]
    bits = b"" if trained is None else np.packbits(trained, bitorder="little").tobytes()
    path.write_bytes(header.tobytes() + tokens.astype("<i4").tobytes() + bits)
    return path


def write_llmc(path: Path, tokens: np.ndarray, dtype: str = "<u2") -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = [20240520 if dtype == "<u2" else 20240801, 1 if dtype == "<u2" else 7, len(tokens)]
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
    return path


def specs(root: Path) -> dict[str, list[dict[str, Any]]]:
    """For each dataset type, datasets small enough to go through several epochs in a test."""
    write_files(root / "files")
    write_jsonl(root / "jsonl")
    write_parquet(root / "parquet")
    for i, size in enumerate([700, 1, 333, 64]):
        write_raw(root / "shards" / f"{i}.bin", np.random.default_rng(i).integers(0, 1000, size))
    text = [
        {"type": "text", "paths": str(root / "files"), "tokenizer": "byte"},
        {"type": "text", "paths": [str(root / "jsonl"), f"{root}/parquet/*.parquet"], "tokenizer": "byte"},
    ]
    hf_text = [
        {"type": "hf_text", "dataset": "parquet", "data_files": f"{root}/parquet/*.parquet", "tokenizer": "byte"},
        {"type": "hf_text", "dataset": "json", "data_files": f"{root}/jsonl/*.jsonl", "tokenizer": "byte"},
    ]
    for spec in hf_text:
        spec["shuffle_buffer"] = 13
    token = [{"type": "token", "dataset_dir": str(root / "shards")}]
    parts = [{"weight": 2, **text[1]}, {"weight": 1, **hf_text[0]}, {"weight": 0.5, **token[0]}]
    mix = [{"type": "mix", "datasets": parts}]
    write_questions(root / "questions.jsonl")
    instruct = [{"type": "instruct", "dataset": f"{root}/questions.jsonl", "template": "gsm8k"}]
    chat = [{"type": "chat", "dataset": f"{root}/questions.jsonl", "template": "chatml"}]
    for spec in (*instruct, *chat):
        spec |= {"tokenizer": "byte", "window": 13}
    return {"token": token, "text": text, "hf_text": hf_text, "mix": mix, "instruct": instruct, "chat": chat}


def write_questions(path: Path, count: int = 60) -> list[dict[str, Any]]:
    """Sums of unlike length as question and answer, and as a conversation of four turns."""
    rows = []
    for i in range(count):
        numbers = [(7 * i + 3 * k) % 10 for k in range(2 + i % 5)]
        question, answer = f"What is {' + '.join(map(str, numbers))}?", f"It is {sum(numbers)}.\n#### {sum(numbers)}"
        turns = [("user", question), ("assistant", answer), ("user", "Sure?"), ("assistant", f"Yes, {sum(numbers)}.")]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append({"question": question, "answer": answer, "messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows
