"""Learners written in JAX."""
