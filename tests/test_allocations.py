import torch

from stages.allocations import peak_allocation

KIBIBYTE = 1024
FLOATS = KIBIBYTE // 4


def test_what_is_alive_at_once_counts() -> None:
    def one_after_the_other() -> None:
        for _ in range(5):
            torch.zeros(FLOATS)

    def together() -> None:
        kept = [torch.zeros(FLOATS) for _ in range(5)]
        del kept

    assert peak_allocation(one_after_the_other) == KIBIBYTE
    assert peak_allocation(together) == 5 * KIBIBYTE


def test_what_was_there_before_and_views_do_not_count() -> None:
    before = torch.zeros(FLOATS)

    def computation() -> None:
        before.add_(1)
        before.view(2, -1).t()[0].unsqueeze(0)
        kept = before[: FLOATS // 2] + 1
        kept.mul_(2)

    assert peak_allocation(computation) == KIBIBYTE // 2


def test_a_matrix_product_and_its_sum() -> None:
    states, change = torch.zeros(1, FLOATS, 16), torch.zeros(16, 16)

    def operator() -> object:
        return states + states @ change

    assert peak_allocation(operator) == 2 * 16 * KIBIBYTE
