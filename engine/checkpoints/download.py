"""Fetches a model of the Hugging Face hub into its cache: weights as safetensors only, never pickle, never code."""

from pathlib import Path

from loraplex.engine.errors import ModelError

ALLOWED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
# Sub-folders and `consolidated*` repeat the weights in other layouts.
IGNORED = ["*/*", "consolidated*"]


def download_model(model_id: str, *, cache_dir: Path | None = None, offline: bool = False) -> Path:
    """Return the folder of the snapshot of `owner/name` or `owner/name@revision`.

    With `offline` only the cache is used. Raises `ModelError` when the model is not available.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    name, _, revision = model_id.partition("@")
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            cache_dir=cache_dir,
            allow_patterns=ALLOWED,
            ignore_patterns=IGNORED,
            local_files_only=offline,
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {model_id!r}: no such folder, and not to be had from the hub: {reason}"
        ) from error
    return Path(folder)
