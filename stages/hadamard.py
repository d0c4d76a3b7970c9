"""Orthonormal Hadamard matrices, computed: Sylvester's doubling times one of Paley's constructions."""

import math

import torch
from torch import Tensor

from stages.project.errors import UserError


def hadamard(order: int) -> Tensor:
    """The orthonormal Hadamard matrix H of the given order, float64 on the host, entries ±1/sqrt(order), H H^T = I.

    H is the Kronecker product of a Sylvester matrix of order 2^k and a Paley matrix of order m, order = 2^k m with the
    largest k for which one of the constructions gives m (Paley, "On orthogonal matrices", 1933): order q + 1 for a
    prime power q = 3 mod 4, order 2 (q + 1) for a prime power q = 1 mod 4. Raises UserError naming the order when none
    does.
    """
    signs = _signs(order)
    if signs is None:
        raise UserError(f"no Hadamard matrix of order {order} can be constructed (Sylvester and Paley)")
    return signs / math.sqrt(order)


def constructible(order: int) -> bool:
    """Whether :func:`hadamard` can build this order."""
    return _factor(order) is not None


def _signs(order: int) -> Tensor | None:
    factor = _factor(order)
    if factor is None:
        return None
    signs = _paley(factor)
    sylvester = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(signs) < order:
        signs = torch.kron(sylvester, signs)
    return signs


def _factor(order: int) -> int | None:
    """The smallest order m of a Paley matrix, or 1, with order / m a power of two."""
    candidates = []
    size = order
    while size >= 1:
        candidates.append(size)
        if size % 2:
            break
        size //= 2
    for size in reversed(candidates):
        if size in (1, 2) or (size % 4 == 0 and (_first_kind(size) or _second_kind(size))):
            return size
    return None


def _first_kind(size: int) -> bool:
    return (size - 1) % 4 == 3 and _prime_power(size - 1) is not None


def _second_kind(size: int) -> bool:
    return (size // 2 - 1) % 4 == 1 and _prime_power(size // 2 - 1) is not None


def _paley(size: int) -> Tensor:
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if size == 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    if _first_kind(size):
        core = _bordered(size - 1, -1.0)
        return core + torch.eye(size, dtype=torch.float64)
    conference = _bordered(size // 2 - 1, 1.0)
    zero = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    nonzero = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    return torch.kron(conference, nonzero) + torch.kron(torch.eye(size // 2, dtype=torch.float64), zero)


def _bordered(q: int, sign: float) -> Tensor:
    """[[0, 1], [sign 1, Q]] of order q + 1, Q the Jacobsthal matrix of GF(q)."""
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = sign
    matrix[1:, 1:] = _jacobsthal(q)
    return matrix


def _jacobsthal(q: int) -> Tensor:
    """Q[a, b] = chi(a - b) over GF(q), chi the quadratic character: 1 on non-zero squares, -1 on the others."""
    prime, degree = _prime_power(q) or (0, 0)
    elements = [_digits(value, prime, degree) for value in range(q)]
    modulus = _irreducible(prime, degree)
    squares = {_multiply(element, element, prime, modulus) for element in elements[1:]}
    zero = elements[0]

    def character(element: tuple[int, ...]) -> float:
        return 0.0 if element == zero else 1.0 if element in squares else -1.0

    values = torch.tensor([character(element) for element in elements], dtype=torch.float64)
    digits = torch.tensor(elements)
    difference = (digits[:, None, :] - digits[None, :, :]) % prime
    index = (difference * prime ** torch.arange(degree)).sum(dim=-1)
    return values[index]


def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with q = p^k and p prime, or None."""
    if q < 2:
        return None
    prime = next((p for p in range(2, int(q**0.5) + 1) if q % p == 0), q)
    degree = 0
    while q % prime == 0:
        q //= prime
        degree += 1
    return (prime, degree) if q == 1 else None


def _digits(value: int, base: int, length: int) -> tuple[int, ...]:
    return tuple(value // base**position % base for position in range(length))


def _multiply(a: tuple[int, ...], b: tuple[int, ...], prime: int, modulus: tuple[int, ...]) -> tuple[int, ...]:
    """Product of two polynomials over GF(prime), lowest coefficient first, modulo the monic `modulus`."""
    product = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] = (product[i + j] + x * y) % prime
    degree = len(modulus) - 1
    for top in range(len(product) - 1, degree - 1, -1):
        lead = product[top]
        for offset, coefficient in enumerate(modulus):
            product[top - degree + offset] = (product[top - degree + offset] - lead * coefficient) % prime
    return tuple(product[:degree])


def _irreducible(prime: int, degree: int) -> tuple[int, ...]:
    """The first monic polynomial of the given degree over GF(prime) without a factor of lower degree."""
    if degree == 1:
        return (0, 1)
    for low in range(prime**degree):
        candidate = (*_digits(low, prime, degree), 1)
        divisors = (
            (*_digits(value, prime, size), 1) for size in range(1, degree // 2 + 1) for value in range(prime**size)
        )
        if not any(_divides(divisor, candidate, prime) for divisor in divisors):
            return candidate
    raise AssertionError("every finite field has an irreducible polynomial of every degree")


def _divides(divisor: tuple[int, ...], polynomial: tuple[int, ...], prime: int) -> bool:
    remainder = _multiply(polynomial, (1,), prime, divisor)
    return not any(remainder)
