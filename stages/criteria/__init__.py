"""Selection criteria, one module each.

A module defines ``choose(scores, n, allowed, *, option, ...)``: from the table of similarities (columns of
``stages.project.schemas.SCORE``) to the indices of n removed layers, all within the range `allowed`, which has at
least n layers. Its keyword-only parameters are the criterion's options in ``params.yaml``, under ``select.<name>``,
beside ``protect_first`` and ``protect_last``, from which the stage makes `allowed`. A new criterion is one new module,
named in ``params.yaml``.
"""
