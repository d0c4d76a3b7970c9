def solve(sums, *, ridge): pass
