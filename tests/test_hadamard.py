import pytest
import torch

from stages.hadamard import constructible, hadamard
from stages.project.errors import UserError


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 40, 52, 100, 576])
def test_orthonormal_with_entries_of_one_magnitude(order: int) -> None:
    H = hadamard(order)
    assert H.dtype == torch.float64
    assert torch.allclose(H @ H.T, torch.eye(order, dtype=torch.float64), atol=1e-12, rtol=0)
    assert torch.allclose(H.abs(), torch.full_like(H, order**-0.5), atol=1e-15, rtol=0)


def test_prime_power_fields() -> None:
    # 28 = 27 + 1 needs GF(27); 52 = 2 (25 + 1) needs GF(25): neither has a construction from a prime field.
    for order in (28, 52):
        assert constructible(order)


def test_powers_of_two_are_sylvesters() -> None:
    base = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    expected = torch.kron(base, torch.kron(base, base)) / 8**0.5
    assert torch.equal(hadamard(8), expected)


@pytest.mark.parametrize("order", [3, 6, 10, 92, 116, 4 * 39])
def test_impossible_order_is_named(order: int) -> None:
    assert not constructible(order)
    with pytest.raises(UserError, match=f"order {order} "):
        hadamard(order)


@pytest.mark.parametrize("order", [576, 768, 896, 1024, 1536, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 8192])
def test_hidden_sizes_of_common_models_are_covered(order: int) -> None:
    assert constructible(order)
