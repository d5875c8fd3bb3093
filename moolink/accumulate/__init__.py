"""Gradient rounds of a group: what the torch and JAX accumulators have in common."""

from moolink.accumulate.accumulator import AccumulatorBase

__all__ = ["AccumulatorBase"]
