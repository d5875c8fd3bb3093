"""The broker's dashboard: a page, a JSON interface, and metrics for Prometheus (docs/dashboard.md).

It needs the extra `dashboard`. `moolink-broker --http` starts it.
"""
