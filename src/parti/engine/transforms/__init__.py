"""What is done to one process to make it faster; see `parti.engine.tuning` for the order.

Each module of this package holds one transform: a function from models (or optimizers) to a
`Change`, which can be put on and taken off, or None where there is nothing to do. They know
nothing of ranks, batches or steps.
"""
