"""The validation of a version, check by check, in the order in which the checks run.

Invariant: every check that the validation can fail has a remediation. Findings quote a tenant's files: they are text,
never markup.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from loraplex.tenants.registry.records import CheckDocument, ReportDocument

CheckState: TypeAlias = Literal["passed", "warning", "failed", "open"]
CHECKS: Final = (
    *("files", "manifest", "header", "tensor_names", "target_modules", "patterns", "pairs"),
    *("shapes", "ranks", "base_copies", "finite", "effect", "probe"),
)
REMEDIATIONS: Final[Mapping[str, str]] = {
    "files": "Upload exactly adapter_config.json and adapter_model.safetensors, as PEFT's save_pretrained writes them. Leave out"
    " checkpoints, tokenizer files and pickled weights.",
    "manifest": "Change the named field of adapter_config.json. Only plain LoRA is served: convert DoRA, PiSSA or LoftQ adapters"
    " to LoRA in PEFT before you save them. Regular expressions are matched as PEFT does, and must end in 5 s.",
    "header": "The weights are damaged or in another format. Save them again with safe_serialization=True, compare the file's"
    " size with the original, and upload again.",
    "tensor_names": "The named tensor belongs to no module of the base model, or to a part that is not LoRA. Train on the base"
    " model that this server serves, without modules_to_save, biases or added tokens.",
    "target_modules": "Let target_modules name every module that has tensors in the file, and modules_to_save only modules with"
    " a copy in it. An edited configuration or a file from another run causes this.",
    "patterns": "Remove the key from rank_pattern or alpha_pattern, or correct it: it must name a module that the adapter changes.",
    "pairs": "The module has lora_A without lora_B or the reverse. Save the whole adapter again; do not filter its tensors.",
    "shapes": "The adapter was trained on a base model of another size. Train it on the base model that this server serves, and"
    " upload again.",
    "ranks": "Let r and rank_pattern of adapter_config.json give the rank that the tensors have. Upload both files of one run.",
    "base_copies": "Save with save_embedding_layers=False, or train on the base model that this server serves, without"
    " modules_to_save and without new tokens. Copies that equal its own are accepted, and not used.",
    "finite": "The training diverged. Take an earlier checkpoint, or train again with a lower learning rate or in bfloat16.",
    "effect": "Every update is zero, as before the first step of training. Check that you saved the trained weights.",
    "probe": "The adapter could not be run exactly on this server's base model. Lower lora_alpha or the rank if its values are"
    " very large, and train on the base model that this server serves.",
    "memory": "The file needs too much memory to read, mostly because of a very large header. Save the adapter again with PEFT.",
    "cpu": "The file takes too long to read. Save the adapter again with PEFT, with fewer and larger tensors.",
    "deadline": "The file was not read in time. Upload it again; if it fails again, save the adapter again with PEFT.",
    "process": "The process that read the files ended. Upload them again; if it fails again, save the adapter again with PEFT.",
    "interrupted": "The server ended while it validated. The files are fine as far as is known: upload them again.",
    "patience": "The server could not finish the validation in time. Upload the files again.",
}
_OTHER: Final = "Save the adapter again with PEFT, and upload it again."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """`finding` is empty while the check is open; `remediation` is empty unless it failed."""

    name: str
    state: CheckState
    finding: str = ""
    remediation: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The checks in their order. `is_running`: the version is being validated."""

    checks: Sequence[CheckRow]
    is_running: bool

    @property
    def passed(self) -> int:
        """The number of checks that passed, with or without a warning."""
        return sum(check.state in ("passed", "warning") for check in self.checks)

    @property
    def warnings(self) -> int:
        return sum(check.state == "warning" for check in self.checks)

    @property
    def failed(self) -> CheckRow | None:
        return next((check for check in self.checks if check.state == "failed"), None)


def report_of(stored: ReportDocument, state: str) -> Report:
    """Return the report of a version in this state from what is stored. Checks that did not run yet are open while the version is
    being validated, and absent afterwards. A check that is stored twice counts once, as its last entry says.
    """
    found = {check.name: _row(check) for check in stored.checks}
    running = state == "validating"
    names = [name for name in CHECKS if name in found or running]
    names += [name for name in found if name not in CHECKS]
    return Report([found.get(name) or CheckRow(name=name, state="open") for name in names], running)


def remediation_of(check: str) -> str:
    """Say what the owner of an adapter that failed this check does about it."""
    return REMEDIATIONS.get(check, _OTHER)


def _row(check: CheckDocument) -> CheckRow:
    if not check.passed:
        remediation = remediation_of(check.name)
        return CheckRow(name=check.name, state="failed", finding=check.detail, remediation=remediation)
    state: CheckState = "warning" if check.warning else "passed"
    return CheckRow(name=check.name, state=state, finding=check.detail)
