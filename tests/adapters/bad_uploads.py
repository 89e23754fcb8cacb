"""Uploads that must be refused: each spoils a good folder in one way, and says which check refuses it and how."""

import gzip
import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.limits import AdapterLimits
from loraplex.engine.models.config import ModelConfig

HIDDEN, LAYERS, VOCAB, RANK = 16, 2, 40, 4
LIMITS = AdapterLimits(max_weights_bytes=64 << 20)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers"
A, B = (f"{PREFIX}.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8}

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=HIDDEN // 4,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    uses_rope=(True,) * LAYERS,
    sliding_window=(None,) * LAYERS,
    attention_scale=0.5,
    hf_config={},
    eos_token_ids=(2,),
)

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
Header = dict[str, dict[str, Any]]
Spoil = Callable[[Path], object]


@dataclass(frozen=True)
class BadUpload:
    name: str
    spoil: Spoil
    check: str
    subject: str
    message: str


def values(*shape: int, value: float = 0.5) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", shape, struct.pack("<f", value) * math.prod(shape)


def good_tensors() -> Tensors:
    """Rank 4 on q_proj of both layers."""
    tensors: Tensors = {}
    for layer in range(LAYERS):
        path = f"{PREFIX}.{layer}.self_attn.q_proj"
        tensors[f"{path}.lora_A.weight"] = values(RANK, HIDDEN)
        tensors[f"{path}.lora_B.weight"] = values(HIDDEN, RANK)
    return tensors


def good_config() -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "../../etc/passwd",
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }


def header_of(tensors: Tensors) -> tuple[Header, bytes]:
    header: Header = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    return header, data


def write_file(folder: Path, header: object, data: bytes = b"", *, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def write_good(folder: Path) -> None:
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(good_config()))
    write_file(folder, *header_of(good_tensors()))


def weights(content: bytes) -> Spoil:
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


def config_bytes(content: bytes) -> Spoil:
    return lambda folder: (folder / CONFIG).write_bytes(content)


def config(**changes: Any) -> Spoil:
    return lambda folder: (folder / CONFIG).write_text(json.dumps(good_config() | changes))


def config_text(old: str, new: str) -> Spoil:
    return config_bytes(json.dumps(good_config()).replace(old, new).encode())


def tensors(change: Callable[[Tensors], object]) -> Spoil:
    """Other tensors, in a file that is well made."""

    def spoil(folder: Path) -> None:
        changed = good_tensors()
        change(changed)
        write_file(folder, *header_of(changed))

    return spoil


def header(change: Callable[[Header], object]) -> Spoil:
    """Another header before the same data."""

    def spoil(folder: Path) -> None:
        changed, data = header_of(good_tensors())
        change(changed)
        write_file(folder, changed, data)

    return spoil


def put(name: str, *shape: int, value: float = 0.5) -> Spoil:
    return tensors(lambda held: held.update({name: values(*shape, value=value)}))


def entry(**changes: Any) -> Spoil:
    """Of the first tensor, whose 256 bytes come first."""
    return header(lambda held: held[A].update(changes))


def entry_of(name: str, **changes: Any) -> Spoil:
    return header(lambda held: held[name].update(changes))


def typed(dtype: str) -> Spoil:
    size = RANK * HIDDEN * BYTES[dtype]
    return tensors(lambda held: held.update({A: (dtype, (RANK, HIDDEN), bytes(size))}))


def many_tensors(count: int) -> Spoil:
    def spoil(folder: Path) -> None:
        entries = {
            f"t{n}": {"dtype": "F16", "shape": [1], "data_offsets": [2 * n, 2 * n + 2]} for n in range(count)
        }
        write_file(folder, entries, bytes(2 * count))

    return spoil


def zip_archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / WEIGHTS, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)


def repeated_name(folder: Path) -> None:
    held, data = header_of(good_tensors())
    raw = json.dumps(held).encode()
    write_file(folder, raw[:-1] + b"," + json.dumps({A: held[A]}).encode()[1:], data)


def truncated(count: int) -> Spoil:
    return lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - count)


