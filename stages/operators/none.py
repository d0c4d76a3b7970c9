def solve(sums): pass
