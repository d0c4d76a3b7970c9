"""What makes a module a stage: params.yaml, keys, paths, columns, artifacts, and errors a user can read.

Every stage imports all of it, so ``dvc.yaml`` names the folder as one dependency.
"""