def appended(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"PK\x03\x04" + bytes(100))


def in_place_of(name: str, make: Callable[[Path], object]) -> Spoil:
    """Something that is no file of its own under the file's name."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return spoil


def sparse(size: int) -> Spoil:
    return lambda folder: os.truncate(folder / WEIGHTS, size)


def hard_link(path: Path) -> None:
    other = path.parent.parent / f"{path.parent.name}.linked"
    other.write_bytes(b"{}")
    os.link(other, path)


def drop(*names: str) -> Spoil:
    return tensors(lambda held: [held.pop(name) for name in names])


def extra_file(name: str, content: bytes = b"x") -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def deep_header(folder: Path) -> None:
    write_file(folder, b'{"a":' * 50_000 + b"1" + b"}" * 50_000)


NESTED = json.dumps(good_config()).replace('"none"', '"none", "x": ' + "[" * 20_000 + "]" * 20_000)
DORA = f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector"
TRAVERSAL = "base_model.model.../../../../etc/passwd.lora_A.weight"

FILES = [
    BadUpload("empty file", weights(b""), "header", WEIGHTS, "has 0 bytes, too few"),
    BadUpload("pickle", weights(pickle.dumps({"a": [1] * 50})), "header", WEIGHTS, "looks like a pickle"),
    BadUpload("zip", zip_archive, "header", WEIGHTS, "looks like a zip archive"),
    BadUpload("gzip", weights(gzip.compress(bytes(4096))), "header", WEIGHTS, "looks like a gzip archive"),
    BadUpload("gguf", weights(b"GGUF\3\0\0\0" + bytes(64)), "header", WEIGHTS, "looks like a GGUF file"),
    BadUpload("text", weights(b"not a file of tensors"), "header", WEIGHTS, "declares a header of"),
    BadUpload("sparse", sparse(8 << 40), "files", WEIGHTS, "at most 67108864 are allowed"),
    BadUpload(
        "symbolic link",
        in_place_of(WEIGHTS, lambda path: path.symlink_to("/etc/passwd")),
        "files",
        WEIGHTS,
        "is a symbolic link",
    ),
    BadUpload("pipe", in_place_of(WEIGHTS, os.mkfifo), "files", WEIGHTS, "is not a regular file"),
    BadUpload("folder", in_place_of(CONFIG, os.mkdir), "files", CONFIG, "is not a regular file"),
    BadUpload("hard link", in_place_of(CONFIG, hard_link), "files", CONFIG, "has another hard link"),
    BadUpload("no weights", in_place_of(WEIGHTS, lambda path: None), "files", WEIGHTS, "is missing"),
    BadUpload("pickle beside", extra_file("adapter_model.bin"), "files", "adapter_model.bin", "is a pickle"),
    BadUpload("code beside", extra_file("modeling.py"), "files", "modeling.py", "not one of the two files"),
    BadUpload(
        "template beside", extra_file("chat_template.jinja"), "files", "chat_template.jinja", "not one of"
    ),
]
HEADERS = [
    BadUpload("header cut off", truncated(1100), "header", WEIGHTS, "declares a header of"),
    BadUpload("data cut off", truncated(100), "header", WEIGHTS, "is truncated"),
    BadUpload("data appended", appended, "header", WEIGHTS, "holds bytes after the last tensor"),
    BadUpload(
        "length of 2**63",
        lambda folder: write_file(folder, {}, length=2**63),
        "header",
        WEIGHTS,
        "declares a header of 9223372036854775808 bytes",
    ),
    BadUpload("100,000 tensors", many_tensors(100_000), "header", WEIGHTS, "at most 1048576 are allowed"),
    BadUpload("9,000 tensors", many_tensors(9_000), "header", WEIGHTS, "at most 8192 are allowed"),
    BadUpload("no tensor", lambda folder: write_file(folder, {}), "header", WEIGHTS, "holds no tensor"),
    BadUpload(
        "a list", lambda folder: write_file(folder, b"[1]"), "header", WEIGHTS, "does not begin with '{'"
    ),
    BadUpload("deep header", deep_header, "header", WEIGHTS, "nested more than 3 levels"),
    BadUpload("repeated tensor", repeated_name, "header", WEIGHTS, "repeats the key"),
    BadUpload("overlap", entry_of(B, data_offsets=[128, 384]), "header", B, "overlaps the tensor before"),
    BadUpload("hole", entry_of(B, data_offsets=[260, 516]), "header", B, "leaves a hole before it"),
    BadUpload("falling offsets", entry(data_offsets=[256, 0]), "header", A, "must rise from 0"),
    BadUpload("negative offset", entry(data_offsets=[-256, 0]), "header", A, "must rise from 0"),
    BadUpload("fractions", entry(data_offsets=[0.0, 256.0]), "header", A, "must be two integers"),
    BadUpload(
        "offset of 2**70",
        entry_of(B, data_offsets=[2**70, 2**70 + 256]),
        "header",
        f"{PREFIX}.1.self_attn.q_proj.lora_A.weight",
        "leaves a hole before it",
    ),
    BadUpload("float64", typed("F64"), "header", A, "dtype 'F64' is not one of"),
    BadUpload("integers", typed("I64"), "header", A, "dtype 'I64' is not one of"),
    BadUpload("overflowing shape", entry(shape=[2**32, 2**32, 2**32]), "header", A, "takes 316912650057057"),
    BadUpload("size of 2**33", entry(shape=[2**33]), "header", A, "an integer from 1 to 4294967296"),
    BadUpload("size of 0", entry(shape=[0, 16]), "header", A, "an integer from 1 to"),
    BadUpload("shape of true", entry(shape=[True, 64]), "header", A, "an integer from 1 to"),
    BadUpload("more fields", entry(code="import os"), "header", A, "exactly dtype, shape and data_offsets"),
    BadUpload(
        "metadata",
        header(lambda held: held.update({"__metadata__": {"a": {}}})),
        "header",
        "__metadata__",
        "strings",
    ),
    BadUpload("control character", put("a\x00b", 4), "header", "a", "printable characters"),
    BadUpload("long name", put("n" * 600, 4), "header", "nnn", "1 to 512"),
]
CONFIGS = [
    BadUpload("empty config", config_bytes(b""), "manifest", CONFIG, "is not JSON"),
    BadUpload("65 KB", config_bytes(b" " * 65_600), "files", CONFIG, "at most 65536 are allowed"),
    BadUpload("deep config", config_bytes(NESTED.encode()), "manifest", CONFIG, "more than 8 levels deep"),
    BadUpload(
        "key twice", config_text('"r": 4', '"r": 4, "r": 8'), "manifest", CONFIG, "repeats the key 'r'"
    ),
    BadUpload("NaN in JSON", config_text("8,", "NaN,"), "manifest", CONFIG, "holds NaN, which is not JSON"),
    BadUpload("infinite alpha", config_text("8,", "1e999,"), "manifest", "lora_alpha", "at most 1000000"),
    BadUpload("negative alpha", config(lora_alpha=-1), "manifest", "lora_alpha", "a number above 0"),
    BadUpload("alpha of text", config(lora_alpha="8"), "manifest", "lora_alpha", 'not "8"'),
    BadUpload("many digits", config_text("8,", "1" * 5000 + ","), "manifest", CONFIG, "more digits than"),
    BadUpload(
        "byte order mark",
        config_bytes(b"\xef\xbb\xbf" + json.dumps(good_config()).encode()),
        "manifest",
        CONFIG,
        "BOM",
    ),
    BadUpload(
        "UTF-16",
        config_bytes(json.dumps(good_config()).encode("utf-16")),
        "manifest",
        CONFIG,
        "is not UTF-8 at byte 0",
    ),
    BadUpload("a list as config", config_bytes(b"[]"), "manifest", CONFIG, "must be a JSON object"),
    BadUpload("rank 0", config(r=0), "manifest", "r", "an integer from 1 to 256, not 0"),
    BadUpload("rank 257", config(r=257), "manifest", "r", "an integer from 1 to 256, not 257"),
    BadUpload("rank true", config(r=True), "manifest", "r", "not true"),
    BadUpload(
        "rank by pattern", config(rank_pattern={"q_proj": 300}), "manifest", "rank_pattern.q_proj", "300"
    ),
    BadUpload("no LoRA", config(peft_type="IA3"), "manifest", "peft_type", 'must be "LORA", not "IA3"'),
    BadUpload("bias", config(bias="lora_only"), "manifest", "bias", 'must be "none"'),
    BadUpload(
        "modules_to_save", config(modules_to_save=["lm_head"]), "manifest", "modules_to_save", "low-rank"
    ),
    BadUpload("DoRA", config(use_dora=True), "manifest", "use_dora", "DoRA is not supported"),
    BadUpload(
        "regular expression", config(target_modules=".*_proj"), "manifest", "target_modules", "is refused"
    ),
    BadUpload(
        "catastrophic expression", config(target_modules="(a+)+$"), "manifest", "target_modules", '"(a+)+$"'
    ),
    BadUpload(
        "expression in a list", config(target_modules=["(x|x)*q"]), "manifest", "target_modules", "literal"
    ),
    BadUpload(
        "layer_replication", config(layer_replication=[[0, 2]]), "manifest", "layer_replication", "replicated"
    ),
    BadUpload(
        "auto_mapping",
        config(auto_mapping={"base_model_class": "os"}),
        "manifest",
        "auto_mapping",
        "custom base classes",
    ),
    BadUpload("unknown key", config(run_me="x"), "manifest", "run_me", "not a known field"),
    BadUpload(
        "PiSSA", config(init_lora_weights="pissa"), "manifest", "init_lora_weights", "changes the base"
    ),
    BadUpload(
        "path as target", config(target_modules=["../q_proj"]), "manifest", "target_modules", "literal"
    ),
]
TENSORS = [
    BadUpload("path in a name", put(TRAVERSAL, 4, 16), "tensor_names", "etc/passwd", "matches no module"),
    BadUpload("unknown tensor", put("optimizer.state", 4), "tensor_names", "optimizer", "matches no module"),
    BadUpload("magnitude", put(DORA, 16), "tensor_names", DORA, "DoRA is not supported"),
    BadUpload(
        "saved module",
        put("base_model.model.score.modules_to_save.weight", 2),
        "tensor_names",
        "score",
        "modules_to_save",
    ),
    BadUpload("bias of a module", put(B.replace("weight", "bias"), 16), "tensor_names", "bias", "biases"),
    BadUpload("no A", drop(A), "pairs", "layers.0.self_attn.q_proj", "lora_A is missing"),
    BadUpload("no B", drop(B), "pairs", "layers.0.self_attn.q_proj", "lora_B is missing"),
    BadUpload("no layer", drop(A, B), "target_modules", "layers.0", "holds no tensor for it"),
    BadUpload(
        "other target", config(target_modules=["v_proj"]), "target_modules", "q_proj", "does not name it"
    ),
    BadUpload(
        "no such module", config(target_modules=["c_attn"]), "target_modules", "c_attn", "no such module"
    ),
    BadUpload("width", put(A, RANK, 15), "shapes", A, "[rank, 16], not [4, 15]"),
    BadUpload("height", put(B, 17, RANK), "shapes", B, "[16, rank], not [17, 4]"),
    BadUpload("rank of the file", put(A, 5, HIDDEN), "ranks", A, "rank 5, adapter_config.json says 4"),
    BadUpload("rank of the config", config(r=8), "ranks", A, "rank 4, adapter_config.json says 8"),
    BadUpload("NaN", put(B, HIDDEN, RANK, value=math.nan), "finite", B, "64 values that are NaN"),
    BadUpload(
        "infinity", put(A, RANK, HIDDEN, value=-math.inf), "finite", A, "64 values that are NaN or inf"
    ),
]
BAD_UPLOADS: Mapping[str, BadUpload] = {
    upload.name: upload for upload in (*FILES, *HEADERS, *CONFIGS, *TENSORS)
}
