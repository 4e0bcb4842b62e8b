"""One rank of a host loads a model, and the others get its values."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import distributed

from families import SMALL, batch_for, bert, llama
from hf_l2l import L2LConfig, attach_l2l, detach_l2l, load_once
from rank_pool import digest

KINDS = {"bert": hf.AutoModelForSequenceClassification, "llama": hf.AutoModelForCausalLM}


def loaded(name: str, folder: str) -> tuple[bool, str, str, list[str]]:
    """In a rank: whether the model had values before it was attached; digests of its values then, and of a step."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    with load_once():
        model = KINDS[name].from_pretrained(folder)
    had_values = not any(p.is_meta for p in model.parameters())
    eps = attach_l2l(model, L2LConfig())
    values = digest(*model.parameters(), *model.buffers())
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.eval()(**batch_for(model, seed=rank)).loss.backward()
    optimizer.step()
    eps.synchronize()
    after = digest(*model.parameters())
    detach_l2l(model)
    assert model(**batch_for(model)).loss.isfinite()
    if rank:
        with load_once(), pytest.raises(ValueError, match="without a device_map"):
            KINDS[name].from_pretrained(folder, device_map="cpu")
    return had_values, values, after, [n for n, b in model.named_buffers() if b.is_meta]


@pytest.mark.parametrize("name", KINDS)
def test_others_get_the_values_of_the_first(pool, tmp_path, name):
    torch.manual_seed(1)
    model = bert() if name == "bert" else llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    found = pool(2).run(loaded, name, str(tmp_path))
    assert [each[0] for each in found] == [True, False]
    assert found[0][1] == found[1][1] == digest(*model.parameters(), *model.buffers())
    assert found[0][2] == found[1][2] != found[0][1]
    assert [each[3] for each in found] == [[], []]


def test_one_process_loads_as_ever(tmp_path):
    bert().save_pretrained(tmp_path)
    with load_once():
        model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert not any(p.is_meta for p in model.parameters())
    assert SMALL["hidden_size"] == model.config.hidden_size
