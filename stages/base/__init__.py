"""The base model: where it runs, how its layers are reached, how it is loaded.

Who imports one of these modules imports all of them, so ``dvc.yaml`` names the folder as one dependency.
"""
