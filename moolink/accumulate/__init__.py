"""Gradient rounds of a group: the common part of the torch and JAX accumulators."""

from moolink.accumulate.accumulator import AccumulatorBase
from moolink.accumulate.ordered import ordered_sum
from moolink.accumulate.totals import Totals
from moolink.accumulate.training_steps import TrainingStep

__all__ = ["AccumulatorBase", "Totals", "TrainingStep", "ordered_sum"]
