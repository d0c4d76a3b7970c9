"""Recovery operators, one module each.

A module defines ``solve(sums, *, option, ...)``: from the :class:`~stages.sums.BoundarySums` of a boundary to the
operator W, float64 [C, C] on the sums' device, of h_end ~ h_start W; or to a :class:`~stages.bridge.Bridge`, where it
is more than that matrix, such as two factors, a bias, or a new down projection in the layer before the cut; or to None
where there is no operator. Its keyword-only parameters are the operator's options in ``params.yaml``, under
``solve.<name>``, their annotations what these may be (:mod:`stages.project.options`). A new operator is one new module,
named in ``params.yaml``.
"""
