"""Token embedding, with adapters trained on it."""

import torch
import torch.nn.functional as F

from loraplex.engine.kernels.reference.sgmv import padded_group
from loraplex.engine.lora.batch import HostLoraBatch, LoraBatch
from loraplex.engine.lora.device_batch import DeviceLoraBatch
from loraplex.engine.lora.site import LoraSite


class Embedding:
    """E[token], plus B A[:, token] for rows whose adapter trained the embedding."""

    def __init__(self, weight: torch.Tensor, site: LoraSite, multiplier: float = 1.0) -> None:
        self._weight = weight
        self._site = site
        self._multiplier = multiplier

    def __call__(self, token_ids: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """token_ids [rows] -> [rows, hidden]. Few adapters train it, so groups without a part cost nothing."""
        hidden = F.embedding(token_ids, self._weight)
        if lora is not None:
            add_adapters(token_ids, hidden, self._site, lora)
        return hidden if self._multiplier == 1.0 else hidden * self._multiplier


def add_adapters(token_ids: torch.Tensor, hidden: torch.Tensor, site: LoraSite, lora: LoraBatch) -> None:
    """hidden [rows, hidden] += B A[:, token] in place, for rows whose adapter has a part at `site`."""
    if isinstance(lora, DeviceLoraBatch) and lora.acts_at(site):
        from loraplex.engine.kernels.triton import lora_embedding

        lora_embedding.add_embedding(token_ids, hidden, site, lora)
    elif isinstance(lora, HostLoraBatch) and site.slots:
        _add_on_host(token_ids, hidden, site, lora)


def _add_on_host(token_ids: torch.Tensor, hidden: torch.Tensor, site: LoraSite, lora: HostLoraBatch) -> None:
    groups = lora.groups
    for index, slot in enumerate(groups.host_slots):
        (part,) = site.slots.get(slot, (None,))
        if part is None:
            continue
        rows = groups.order[groups.host_starts[index] : groups.host_starts[index + 1]]
        columns = padded_group(part.a.index_select(1, token_ids.index_select(0, rows)).t())  # [rows, rank]
        if part.scales is None:
            delta = columns @ part.b
        else:
            delta = ((columns.float() * part.scales) @ part.b.float()).to(hidden.dtype)
        hidden.index_add_(0, rows, delta[: len(rows)])
