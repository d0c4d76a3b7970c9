"""The base model: where it runs, how its layers are reached, how it is loaded.

Who loads a model imports all of these modules, so ``dvc.yaml`` names the folder as one dependency; `solve`, which loads
none, imports `device` alone.
"""
