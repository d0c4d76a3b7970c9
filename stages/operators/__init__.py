"""Recovery operators, one module each.

A module defines ``solve(sums, *, option, ...)``: from the :class:`~stages.sums.BoundarySums` of a boundary to the
operator W, float64 [C, C] on the sums' device, of h_end ~ h_start W; or None where there is no operator. Its
keyword-only parameters are the operator's options in ``params.yaml``, under ``solve.<name>``. A new operator is one new
module, named in ``params.yaml``.
"""
