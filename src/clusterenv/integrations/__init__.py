"""Adapters for other libraries, one module each, imported by name.

`sb3` (Stable-Baselines3 trains on the environments), `cleanrl` (scripts written for Gymnasium 0.29),
`envpool` (C++ environments inside the workers), `loggers` (TensorBoard, W&B, MLflow).
"""
