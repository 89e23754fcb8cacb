"""`LoraSite`: the addresses in its table are those of the tensors."""

import torch
from tests.engine.lora.installed_slices import install, remove

from loraplex.engine.lora.site import LoraSlice, make_site

CPU = torch.device("cpu")


def test_table_holds_ranks_and_addresses_until_removed() -> None:
    site = make_site(("q_proj", "k_proj"), 8, (6, 4), 5, CPU, max_rank=40)
    assert (site.outputs, site.offsets.tolist(), site.max_pages) == (10, [0, 6, 10], 3)
    part = LoraSlice(torch.randn(17, 8), torch.randn(17, 4))
    install(site, 2, (None, part))
    a_pages = [part.a.data_ptr(), part.a[16].data_ptr(), 0]
    b_pages = [part.b.data_ptr(), part.b[16].data_ptr(), 0]
    assert site.table[2].tolist() == [[0] * 8, [17, 0, *a_pages, *b_pages]]
    assert not site.table[[0, 1, 3, 4]].any()
    remove(site, 2)
    remove(site, 2)
    assert not site.table.any() and not site.slots


def test_a_quantized_entry_holds_where_its_scales_are() -> None:
    site = make_site(("o_proj",), 8, (6,), 1, CPU)
    part = LoraSlice(torch.ones(3, 8, dtype=torch.int8), torch.ones(3, 6, dtype=torch.int8), torch.randn(3))
    assert part.scales is not None
    install(site, 0, (part,))
    assert site.table[0, 0, :2].tolist() == [3, part.scales.data_ptr()]
