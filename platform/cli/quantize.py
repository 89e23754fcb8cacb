"""`loraplex quantize MODEL OUT --scheme int4`: a quantized model as an artefact with a manifest, if it passes the quality gate."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.cli.output import print_document
from loraplex.platform.server.progress import shown_progress
from loraplex.platform.startup_errors import StartError

MAX_TEXT_BYTES = 64 << 20

Figure = Annotated[float | None, typer.Option(min=0.0)]


def quantize_command(
    model: Annotated[str, typer.Argument(help="The unquantized model: a folder or hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to create; must not exist.")],
    scheme: Annotated[str, typer.Option(help="int8, int4 or fp8.")],
    text: Annotated[
        Path | None,
        typer.Option(help="Text for the quality gate, UTF-8; default: text that the model generates."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text that resembles the served requests, for the calibration of int4 (GPTQ)."),
    ] = None,
    max_perplexity_ratio: Figure = None,
    min_top1_agreement: Figure = None,
    max_kl: Annotated[float | None, typer.Option(min=0.0, help="In nats per token.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Quantize a base model; exit code 1, and no artefact, if it loses more than the bounds allow."""
    # Imported here: `--help` needs no torch.
    from loraplex.engine.errors import EngineError
    from loraplex.engine.offline_quantization.quality_gate import bounds_of
    from loraplex.engine.offline_quantization.quantize_model import (
        QuantizedModel,
        QuantizeJob,
        quantize_model,
    )

    given = {
        "max_perplexity_ratio": max_perplexity_ratio,
        "min_top1_agreement": min_top1_agreement,
        "max_kl": max_kl,
    }
    quantized: QuantizedModel
    with exit_codes(), shown_progress() as progress:
        try:
            bounds = dataclasses.replace(
                bounds_of(scheme), **{name: value for name, value in given.items() if value is not None}
            )
            job = QuantizeJob(model, out, scheme, _read(text), bounds, _read(calibration), dtype, device)
            quantized = quantize_model(job, progress)
        except EngineError as error:
            raise StartError(str(error)) from error
    document = {
        **dataclasses.asdict(quantized.quality),
        "perplexity_ratio": quantized.quality.perplexity_ratio,
        "bytes_before": quantized.bytes_before,
        "bytes_after": quantized.bytes_after,
        "bounds": dataclasses.asdict(bounds),
        "violations": quantized.violations,
        "artefact": None if quantized.violations else str(out),
    }
    print_document(document, as_json)
    if quantized.violations:
        listed = "; ".join(quantized.violations)
        Console(stderr=True, soft_wrap=True).print(f"[red]refused:[/red] {escape(listed)}")
        raise typer.Exit(1)


def _read(path: Path | None) -> str | None:
    """Read a text of bounded size. Raises `StartError`."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise StartError(f"{path}: larger than {MAX_TEXT_BYTES} bytes")
        return content.decode()
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartError(f"{path}: not UTF-8 text: {error}") from error
