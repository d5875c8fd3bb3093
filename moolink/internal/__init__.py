"""Helpers that all of moolink uses and no program needs."""
