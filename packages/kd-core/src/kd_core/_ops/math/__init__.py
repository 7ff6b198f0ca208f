"""Arithmetic, reductions and gradients of leaves; how keys are arranged it must not know."""
