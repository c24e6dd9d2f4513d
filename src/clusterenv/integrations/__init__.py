"""Other libraries on top of ClusterEnv: one module each, imported by name, so that nobody pays for the rest.

`sb3` (Stable-Baselines3 trains on the environments), `cleanrl` (scripts written for Gymnasium 0.29),
`envpool` (C++ environments inside the workers).
"""
