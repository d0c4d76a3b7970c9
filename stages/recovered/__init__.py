"""The recovered model: the adapter that describes it, the operators in it, its size.

Who evaluates a row imports all of these modules, so ``dvc.yaml`` names the folder as one dependency.
"""
