"""Uploads that must be refused: each spoils a good folder in one way, and says which check refuses it and how."""

import gzip
import json
import math
import os
import pickle  # noqa: TID251  # as an attack
from collections.abc import Mapping
from dataclasses import dataclass

from tests.adapters.validation.good_folder import (
    CONFIG,
    HIDDEN,
    PREFIX,
    RANK,
    WEIGHTS,
    A,
    B,
    good_config,
    write_file,
)
from tests.adapters.validation.spoiled_folders import (
    Spoil,
    appended,
    config,
    config_bytes,
    config_text,
    deep_header,
    drop,
    entry,
    entry_of,
    extra_file,
    hard_link,
    header,
    in_place_of,
    many_tensors,
    put,
    repeated_name,
    sparse,
    truncated,
    typed,
    weights,
    zip_archive,
)


@dataclass(frozen=True)
class BadUpload:
    name: str
    spoil: Spoil
    check: str
    subject: str
    message: str


NESTED = json.dumps(good_config()).replace('"none"', '"none", "x": ' + "[" * 20_000 + "]" * 20_000)
DORA = f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector"
TRAVERSAL = "base_model.model.../../../../etc/passwd.lora_A.weight"

CATASTROPHIC = r"(?:\w|\.|[a-z])*[!?]"
"""Exponential in a name's length, for `re` and `regex`."""
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
    BadUpload("integers", typed("I64"), "header", A, "dtype 'I64' is not one of"),
    BadUpload("overflowing shape", entry(shape=[2**32, 2**32, 2**32]), "header", A, "takes 316912650057057"),
    BadUpload("size of 2**33", entry(shape=[2**33]), "header", A, "an integer from 1 to 4294967296"),
    BadUpload("size of 0", entry(shape=[0, 16]), "header", A, "an integer from 1 to"),
    BadUpload("shape of true", entry(shape=[True, 64]), "header", A, "an integer from 1 to"),
    BadUpload("more fields", entry(code="import os"), "header", A, "exactly dtype, shape and data_offsets"),
    BadUpload(
        "metadata",
        header(lambda document: document.update({"__metadata__": {"a": {}}})),
        "header",
        "__metadata__",
        "strings",
    ),
    BadUpload("control character", put("a\x00b", 4), "header", "a", "printable characters"),
    BadUpload("long name", put("n" * 600, 4), "header", "nnn", "1 to 512"),
]
CONFIGS = [
    BadUpload("empty config", config_bytes(b""), "manifest", CONFIG, "is not JSON"),
    BadUpload("257 KB", config_bytes(b" " * 262_200), "files", CONFIG, "at most 262144 are allowed"),
    BadUpload("deep config", config_bytes(NESTED.encode()), "manifest", CONFIG, "more than 8 levels deep"),
    BadUpload(
        "key twice", config_text('"r": 4', '"r": 4, "r": 8'), "manifest", CONFIG, "repeats the key 'r'"
    ),
    BadUpload("NaN in JSON", config_text("8,", "NaN,"), "manifest", CONFIG, "holds NaN, which is not JSON"),
    BadUpload("infinite alpha", config_text("8,", "1e999,"), "manifest", "lora_alpha", "-1000000 to 1000000"),
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
    BadUpload(
        "modules_to_save",
        config(modules_to_save=["lm_head"]),
        "target_modules",
        "modules_to_save.lm_head",
        "holds no copy of it",
    ),
    BadUpload("DoRA", config(use_dora=True), "manifest", "use_dora", "DoRA is not supported"),
    BadUpload(
        "broken expression", config(target_modules="(_proj"), "manifest", "target_modules", "expression"
    ),
    BadUpload(
        "catastrophic expression",
        config(target_modules=CATASTROPHIC),
        "manifest",
        "target_modules",
        "more than 5 s to match",
    ),
    BadUpload(
        "layer_replication", config(layer_replication=[[0, 2]]), "manifest", "layer_replication", "replicated"
    ),
    BadUpload("unknown key", config(run_me="x"), "manifest", "run_me", "not a known field"),
    BadUpload(
        "PiSSA", config(init_lora_weights="pissa"), "manifest", "init_lora_weights", "changes the base"
    ),
    BadUpload(
        "path as target", config(target_modules=["../q_proj"]), "target_modules", "q_proj", "does not name it"
    ),
]
TENSORS = [
    BadUpload(
        "one tensor twice", put(f"_orig_mod.{A}", RANK, HIDDEN), "tensor_names", A, "is the same tensor as"
    ),
    BadUpload(
        "another adapter beside",
        put(B.replace("0.self_attn.q_proj.lora_B", "0.self_attn.k_proj.lora_B.two"), HIDDEN, RANK),
        "target_modules",
        "k_proj",
        "does not name it",
    ),
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
    BadUpload(
        "other target", config(target_modules=["v_proj"]), "target_modules", "q_proj", "does not name it"
    ),
    BadUpload(
        "no such module", config(target_modules=["c_attn"]), "target_modules", "q_proj", "does not name it"
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
