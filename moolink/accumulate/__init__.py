"""Gradient rounds of a group: the common part of the torch and JAX accumulators."""

from moolink.accumulate.accumulator import AccumulatorBase

__all__ = ["AccumulatorBase"]
