"""Ghosted Layers: one module per pipeline stage, each run by DVC as ``python -m stages.<stage>``."""
