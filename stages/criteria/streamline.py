def choose(scores, n, allowed): pass
