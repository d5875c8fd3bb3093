"""Learners written in PyTorch."""
