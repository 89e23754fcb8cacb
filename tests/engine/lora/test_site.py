"""`LoraSite`: what its table tells a kernel is where the tensors are."""

import torch

from loraplex.engine.lora.site import LoraSlice, make_site

CPU = torch.device("cpu")


def test_table_holds_addresses_and_ranks_until_removed() -> None:
    site = make_site(("q_proj", "k_proj"), 8, (6, 4), 5, CPU)
    assert (site.outputs, site.offsets.tolist()) == (10, [0, 6, 10])
    part = LoraSlice(torch.randn(3, 8), torch.randn(3, 4))
    site.install(2, (None, part))
    assert site.table[2].tolist() == [[0, 0, 0], [part.a.data_ptr(), part.b.data_ptr(), 3]]
    assert not site.table[[0, 1, 3, 4]].any()
    site.remove(2)
    site.remove(2)
    assert not site.table.any() and not site.slots
