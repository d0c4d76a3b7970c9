import math

import torch

from stages.similarity import similarity_sums


def test_exact_angles() -> None:
    right, half = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0])
    up = torch.tensor([0.0, 3.0])
    states = torch.stack([right, half, up, -right])[:, None, :].double()
    cosine, angular = similarity_sums(states)
    assert torch.allclose(cosine[0], torch.tensor([1, math.sqrt(0.5), 0, -1]).double(), atol=1e-12)
    assert torch.allclose(angular[0], torch.tensor([0, 0.25, 0.5, 1]).double(), atol=1e-7)


def test_sums_over_tokens_do_not_depend_on_the_chunk() -> None:
    states = torch.randn(4, 37, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cosine, angular = similarity_sums(states, chunk=10)
    expected = torch.nn.functional.cosine_similarity(states[1], states[3], dim=-1)
    assert torch.isclose(cosine[1, 3], expected.sum())
    assert torch.isclose(angular[1, 3], (expected.arccos() / math.pi).sum())


def test_equal_states_of_any_size_stay_inside_the_domain() -> None:
    states = torch.randn(1, 200, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e8
    cosine, angular = similarity_sums(torch.cat([states, states * 3]))
    assert torch.isfinite(angular).all()
    assert torch.isclose(cosine[0, 1], torch.tensor(200.0).double())
