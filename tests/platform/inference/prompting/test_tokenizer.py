"""The gateway's tokenizer is loaded without torch; a folder without one is refused with a clear error."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.platform.inference.prompting.tokenizer import load_tokenizer
from loraplex.platform.startup_errors import StartError


def test_loading_needs_no_torch_and_keeps_the_template(tmp_path: Path, chat_tokenizer: Any) -> None:
    chat_tokenizer.save_pretrained(tmp_path)
    read = load_tokenizer(str(tmp_path))
    assert read.chat_template == chat_tokenizer.chat_template
    assert read.encode("hello world") == chat_tokenizer.encode("hello world")
    code = (
        "import sys; from loraplex.platform.inference.prompting.tokenizer import load_tokenizer; "
        f"load_tokenizer({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="tokenizer"):
        load_tokenizer(str(tmp_path))
