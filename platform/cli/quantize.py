"""`loraplex quantize MODEL OUT --scheme int4`: a quantized model as an artefact with a manifest, if it passes the quality gate.

`loraplex quantize MODEL --check-kv fp8` measures a KV type by the same figures, and writes nothing.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.cli.output import AsJson, print_document
from loraplex.platform.processes.environment import binding_threads
from loraplex.platform.processes.progress import shown_progress
from loraplex.platform.startup_errors import StartError

if TYPE_CHECKING:
    from loraplex.engine.offline_quantization.quality_gate import Quality

MAX_TEXT_BYTES = 64 << 20

Model = Annotated[str, typer.Argument(help="The unquantized model: a folder or hub id.")]
Out = Annotated[Path | None, typer.Argument(help="The folder to create; must not exist.")]
Kv = Annotated[
    str | None,
    typer.Option("--check-kv", help="fp8: measure this type of the KV cache instead, also on long prompts."),
]
EvaluationText = Annotated[
    Path | None,
    typer.Option(help="Text for the quality gate, UTF-8; default: text that the model generates."),
]
CalibrationText = Annotated[
    Path | None,
    typer.Option(help="Text that resembles the served requests, for the calibration of int4 (GPTQ)."),
]
Figure = Annotated[float | None, typer.Option(min=0.0)]


def quantize_command(
    model: Model,
    out: Out = None,
    scheme: Annotated[str | None, typer.Option(help="int8, int4 or fp8.")] = None,
    kv: Kv = None,
    text: EvaluationText = None,
    calibration: CalibrationText = None,
    max_perplexity_ratio: Figure = None,
    min_top1_agreement: Figure = None,
    max_kl: Annotated[float | None, typer.Option(min=0.0, help="In nats per token.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Quantize a base model, or check a KV type; exit code 1, and no artefact, if it loses more than the bounds allow."""
    if (kv is None) == (out is None and scheme is None) or (out is None) != (scheme is None):
        raise typer.BadParameter("allowed is MODEL OUT --scheme SCHEME, or MODEL --check-kv fp8")
    # Imported here: `--help` needs no torch.
    with binding_threads():
        from loraplex.engine.errors import EngineError
        from loraplex.engine.offline_quantization.kv_gate import KV_BOUNDS, check_kv
        from loraplex.engine.offline_quantization.quality_gate import bounds_of
        from loraplex.engine.offline_quantization.quantize_model import QuantizeJob, quantize_model

    figures = (max_perplexity_ratio, min_top1_agreement, max_kl)
    names = ("max_perplexity_ratio", "min_top1_agreement", "max_kl")
    given = {name: value for name, value in zip(names, figures, strict=True) if value is not None}
    with exit_codes(), shown_progress() as progress:
        try:
            if out is None or scheme is None:
                bounds = replace(KV_BOUNDS, **given)
                measured = check_kv(model, str(kv), _read(text), progress, dtype=dtype, device=device)
                late = {f"late_{name}": value for name, value in _figures(measured.late).items()}
                document, violations = _figures(measured.whole) | late, measured.violations(bounds)
            else:
                bounds = replace(bounds_of(scheme), **given)
                job = QuantizeJob(model, out, scheme, _read(text), bounds, _read(calibration), dtype, device)
                made = quantize_model(job, progress)
                violations = made.violations
                document = _figures(made.quality) | {
                    "bytes_before": made.bytes_before,
                    "bytes_after": made.bytes_after,
                    "artefact": None if violations else str(out),
                }
        except EngineError as error:
            raise StartError(str(error)) from error
    print_document(document | {"bounds": asdict(bounds), "violations": violations}, as_json)
    if violations:
        Console(stderr=True, soft_wrap=True).print(f"[red]refused:[/red] {escape('; '.join(violations))}")
        raise typer.Exit(1)


def _figures(quality: "Quality") -> dict[str, Any]:
    return {**asdict(quality), "perplexity_ratio": quality.perplexity_ratio}


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
